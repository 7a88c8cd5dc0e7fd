"""Ctrl-C in a training run: it never cuts a checkpoint in two, and the run says how it goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import commands


class Interrupts:
    """Ctrl-C while it is entered: KeyboardInterrupt, at once or at the end of what is :meth:`held` together.

    A second Ctrl-C does not wait.
    """

    def __init__(self) -> None:
        self.holding = self.waiting = False

    def __enter__(self) -> Interrupts:
        self.before: Any = None
        # A process in the background ignores Ctrl-C, and only the main thread may say what a signal does.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self.before = signal.signal(signal.SIGINT, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

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
