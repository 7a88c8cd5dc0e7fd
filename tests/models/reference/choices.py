"""Choices by score, how close they were, and how it would have gone the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LARGEST = float(np.finfo(np.float32).max)  # what a token scores without which nothing would be left
TIE = 1e-12  # relative: equal but for float64's rounding
NEAR = 1e-4  # relative: float32 may see it the other way
SMALL = 1e-6  # likewise, relative to the largest score at hand: what is left of a difference


class Near(NamedTuple):
    """A choice that rounding may turn. ``tie``: the two are equal, and only float64's rounding tells them apart."""

    number: int
    gap: float
    tie: bool


class Choices:
    """Makes the choices of a run, and notes those that are near. ``flips`` are numbers of choices to make otherwise."""

    def __init__(self, flips: frozenset[int] = frozenset()):
        self.flips = flips
        self.near: list[Near] = []
        self.made = 0

    def best(self, scores: Sequence[float], order: Sequence[Any], number: int, *, open_ties: bool = False) -> list[int]:
        """Indices of the ``number`` largest scores; of equals those of the larger ``order``; NaN is worse than all else.

        Scores that are equal but for rounding count as equal. ``open_ties``: either of two equals will do.
        """
        number, total = max(number, 0), len(scores)
        numbers = [float(x) for x in scores]
        if number >= total or number == 0:
            return list(range(total))[:number]
        mine, self.made = self.made, self.made + 1

        def rank(i: int) -> tuple:
            return numbers[i] == numbers[i], numbers[i] + 0.0 if numbers[i] == numbers[i] else 0.0, order[i]

        ranking = sorted(range(total), key=rank, reverse=True)
        stays, goes = numbers[ranking[number - 1]], numbers[ranking[number]]
        plain = [abs(x) for x in numbers if abs(x) < LARGEST / 2]
        if abs(stays) < LARGEST / 2 and abs(goes) < LARGEST / 2:
            scale = max(abs(stays), abs(goes))
            tie = TIE * scale + 1e-14
            if stays - goes <= tie:
                first, last = number - 1, number
                while first > 0 and numbers[ranking[first - 1]] - numbers[ranking[first]] <= tie:
                    first -= 1
                while last + 1 < total and numbers[ranking[last]] - numbers[ranking[last + 1]] <= tie:
                    last += 1
                if numbers[ranking[first]] != numbers[ranking[last]] or open_ties:
                    self.near.append(Near(mine, 0.0, tie=not open_ties))
                ranking[first : last + 1] = sorted(ranking[first : last + 1], key=lambda i: order[i], reverse=True)
            elif stays - goes <= NEAR * scale + SMALL * max(plain):
                self.near.append(Near(mine, (stays - goes) / scale, tie=False))
        if mine in self.flips:
            ranking[number - 1], ranking[number] = ranking[number], ranking[number - 1]
        return ranking[:number]

    def below(self, x: np.ndarray, limit: float) -> np.ndarray:
        """Which numbers are below a limit."""
        if len(x) == 0:
            return np.zeros(0, bool)
        mine, self.made = self.made, self.made + 1
        closest = int(np.argmin(abs(x - limit)))
        result = x < limit
        if abs(x[closest] - limit) <= NEAR * abs(limit):
            self.near.append(Near(mine, float(abs(x[closest] - limit) / max(abs(limit), 1e-30)), tie=False))
        if mine in self.flips:
            result[closest] = not result[closest]
        return result
