"""The entry point of `python -m models.chat`."""

from models.commands.chat import main

if __name__ == "__main__":
    raise SystemExit(main())
