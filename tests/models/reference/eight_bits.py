"""Rows in eight bits in NumPy float64: a row's scale is its largest magnitude over the largest number of its dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.models.reference.choices import Choices

OFF = 4e-6  # relative to the row's largest magnitude: what float32 may make of a number before it is rounded
_FLOATS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
NUMBERS = {"int8": np.arange(-127.0, 128.0), "float8_e4m3fn": np.unique(_FLOATS[np.isfinite(_FLOATS)])}


def rounded(rows: np.ndarray, dtype: str, choices: Choices, known: np.ndarray) -> np.ndarray:
    """Rows [..., D] as a cache of a dtype holds them; floats stay as they are.

    A number half way between two may fall on either side, which ``choices`` notes. ``known`` are rows of the same shape
    that say where it fell, NaN where nothing is known. Equal rows fall alike.
    """
    if dtype not in NUMBERS:
        return rows
    numbers = NUMBERS[dtype]
    halfway = (numbers[1:] + numbers[:-1]) / 2
    scale = abs(rows).max(axis=-1, keepdims=True) / numbers[-1]
    scaled = rows / np.where(scale > 0, scale, 1)
    result = np.round(scaled) if dtype == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    after = np.clip(np.searchsorted(halfway, scaled), 1, len(halfway) - 1)
    nearest = np.where(scaled - halfway[after - 1] < halfway[after] - scaled, after - 1, after)
    distance = abs(scaled - halfway[nearest])
    said: dict[tuple[bytes, int], float] = {}
    for index in map(tuple, np.argwhere((distance < OFF * numbers[-1]) & (scale > 0))):
        sides = numbers[nearest[index]], numbers[nearest[index] + 1]
        own, other = sides if result[index] == sides[0] else sides[::-1]
        step, held = sides[1] - sides[0], known[index] / scale[index[:-1]][0]
        side = next((side for side in sides if abs(held - side) < step / 4), None)
        same = rows[index[:-1]].tobytes(), index[-1]
        if side is None and same in said:
            result[index] = said[same]
            continue
        result[index] = choices.side(own, other, distance[index] / numbers[-1], side)
        said[same] = result[index]
    return result * scale
