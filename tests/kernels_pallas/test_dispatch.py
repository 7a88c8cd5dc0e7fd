"""Test how a kernel is found and run: by its file alone, with the reference's derivative; a mesh gathers nothing."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.targets import executable
from kernels_pallas import cache_attention, caote_topk, dispatch
from kernels_pallas.caote_topk import reference
from kernels_pallas.dispatch import Kernel
from kernels_pallas.prepare import over_heads, with_derivative_of
from tests.kernels_pallas.targets import tpu_topology
from tests.tiers import matrix

WEIGHTS = np.float32([[[[0.5, 0.2, 0.3]]]])
VALUE = np.float32([[[[0.0], [2.0], [-2.0]]]])
REST = (np.int32([[[0, 1, 2]]]), np.int32([2]), None)
OPTIONS = dict(fast=False, norm=2, group="exact", excess=None, with_scores=True)


@pytest.fixture
def metal(monkeypatch):
    """A third platform: a module in the operation's folder, and no more."""
    module = types.ModuleType("kernels_pallas.caote_topk.metal")
    module.unsupported = lambda weights, *_, norm, **__: None if norm == 2 else f"norm is {norm!r}"
    module.of_heads = lambda weights, value, slot, budget, *, with_scores, **_: (slot, weights[:, :, 0])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Kernel("caote_topk", "metal")


def test_a_kernel_for_another_platform_is_a_file(metal):
    kept, scores = jax.jit(lambda: metal.run(WEIGHTS, VALUE, *REST, **OPTIONS))()
    np.testing.assert_array_equal(kept, REST[0])
    np.testing.assert_array_equal(scores, WEIGHTS[:, :, 0])


def test_what_a_kernel_cannot_do_is_said_with_its_platform(metal):
    with pytest.raises(NotImplementedError, match=r"^caote_topk on a METAL: norm is 1; use implementation='reference'"):
        metal.run(WEIGHTS, VALUE, *REST, **OPTIONS | dict(norm=1))


def test_a_kernel_has_the_derivative_of_the_reference(metal):
    def gradient(function):
        return jax.jit(jax.grad(lambda value: function(WEIGHTS, value, *REST, **OPTIONS).scores.sum()))(VALUE)

    np.testing.assert_allclose(gradient(metal.run), gradient(reference.caote_topk))
    assert np.abs(gradient(metal.run)).sum() > 0


def test_numbers_among_the_options_are_traced_too():
    both = with_derivative_of(lambda x, *, n, how: n * x**2, lambda x, *, n, how: n + x if how == "kernel" else x)
    run = jax.jit(lambda x, n: both(x, n=n, how="kernel"))
    assert run(np.float32(3), np.int32(5)) == 8
    assert jax.jit(jax.grad(run))(np.float32(3), np.int32(5)) == 30


def test_the_platform_is_the_last_word_of_a_files_name():
    assert Kernel("cache_attention", "mosaic_gpu").platform == Kernel("cache_attention", "gpu").platform == "gpu"


def test_auto_takes_no_kernel_that_is_slower_and_a_name_runs_that_kernel_or_none(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    ran = []
    slower = {"pallas_mosaic_gpu": "the other is faster", "pallas_gpu": None, "pallas_tpu": None}
    kernels = {
        name: types.SimpleNamespace(
            platform=name[-3:], run=lambda name=name: ran.append(name), slower=lambda why=why: why
        )
        for name, why in slower.items()
    }
    monkeypatch.setattr(dispatch, "kernels_of", lambda operation: kernels)
    for implementation in ("auto", "pallas_mosaic_gpu"):
        dispatch.dispatch("caote_topk", implementation=implementation)
    with pytest.raises(ValueError, match="'pallas_tpu' runs on a tpu, but this is a gpu; expected one of auto, ref"):
        dispatch.dispatch("caote_topk", implementation="pallas_tpu")
    assert ran == ["pallas_gpu", "pallas_mosaic_gpu"]


NAMES = ("data", "tensor")
P = PartitionSpec


def mesh_of(sizes, names=NAMES, **options):
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names, **options)


def on_mesh(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def test_rows_and_heads_stay_where_they_are():
    sizes = (2, 2)
    mesh, x = mesh_of(sizes), np.random.default_rng(0).normal(size=(2, 4, 3, 5)).astype(np.float32)
    row = np.float32([1, 2])
    seen = []

    def function(x, row):
        seen.append(x.shape)
        return (x.sum(-1) * row[:, None, None], x.max((2, 3)))

    split = over_heads(function, ["b k s d", "b"], ["b k s", "b k"])
    given = on_mesh(mesh, x, *NAMES), on_mesh(mesh, row, "data")
    program = jax.jit(split).lower(*given).compile()
    assert "all-gather" not in program.as_text()
    sums, second = program(*given)
    np.testing.assert_allclose(sums, x.sum(-1) * row[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(second, x.max((2, 3)))
    assert seen[-1] == (2 // sizes[0], 4 // sizes[1], 3, 5)


def test_values_made_on_the_way_know_their_mesh():
    mesh, seen = mesh_of((2, 2)), []

    def function(x):
        seen.append(x.shape)
        return (x,)

    def program(x):
        def step(carry, _):
            return over_heads(function, ["b k s"], ["b k s"])(2 * carry)[0], None

        return jax.lax.scan(step, x, length=2)[0]

    out = jax.jit(program)(on_mesh(mesh, np.ones((2, 4, 3)), *NAMES))
    assert (np.asarray(out) == 4).all() and set(seen) == {(1, 2, 3)}


def test_what_is_split_over_slots_is_brought_together():
    x = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
    put = on_mesh(mesh_of((1, 2)), x, None, None, "tensor")
    (total,) = jax.jit(over_heads(lambda x: (jnp.cumsum(x, -1),), ["b k s"], ["b k s"]))(put)
    np.testing.assert_allclose(total, np.cumsum(x, -1))


def test_inside_another_split_the_function_just_runs():
    mesh, seen = mesh_of((2,), ("mine",)), []

    def function(x):
        seen.append(x.shape)
        return (x + 1,)

    split = over_heads(function, ["b s"], ["b s"])
    outer = jax.shard_map(lambda x: split(x)[0], mesh=mesh, in_specs=P("mine"), out_specs=P("mine"))
    np.testing.assert_array_equal(jax.jit(outer)(np.zeros((4, 3))), np.ones((4, 3)))
    assert set(seen) == {(2, 3)}


@matrix
@pytest.mark.tpu
def test_each_tpu_chip_runs_the_kernels_on_its_own_rows_and_heads():
    mesh = Mesh(np.array(tpu_topology("v5e:2x4")).reshape(2, 4), NAMES)
    B, N, K, S, D = 2, 32, 8, 1000, 128

    def shape(*sizes, dtype="bfloat16", spec=NAMES):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    slots, position = shape(B, K, S, D), shape(B, K, S, dtype="int32")
    query = shape(B, 16, N, D, spec=("data", None, "tensor"))
    queries, budget = shape(B, 16, dtype="int32", spec=("data",)), shape(B, dtype="int32", spec=("data",))
    weights = shape(B, K, N // K, S)

    def program(query, slots, position, queries, weights, budget):
        out, columns = cache_attention(query, slots, slots, position, queries, statistics=["sum"])
        return out, columns.sum, caote_topk(weights, slots, position, budget).position

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = executable(jax.jit(program).lower(query, slots, position, queries, weights, budget)).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "all-gather" not in text and "all-reduce" not in text
