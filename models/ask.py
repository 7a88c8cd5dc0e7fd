"""The entry point of `python -m models.ask`; imported, it would stand in `models` where the function does."""

from models.commands.ask import main

if __name__ not in ("__main__", "__mp_main__"):  # the second in a process that multiprocessing spawns
    raise ImportError("models.ask is a function and a command: `import models`, or run `python -m models.ask`.")
if __name__ == "__main__":
    raise SystemExit(main())
