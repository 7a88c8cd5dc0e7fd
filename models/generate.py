"""`python -m models.generate`, and nothing else: imported, this file would hide the function `models.generate`."""

from models.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
