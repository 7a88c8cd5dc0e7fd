"""The entry point of `python -m models.calibrate`."""

from models.commands.calibrate import main

if __name__ == "__main__":
    raise SystemExit(main())
