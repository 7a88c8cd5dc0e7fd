"""The entry point of `python -m models.ask`."""

from models.commands.ask import main

if __name__ == "__main__":
    raise SystemExit(main())
