"""Show progress on standard error: a bar on a terminal, elsewhere nothing, or a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from models import hosts

EVERY = 30.0  # seconds between lines where there is no terminal, as in a notebook or a log


def progress_bar(
    unit: str, *, total: int | None = None, over: Iterable[Any] | None = None, quiet: bool = False, **look: Any
) -> tqdm:
    """Return a tqdm bar, which stays quiet where standard error is no terminal, and in all processes but the first.

    Args:
        unit: what is counted, such as "sample".
        total, over: how many there are, or the iterable to go through.
        look: more of tqdm's arguments.

    Example:
        >>> from models.progress import progress_bar
        >>> list(progress_bar("word", over=["one", "two"]))
        ['one', 'two']
    """
    disable = True if quiet or not hosts.first() else None  # None is quiet where standard error is no terminal
    return tqdm(over, total=total, unit=unit, file=sys.stderr, dynamic_ncols=True, disable=disable, **look)


class Progress:
    """Shows how far long work is: a bar on a terminal, elsewhere a line every few seconds.

    Args:
        every: seconds between two lines, 30 by default; the first one comes after as many.
        quiet: whether nothing is shown.

    Example:
        >>> from models.progress import Progress
        >>> with Progress(quiet=True) as progress:
        ...     progress.at("reading", 128, 1024, "token")
    """

    def __init__(self, *, every: float | None = None, quiet: bool = False):
        self.every, self.quiet = EVERY if every is None else every, quiet or not hosts.first()
        self.bar: tqdm | None = None
        self.doing, self.last = "", time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()

    def at(self, doing: str, done: int, total: int, unit: str) -> None:
        """Note that ``done`` of at most ``total`` units are done of something, such as "reading"."""
        if self.quiet:
            return
        now = time.monotonic()
        if doing != self.doing:
            self.clear()
            self.doing = doing
        if sys.stderr.isatty():
            if self.bar is None:
                self.bar = progress_bar(unit, total=total, desc=doing, initial=done, leave=False)
            self.bar.total = total
            self.bar.update(done - self.bar.n)
        elif now - self.last >= self.every:
            self.last = now
            print(f"[{doing}: {done:,} of {total:,} {unit}s]", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.doing = None, ""
