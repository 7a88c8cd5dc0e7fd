"""The entry point of `python -m models.ask`; imported, it would stand in `models` where the function does."""

from models.commands.ask import main

if __name__ != "__main__":
    raise ImportError("models.ask is a function and a command: `import models`, or run `python -m models.ask`.")
raise SystemExit(main())
