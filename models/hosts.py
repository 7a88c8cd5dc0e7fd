"""Share values among several processes that run one program together, on JAX's own runtime (`jax.distributed`).

Every process runs the same program on the devices of its host. The first one alone prints and writes files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._src.files import first

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def several() -> bool:
    """Return whether this process runs together with others."""
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1


def from_first[T](make: Callable[[], T]) -> T:
    """Return on every process what a function returns on the first one, which alone calls it: JSON's types."""
    if not several():
        return make()
    from jax.experimental import multihost_utils

    content = np.frombuffer(json.dumps(make()).encode() if first() else b"", np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    told: Any = multihost_utils.broadcast_one_to_all(content if first() else np.zeros(size, np.uint8))
    return json.loads(np.asarray(told).tobytes())


def fetched(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """Return an array on the host, whichever processes hold its parts; all processes call it together."""
    import jax

    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
