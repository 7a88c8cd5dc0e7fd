"""Ctrl-C and SIGTERM in a training run: they never cut a checkpoint in two, and the run says how it goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import commands, hosts


class Interrupts:
    """Ctrl-C or SIGTERM while it is entered: KeyboardInterrupt, at once or at the end of what is :meth:`held` together.

    A second one does not wait. Several processes are not asked to end by SIGTERM: it ends them at once
    (models/commands/distributed.py).
    """

    def __init__(self) -> None:
        self.holding = self.waiting = False

    def __enter__(self) -> Interrupts:
        self.before: dict[signal.Signals, Any] = {}
        # A process in the background ignores Ctrl-C, and only the main thread may say what a signal does.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if hosts.several() else (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _asked(self, *_: object) -> None:
        if not self.holding or self.waiting:
            raise KeyboardInterrupt
        self.waiting = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wrap what is done as a whole or not at all."""
        self.holding, self.waiting = True, False
        try:
            yield
        finally:
            self.holding = False
        if self.waiting:
            raise KeyboardInterrupt


def interrupted(folder: Path, step: int | None, invocation: commands.Invocation, resume: bool) -> KeyboardInterrupt:
    """Return the error that ends an interrupted run, with its checkpoint and the command that resumes it.

    Args:
        step: that of the newest checkpoint, None without one.
        resume: whether the command resumes as it stands.
    """
    if step is None:
        return KeyboardInterrupt("interrupted before the first checkpoint")
    path = folder / "checkpoints" / str(step)
    command = invocation.command + ("" if resume else " --resume auto")
    return KeyboardInterrupt(f"interrupted; the checkpoint of step {step} is {path}. To resume: {command}")
