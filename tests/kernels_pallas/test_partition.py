"""Kernels on a mesh: who computes what, and that nothing is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.partition import over_heads


@pytest.mark.parametrize(
    "spec", [("data", "heads"), (None, "heads"), ("data", None), (None, ("data", "heads"))], ids=str
)
def test_rows_and_heads_stay_where_they_are(spec):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    x = np.random.default_rng(0).normal(size=(2, 4, 3, 5)).astype(np.float32)
    row = np.float32([1, 2])
    seen = []

    def function(x, row):
        seen.append(x.shape)
        return (x.sum(-1) * row[:, None, None], x.max((2, 3)))

    put = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    split = jax.jit(over_heads(function, ["b k s d", "b"], ["b k s", "b k"]))
    program = split.lower(put, row).compile()
    first, second = program(put, row)
    np.testing.assert_allclose(first, x.sum(-1) * row[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(second, x.max((2, 3)))
    assert "all-gather" not in program.as_text()
    ways = {"data": 2, "heads": 2, ("data", "heads"): 4, None: 1}
    assert seen[-1] == (2 // ways[spec[0]], 4 // ways[spec[1]], 3, 5)


def test_what_is_split_over_slots_is_brought_together():
    mesh = Mesh(np.array(jax.devices()[:2]), ("slots",))
    x = jnp.arange(12.0).reshape(1, 2, 6)
    put = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "slots")))
    (total,) = jax.jit(over_heads(lambda x: (jnp.cumsum(x, -1),), ["b k s"], ["b k s"]))(put)
    np.testing.assert_allclose(total, np.cumsum(x, -1))
