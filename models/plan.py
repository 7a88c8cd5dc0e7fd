"""The settings of a run that are static in each compiled step, and the values of its rows."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from kvjax import Policy, Reconstruction
from kvjax._src.cache import Positions
from kvjax._src.quantise import FLOAT32, Dtypes
from kvjax.schedule import Phase
from models.selecting import Selection


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checked settings of a run, which are static in each compiled step."""

    policy: Policy | None
    when: Literal["block", "prompt"]
    evict_every: int  # 0 for never
    mesh: Mesh | AbstractMesh | None
    selection: Selection | None = None
    heads: int = 0  # of the cache, in each layer
    positions: Positions = "absolute"
    overfull: bool = False  # a row without context holds more than its budget, so its question's last block evicts
    cache_dtype: Dtypes = FLOAT32
    # Eight bits to which keys, and values, are rounded but not stored, for a derivative.
    rounded_to: tuple[str | None, ...] = (None, None)
    each: tuple[Policy, ...] = ()  # several policies that observe together, and evict later, each by itself
    memory_slots: int = 0  # of a network that looks ahead, and of the selection's source

    @property
    def repeats(self) -> Reconstruction | None:
        """Return what the model is to repeat as the text comes in, if anything."""
        return None if self.policy is None else self.policy.repeats

    @property
    def several(self) -> Mesh | AbstractMesh | None:
        """Return the mesh if it has several devices, whose pages are then split; else None."""
        return None if self.mesh is None or self.mesh.size == 1 else self.mesh


class Rows(NamedTuple):
    """Values that differ between the rows of a batch, [B]: lengths, and budgets: of a prompt, in decode, in reading."""

    lengths: Int[Array, "B"]
    budgets: Int[Array, "B"] | None = None
    decode_budgets: Int[Array, "B"] | None = None
    reading_budgets: Int[Array, "B"] | None = None

    def budgets_in(self, phase: Phase) -> Int[Array, "B"] | None:
        """Return the budgets of a block; behind the context they have room for the question's tokens as well."""
        if phase.reading:
            return self.reading_budgets
        return self.decode_budgets if phase.compressed else self.budgets
