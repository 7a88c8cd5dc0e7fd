"""``python -m models.generate``: see :mod:`models.cli`. The function ``models.generate`` lives in :mod:`models.decoding`."""

from models.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
