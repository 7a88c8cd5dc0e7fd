"""The entry point of `python -m models.batch`."""

from models.commands.batch import main

if __name__ == "__main__":
    raise SystemExit(main())
