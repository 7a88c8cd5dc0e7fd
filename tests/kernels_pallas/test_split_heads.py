"""Queries, keys and values of a product's parts, rotated, against complex numbers in NumPy float64."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import split_heads
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in

ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "split_heads")


def case(seed: int, rows: int = 2, P: int = 2, K: int = 2, G: int = 3, D: int = 6) -> list[np.ndarray]:
    """Parts of more rows than there are, which are not read; cosines, sines, and biases."""
    rng = np.random.default_rng(seed)
    parts, angle = rng.normal(size=(P, rows + 1, K, G + 2, D)), rng.uniform(0, 6, (rows, D // 2))
    parts[:, rows:] = np.nan
    return [x.astype(np.float32) for x in (parts, np.cos(angle), np.sin(angle), rng.normal(size=(K, G + 2, D)))]


def definition(parts, cos, sin, bias) -> tuple[np.ndarray, ...]:
    parts, cos, sin = (np.asarray(x, np.float64) for x in (parts, cos, sin))
    made = parts[:, : len(cos)].sum(axis=0) + (0 if bias is None else bias)
    half = made.shape[-1] // 2
    turned = (made[..., :half] + 1j * made[..., half:]) * (cos + 1j * sin)[:, None, None]
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    return turned[:, :, :-2].reshape(len(cos), -1, 2 * half), turned[:, :, -2], made[:, :, -1]


@ways
@hypothesis.given(seed=st.integers(0, 2**32 - 1), biased=st.booleans())
@hypothesis.settings(max_examples=8)
def test_heads_are_those_of_the_definition(name, seed, biased):
    given = case(seed)
    given[3] = given[3] if biased else None
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, tuple(compiled(name, dtype="float32")(*given)), definition(*given))


def test_half_precision_is_within_its_rounding():
    parts, *others = case(1)
    given = parts, *(x.astype(jnp.bfloat16) for x in others)
    for own, other in zip(compiled("gpu", dtype="bfloat16")(*given), definition(*case(1)), strict=True):
        assert own.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(own, np.float32), other, rtol=0.02, atol=0.03)


def shapes(rows: int, P: int, K: int, G: int, D: int, dtype: str, biased: bool) -> list:
    sizes = (P, max(rows, 8), K, G + 2, D), (rows, D // 2), (rows, D // 2)
    given = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    return [*given, jax.ShapeDtypeStruct((K, G + 2, D), dtype) if biased else None]


TARGETS = [(1, 2, 8, 4, 128, "bfloat16", False), (8, 4, 4, 7, 128, "bfloat16", True), (3, 1, 1, 2, 80, "float32", True)]
every = pytest.mark.parametrize("sizes", TARGETS, ids=str)


@every
def test_auto_lowers_to_the_kernel(sizes):
    assert kernels_in("cuda", functools.partial(split_heads, dtype=sizes[5]), *shapes(*sizes)) == 1


def test_what_the_kernel_does_not_make_is_left_to_the_reference():
    given = shapes(1, 1, 1, 1, 4, "float32", False)
    with jax.enable_x64(True):
        run = functools.partial(split_heads, dtype="float64")
        targets.refused("cuda", "split_heads", run, given, "heads are float64", dtype="float64")


def test_what_does_not_fit_is_refused():
    parts, cos, sin, bias = case(0)
    for wrong in (
        (parts[0], cos, sin),
        (parts[:, :1], cos, sin),
        (parts, cos[:, 1:], sin),
        (parts, cos, sin, bias[1:]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            jax.eval_shape(functools.partial(split_heads, dtype="float32"), *wrong)


@pytest.mark.accelerator
@every
def test_it_runs_on_a_gpu(sizes):
    targets.needs("gpu")
    *of_case, dtype, biased = sizes
    parts, cos, sin, bias = case(2, *of_case)
    given = parts, cos, sin, jnp.asarray(bias, dtype) if biased else None
    tolerance = 2**-6 if dtype == "bfloat16" else 1e-5
    for own, other in zip(*targets.run_here("split_heads", given, dtype=dtype), strict=True):
        np.testing.assert_allclose(np.asarray(own, np.float32), np.asarray(other, np.float32), tolerance, tolerance)
