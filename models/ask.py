"""The entry point of `python -m models.ask`. Do not import it: it would hide the function `models.ask`."""

from models.asking_cli import main

if __name__ == "__main__":
    raise SystemExit(main())
