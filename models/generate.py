"""The entry point of `python -m models.generate`."""

from models.commands.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
