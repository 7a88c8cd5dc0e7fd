"""What kernels are given, worked out by hand: which queries enter, which arrays lie beside keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import eight_bits
from kernels_pallas.cache_attention.queries import describe, first_entering, queries_entering
from kernels_pallas.prepare import Beside, given_beside

# Padding, and four queries of which two are in the window; a row of one query; a row without any.
AT = np.array([[-1, 4, 5, 6, 7], [-1, -1, -1, -1, 9], [-1, -1, -1, -1, -1]])


def test_a_query_is_told_by_its_position_and_its_place_in_the_window():
    about = jax.jit(describe, static_argnums=1)(AT, 2)
    assert about[0].tolist() == [[-1, 0, 0], [4, 0, 0], [5, 0, 0], [6, 0, 2], [7, 1, 1]]
    assert about[1:, -1].tolist() == [[9, 1, 1], [-1, 0, 0]]


@pytest.mark.parametrize(
    ("names", "first"), [(("max",), 0), (("sum", "last"), 0), (("window_mean",), 3), (("last", "window_max"), 3)]
)
def test_all_queries_enter_a_sum_or_a_maximum_and_the_windows_own_all_else(names, first):
    entering = jax.jit(lambda at: first_entering(describe(at, 2), names))(AT)
    assert entering.tolist()[:2] == [first, first and 4]


def test_of_errors_only_the_queries_that_enter_are_computed():
    vectors = np.broadcast_to(np.arange(5.0)[:, None], (3, 1, 1, 5, 1))

    def chosen(names, window):
        vector, about = jax.jit(lambda at: queries_entering(jnp.asarray(vectors), describe(at, window), names, window))(
            AT
        )
        return vector[:, 0, 0, :, 0].tolist(), about[..., 0].tolist()

    (of_window, at), (of_last, _) = chosen(["window_mean"], 2), chosen(["last"], 0)
    assert (of_window[0], of_window[1][0], at[0], at[1][0]) == ([3, 4], 4, [6, 7], 9)
    assert (of_last[0], of_last[1]) == ([4], [4])
    assert chosen(["max"], 2)[0] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("given", [(1, 2, 3), (1, None, None), (None, 2, None), (None, 2, 3), (None, None, 3)])
def test_scales_and_biases_are_found_again_behind_each_other(given):
    arrays, beside = given_beside(*given)
    assert beside == Beside(*(one is not None for one in given))
    assert [list(part) for part in beside.split(arrays)] == [[] if one is None else [one] for one in given]


BEFORE_ADA = "keys or values are float8_e4m3fn, which Triton reads from compute capability 8.9 on, and this GPU has 8.6"


@pytest.mark.parametrize(("capability", "said"), [(86, BEFORE_ADA), (89, None), (90, None), (None, None)])
def test_float8_is_read_from_ada_on(capability, said, monkeypatch):
    """Nothing is known of no GPU, where a kernel is interpreted."""
    monkeypatch.setattr(eight_bits, "compute_capability", lambda: capability)
    key = jax.ShapeDtypeStruct((1, 1, 1, 4), "float8_e4m3fn")
    assert eight_bits.unread_on_gpu(key, key) == said
