"""Show the finished steps of a training run: as a bar on a terminal, else as a line every twenty seconds.

What takes long beside the steps, such as measuring, says so in lines of its own.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from models.progress import Lines

AHEAD = 2  # steps that a device is given before the oldest of them must be done, so that it never waits for the host
SECONDS = 20.0  # between two lines of steps
WORKING = 20.0  # and of other work
LINE = "step {n:,} of {total:,}{postfix}, {rate_inv_fmt}, {remaining} left"


class Meter:
    """Shows the finished steps of a run: those whose loss is known, not those that were handed to the device.

    Args:
        done: the steps that were done before.
        show: whether anything is shown.
        say: called with each line where standard error is no terminal.
    """

    def __init__(self, total: int, done: int, show: bool, say: Callable[[str], None]):
        self.flight: collections.deque[Array] = collections.deque()
        self.shown, self.say = show, say
        self.lines = None if sys.stderr.isatty() else Lines(say)
        look: dict[str, Any] = {"dynamic_ncols": True}
        if self.lines:
            look = {"file": self.lines, "bar_format": LINE, "mininterval": SECONDS, "maxinterval": SECONDS}
        self.bar = tqdm(total=total, initial=done, disable=not show, unit="step", miniters=1, **look)

    def started(self, loss: Array) -> None:
        """Count a step that was handed to the device, and wait for the one ``AHEAD`` steps before it."""
        self.flight.append(loss)
        while len(self.flight) > AHEAD:
            self._finish()

    def settle(self) -> None:
        """Wait for all steps that were started."""
        while self.flight:
            self._finish()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Wrap long work that is no step, and say every twenty seconds that it goes on."""
        ended = threading.Event()

        def tell() -> None:
            seconds = 0.0
            while not ended.wait(WORKING):
                seconds += WORKING
                self.say(f"{what}, for {seconds:.0f} s so far")

        if self.shown:
            threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def close(self, text: str = "") -> None:
        """End the bar, and say what comes next, if anything."""
        shown = not self.bar.disable
        self.bar.close()
        if shown and self.lines:
            self.lines.write(text)

    def _finish(self) -> None:
        loss = float(np.sum(jax.device_get(self.flight.popleft())))
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update()
