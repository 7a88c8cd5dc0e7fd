"""The entry point of `python -m models.get`."""

from models.commands.get import main

if __name__ == "__main__":
    raise SystemExit(main())
