"""The entry point of `python -m models.generate`. Do not import it: it would hide the function `models.generate`."""

from models.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
