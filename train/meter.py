"""Show the finished steps of a training run: as a bar on a terminal, else as a line every twenty seconds."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

AHEAD = 2  # steps that a device is given before the oldest of them must be done, so that it never waits for the host
SECONDS = 20.0  # between two lines


class Meter:
    """Shows the finished steps of a run: those whose loss is known, not those that were handed to the device.

    Args:
        done: the steps that were done before.
        show: whether anything is shown.
        say: called with each line where standard error is no terminal.
    """

    def __init__(self, total: int, done: int, show: bool, say: Callable[[str], None]):
        self.total, self.done = total, done
        self.flight: collections.deque[Array] = collections.deque()
        bar = show and sys.stderr.isatty()
        self.say = say if show and not bar else None
        self.bar = tqdm(total=total, initial=done, disable=not bar, dynamic_ncols=True, file=sys.stderr)
        self.first = done + 1  # which compiles, so the time per step is that of the others
        self.start = self.said = time.monotonic()
        if self.say and done < total:
            self.say(f"compiling step {self.first:,} of {total:,}")

    def started(self, loss: Array) -> None:
        """Count a step that was handed to the device, and wait for the one ``AHEAD`` steps before it."""
        self.flight.append(loss)
        while len(self.flight) > AHEAD:
            self._finish()

    def settle(self) -> None:
        """Wait for all steps that were started."""
        while self.flight:
            self._finish()

    def close(self, text: str = "") -> None:
        """End the bar, and say what comes next, if anything."""
        self.bar.close()
        if self.say and text:
            self.say(text)

    def _finish(self) -> None:
        loss = float(np.sum(jax.device_get(self.flight.popleft())))
        self.done, now = self.done + 1, time.monotonic()
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
        if self.done == self.first:
            self.start = now
        if self.say is None or not (self.done in (self.first, self.total) or now - self.said >= SECONDS):
            return
        self.said, line = now, f"step {self.done:,} of {self.total:,}, loss {loss:.4f}"
        if self.done > self.first + AHEAD:  # those before were done while the first was waited for
            each = (now - self.start) / (self.done - self.first)
            line += f", {each:.3g} s per step, {tqdm.format_interval(each * (self.total - self.done))} left"
        self.say(line)
