"""Test how a kernel is found and run: by its file alone, with the reference's derivative."""

import sys
import types

import jax
import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.caote_topk import reference
from kernels_pallas.dispatch import Kernel
from kernels_pallas.prepare import with_derivative_of

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
