"""The entry point of `python -m models.generate`; imported, it would stand in `models` where the function does."""

from models.commands.generate import main

if __name__ not in ("__main__", "__mp_main__"):  # the second in a process that multiprocessing spawns
    raise ImportError(
        "models.generate is a function and a command: `import models`, or run `python -m models.generate`."
    )
if __name__ == "__main__":
    raise SystemExit(main())
