"""Choices by score, how close they were, and how they would have gone the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)  # what a token scores without which nothing would be left
TIE = 1e-12  # relative: equal but for float64's rounding
NEAR = 1e-4  # relative: what float32 may make of a score
SMALL = 1e-6  # likewise, relative to the largest score at hand: what is left of a difference


class Near(NamedTuple):
    """A choice that rounding may turn.

    ``turned``: it was made the other way; ``tie``: between equal tokens; ``wide``: between more than two tokens.
    """

    number: int
    gap: float
    turned: bool
    tie: bool
    wide: bool


class Choices:
    """Makes the choices of a run, and notes those that are near.

    ``flips`` are numbers of choices to make otherwise, ``loss`` what rounding may make of scores: NEAR and SMALL.
    """

    def __init__(self, flips: frozenset[int] = frozenset(), loss: tuple[float, float] = (NEAR, SMALL)):
        self.flips = flips
        self.loss, self.small = loss
        self.near: list[Near] = []
        self.made = 0

    def best(
        self,
        scores: Sequence[float] | np.ndarray,
        order: Sequence[Any] | np.ndarray,
        number: int,
        *,
        noise: Sequence[float] | np.ndarray | None = None,
        held: Sequence[bool] | np.ndarray | None = None,
        open_ties: bool = False,
        group: Sequence[Any] | None = None,
    ) -> list[int]:
        """Indices of the ``number`` largest scores; of equals those of the larger ``order``; NaN is the worst.

        Args:
            noise: what float32 may be off by, beside what it always may.
            held: between scores that float32 may see the other way, these are taken.
            open_ties: either of two equals will do.
            group: whose scores they are. Equal ones of two heads come from different sums, which float32 may tell apart
                (the mean of all weights of a head, for example); zeros, and those of one head, it does not.
        """
        number, total = max(number, 0), len(scores)
        if number >= total or number == 0:
            return list(range(total))[:number]
        mine, self.made = self.made, self.made + 1
        s = np.nan_to_num(np.asarray(scores, np.float64) + 0.0, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        ranking = sorted(range(total), key=lambda i: (s[i], order[i]), reverse=True)
        stays, goes = s[ranking[number - 1]], s[ranking[number]]
        if max(abs(stays), abs(goes)) > LARGEST / 2:  # certain, or impossible: rounding changes nothing
            return ranking[:number]

        tie, first, last = TIE * max(abs(stays), abs(goes)), number, number
        while first > 0 and s[ranking[first - 1]] - s[ranking[first]] <= tie:
            first -= 1
        while last + 1 < total and s[ranking[last]] - s[ranking[last + 1]] <= tie:
            last += 1
        ranking[first : last + 1] = sorted(ranking[first : last + 1], key=lambda i: order[i], reverse=True)
        result = ranking[:number]

        plain = abs(s) < LARGEST / 2
        off = self.loss / 2 * abs(np.where(plain, s, 0)) + self.small / 2 * abs(s[plain]).max() + tie
        off = np.where(plain, off + (0 if noise is None else np.asarray(noise)), 0)
        lowest, highest = (s - off)[ranking[:number]].min(), (s + off)[ranking[number:]].max()
        near = [i for i in ranking[:number] if s[i] - off[i] <= highest]
        near += [i for i in ranking[number:] if s[i] + off[i] >= lowest]
        if near:
            equal = {i for i in near if abs(s[i] - goes) <= tie and (noise is None or noise[i] <= tie)}
            if held is not None:
                certain = [i for i in result if i not in near]
                near.sort(key=lambda i: (bool(held[i]), ranking.index(i) < number, order[i]), reverse=True)
                result = certain + near[: number - len(certain)]
            if mine in self.flips:
                result = [*ranking[: number - 1], ranking[number]]
            changed = set(result) ^ set(ranking[:number])
            gap = (stays - goes) / max(abs(stays), abs(goes), 1e-30)
            groups: dict[Any, list[int]] = {}
            for i in ranking:
                if i in equal:
                    groups.setdefault(None if group is None or goes == 0 else group[i], []).append(i)
            if changed or open_ties or len(equal) < len(near) or len(groups) > 1:  # else rounding changes nothing
                exact = bool(changed) and changed <= equal and not open_ties
                # In the order in which they are to stay: of those of one group, none stays behind one that goes.
                stay = [[i in result for i in own] for own in groups.values()]
                exact = exact and any(own != sorted(own, reverse=True) for own in stay)
                self.near.append(Near(mine, gap, bool(changed), exact, wide=len(near) > 2))
        return result

    def below(self, x: np.ndarray, limit: float) -> np.ndarray:
        """Which numbers are below a limit."""
        if len(x) == 0:
            return np.zeros(0, bool)
        mine, self.made = self.made, self.made + 1
        closest = int(np.argmin(abs(x - limit)))
        result = x < limit
        if abs(x[closest] - limit) <= self.loss * abs(limit):
            gap = float(abs(x[closest] - limit) / max(abs(limit), 1e-30))
            self.near.append(Near(mine, gap, turned=mine in self.flips, tie=False, wide=False))
            if mine in self.flips:
                result[closest] = not result[closest]
        return result

    def side(self, own: float, other: float, gap: float, held: float | None) -> float:
        """Decide where a number half way between two falls: ``held``, where known, else on its own side."""
        mine, self.made = self.made, self.made + 1
        result = own if held is None else held
        if mine in self.flips:
            result = own if result == other else other
        self.near.append(Near(mine, gap, turned=result != own, tie=False, wide=False))
        return result
