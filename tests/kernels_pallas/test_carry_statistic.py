"""A statistic that goes on from earlier queries, by the reference and the kernel, which writes in place."""

import functools

import jax
import numpy as np
import pytest

from kernels_pallas import carry_statistic
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in, lowered

B, K, G = 2, 2, 3
ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "carry_statistic")


def case(S: int) -> tuple:
    """A statistic before and now; in some heads one of them does not count, and is NaN."""
    rng = np.random.default_rng(0)
    before = tuple(rng.random((B, K, S)).astype(np.float32) for _ in range(G))
    now = rng.random((B, K, G, S)).astype(np.float32)
    of_before, of_now, over = (np.float32([[3, 0], [1, 4]]), np.float32([[1, 1], [0, 1]]), np.float32([[4, 1], [1, 1]]))
    for x in before:
        x[0, 1] = np.nan
    now[1, 0] = np.nan
    return before, now, (of_before, of_now, over)


@ways
@pytest.mark.parametrize("S", [5, 1100])
def test_it_is_the_sum_with_factors(name, S):
    before, now, factors = case(S)
    found = compiled(name)(before, now, factors)
    of_before, of_now, over = (x[..., None, None].astype(np.float64) for x in factors)
    old = np.stack(before, axis=2)
    expected = (np.where(of_before, of_before * old, 0) + np.where(of_now, of_now * now, 0)) / over
    np.testing.assert_allclose(found.statistic, expected, rtol=1e-6)
    np.testing.assert_array_equal(found.statistic[0, 1], now[0, 1])
    np.testing.assert_array_equal(found.statistic[1, 0], old[1, 0])
    np.testing.assert_array_equal(np.stack(found.heads, axis=2), found.statistic)


def test_auto_lowers_to_one_kernel_which_writes_in_place():
    of_head, now = jax.ShapeDtypeStruct((1, 8, 8320), np.float32), jax.ShapeDtypeStruct((1, 8, 4, 8320), np.float32)
    given = functools.partial(carry_statistic, factors=(1, 1, 1)), [of_head] * 4, now
    assert kernels_in("cuda", *given) == 1
    assert lowered("cuda", *given).count("output_operand_alias<output_tuple_indices") == 4


def test_what_the_kernel_does_not_read_is_left_to_the_reference():
    with jax.enable_x64(True):
        one, now = (jax.ShapeDtypeStruct(shape, np.float64) for shape in ((1, 2, 8), (1, 2, 1, 8)))
        factor = jax.ShapeDtypeStruct((1, 2), np.float64)
        targets.refused("cuda", "carry_statistic", carry_statistic, ((one,), now, (factor,) * 3), "float64")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"expected \[B, K, G, S\], and G arrays"):
        carry_statistic([np.zeros((1, 2, 3))], np.zeros((1, 2, 2, 3)), (1, 1, 1))


@pytest.mark.accelerator
def test_it_runs_on_a_gpu():
    targets.needs("gpu")
    jax.tree.map(np.testing.assert_array_equal, *targets.run_here("carry_statistic", case(9001)))
