"""The sum of hidden states and a product's parts, and its RMS norm, against NumPy float64."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import add_rms_norm
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in

ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "add_rms_norm", epsilon=1e-3)


def case(seed: int, rows: int = 3, parts: int = 2, E: int = 6) -> tuple[np.ndarray, ...]:
    """Parts of more rows than there are, which are not read."""
    rng = np.random.default_rng(seed)
    x, made, weight = rng.normal(size=(rows, E)), rng.normal(size=(parts, rows + 1, E)), rng.normal(size=E)
    made[:, rows:] = np.nan
    return tuple(array.astype(np.float32) for array in (x, made, weight))


def definition(x, parts, weight, offset: bool) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x, np.float64) + np.asarray(parts, np.float64)[:, : len(x)].sum(axis=0)
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-3)
    return x, normed * (np.asarray(weight, np.float64) + offset)


@ways
@hypothesis.given(seed=st.integers(0, 2**32 - 1), offset=st.booleans())
@hypothesis.settings(max_examples=8)
def test_sum_and_norm_are_those_of_the_definition(name, seed, offset):
    given = case(seed)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, compiled(name, offset=offset)(*given), definition(*given, offset))


@pytest.mark.parametrize("offset", [False, True])
def test_in_half_precision_the_sum_is_the_reference_s_and_the_norm_within_its_two_roundings(offset):
    x, parts, weight = case(1, E=96)
    given = x.astype(jnp.bfloat16), parts, weight.astype(jnp.bfloat16)
    found, expected = (compiled(name, offset=offset)(*given) for name in ("gpu", "reference"))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(*(np.asarray(y[1], np.float32) for y in (found, expected)), rtol=2**-6)


def test_the_derivative_is_the_reference_s():
    given = case(2)

    def gradients(name):
        run = targets.run_of("add_rms_norm", name)
        total = lambda *given: sum((y**2).sum() for y in run(*given, epsilon=1e-3, offset=False))  # noqa: E731
        return jax.jit(jax.grad(total, argnums=(0, 2)))(*given)

    jax.tree.map(np.testing.assert_array_equal, gradients("gpu"), gradients("reference"))


def shapes(rows: int, P: int, E: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = ((rows, E), dtype), ((P, max(rows, 8), E), "float32"), ((E,), dtype)
    return tuple(jax.ShapeDtypeStruct(*size) for size in sizes)


TARGETS = [(1, 8, 4096, "bfloat16"), (128, 4, 3584, "bfloat16"), (5, 1, 96, "float32")]
run = functools.partial(add_rms_norm, epsilon=1e-5)


@pytest.mark.parametrize("sizes", TARGETS, ids=str)
def test_auto_lowers_to_the_kernel(sizes):
    assert kernels_in("cuda", run, *shapes(*sizes)) == 1


def test_what_the_kernel_cannot_do_auto_leaves_to_the_reference():
    for given, reason in [
        (shapes(1, 1, 20_000, "float32"), "rows have 20000 numbers, but the kernel takes up to 16384"),
        ((*shapes(1, 1, 8, "bfloat16")[:2], *shapes(1, 1, 8, "float32")[2:]), "weights are float32"),
    ]:
        targets.refused("cuda", "add_rms_norm", run, given, reason, epsilon=1e-5, offset=False)


def test_what_does_not_fit_is_refused():
    x, parts, weight = case(0)
    for wrong in ((x, parts[0], weight), (x, parts[:, :2], weight), (x, parts, weight[1:])):
        with pytest.raises(ValueError, match="do not fit"):
            jax.eval_shape(run, *wrong)


@pytest.mark.accelerator
@pytest.mark.parametrize("sizes", TARGETS, ids=str)
def test_it_runs_on_a_gpu(sizes):
    targets.needs("gpu")
    rows, P, E, dtype = sizes
    x, parts, weight = case(3, rows, P, E)
    given = jnp.asarray(x, dtype), parts, jnp.asarray(weight, dtype)
    found, expected = targets.run_here("add_rms_norm", given, epsilon=1e-5, offset=False)
    tolerance = 2**-6 if dtype == "bfloat16" else 1e-5
    for y, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(other, np.float32), tolerance, tolerance)
