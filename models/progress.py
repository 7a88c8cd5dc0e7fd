"""Show progress on standard error: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from models import hosts


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
