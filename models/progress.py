"""Show progress on standard error: a bar on a terminal, elsewhere, as in a notebook or a log, a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tqdm import tqdm

from models import hosts

EVERY = 30.0  # seconds between two lines


class Lines(NamedTuple):
    """A file for a bar where standard error is no terminal: each text of the bar is said as a line."""

    say: Callable[[str], None]

    def write(self, text: str) -> None:
        if text.strip():
            self.say(" ".join(text.split()))

    def flush(self) -> None:
        """Do nothing: each line is written at once."""


def _to_error(line: str) -> None:
    print(f"[{line}]", file=sys.stderr, flush=True)


def progress_bar(
    unit: str,
    *,
    total: int | None = None,
    over: Iterable[Any] | None = None,
    quiet: bool = False,
    every: float | None = None,
    **look: Any,
) -> tqdm:
    """Return a tqdm bar, which is lines where standard error is no terminal, and silent in all processes but the first.

    Args:
        unit: what is counted, such as "sample".
        total, over: how many there are, or the iterable to go through.
        every: the seconds between two lines, 30 by default; the first one comes after as many.
        look: more of tqdm's arguments.

    Example:
        >>> from models.progress import progress_bar
        >>> list(progress_bar("word", over=["one", "two"]))
        ['one', 'two']
    """
    look = {"file": sys.stderr, "dynamic_ncols": True} | look
    if not sys.stderr.isatty():
        seconds = EVERY if every is None else every
        counted = "{n:,} {unit}s" if total is None and not hasattr(over, "__len__") else "{n:,} of {total:,} {unit}s"
        form = f"{{desc}}{counted}{{postfix}}, {{remaining}} left"
        look |= {"file": Lines(_to_error), "bar_format": form, "miniters": 1}
        look |= {"delay": seconds, "mininterval": seconds, "maxinterval": max(seconds, 1.0)}
    if look.get("desc"):
        look["desc"] += ": "
    return tqdm(over, total=total, unit=unit, disable=quiet or not hosts.first(), **look)


class Progress:
    """Shows how far long work is that has several parts, each with a :func:`progress_bar` that goes away.

    Args:
        every, quiet: see there.

    Example:
        >>> from models.progress import Progress
        >>> with Progress(quiet=True) as progress:
        ...     progress.at("reading", 128, 1024, "token")
    """

    def __init__(self, *, every: float | None = None, quiet: bool = False):
        self.every, self.quiet = every, quiet
        self.bar: tqdm | None = None
        self.doing = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.clear()

    def at(self, doing: str, done: int, total: int, unit: str) -> None:
        """Note that ``done`` of at most ``total`` units are done of something, such as "reading"."""
        if self.quiet:
            return
        if doing != self.doing:
            self.clear()
            self.doing = doing
        if self.bar is None:
            look: dict[str, Any] = dict(every=self.every, desc=doing, initial=done, leave=False)
            self.bar = progress_bar(unit, total=total, **look)
        self.bar.total = total
        self.bar.update(done - self.bar.n)

    def clear(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.doing = None, ""
