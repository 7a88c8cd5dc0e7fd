"""The entry point of `python -m models.generate`; imported, it would stand in `models` where the function does."""

from models.commands.generate import main

if __name__ != "__main__":
    raise ImportError(
        "models.generate is a function and a command: `import models`, or run `python -m models.generate`."
    )
raise SystemExit(main())
