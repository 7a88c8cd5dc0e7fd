"""`kvjax.score` against brute force: evict the token, do the attention again, measure."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import definitions

S, D, G = 7, 4, 3
LARGEST = float(np.finfo(np.float32).max)

seeds = st.integers(0, 2**32 - 1)
few = hypothesis.settings(max_examples=8)  # brute force is in fractions


def draw(seed: int, heads: tuple[int, ...] = (), *, peak: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Softmax weights from flat to peaked and values of different scales."""
    rng = np.random.default_rng(seed)
    peak = 10 ** rng.uniform(-1, 0.8) if peak is None else peak
    return definitions.softmax(peak * rng.normal(size=(*heads, S))), rng.normal(size=(S, D)) * 10 ** rng.uniform(-3, 3)


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(kvjax.score, **options))


def scored(A, V, dtype=np.float64, mask=None, projection=None, **options) -> np.ndarray:
    with jax.enable_x64(dtype == np.float64):
        projection = None if projection is None else np.asarray(projection, dtype)
        result = compiled(**options)(np.asarray(A, dtype), np.asarray(V, dtype), mask=mask, projection=projection)
        assert result.dtype == dtype
        return np.asarray(result)


@pytest.mark.parametrize(
    ("heads", "options"), [((), dict(norm=2)), ((), dict(norm=1)), ((), dict(norm="inf")), ((G,), dict(group="exact"))]
)
@few
@hypothesis.given(seed=seeds)
def test_score_is_the_error_of_evicting_in_float64(heads, options, seed):
    A, V = draw(seed, heads)
    expected = definitions.eviction_errors(A, V, options.get("norm", 2))
    np.testing.assert_allclose(scored(A, V, **options), expected, rtol=1e-10)


@few
@hypothesis.given(seed=seeds)
def test_score_is_the_error_of_evicting_in_float32_and_fast_caote_is_equation_22(seed):
    A, V = draw(seed, peak=1.5)
    np.testing.assert_allclose(scored(A, V, fast=True), definitions.fast_caote(A, V), rtol=1e-10)
    A, V = A.astype(np.float32), V.astype(np.float32)
    np.testing.assert_allclose(scored(A, V, np.float32), definitions.eviction_errors(A, V), rtol=1e-5)


def test_the_mean_group_form_is_one_heads_formula_over_the_mean_weights():
    A, V = draw(6, (G,))
    expected = definitions.eviction_errors(A.mean(0), V)
    np.testing.assert_allclose(scored(A, V, group="mean"), expected, rtol=1e-10)


def test_masked_tokens_score_minus_infinity_and_take_no_part():
    A, V = draw(9, peak=1.0)
    mask = np.array([1, 1, 0, 1, 0, 1, 1], bool)
    A = np.where(mask, A, 0) / A[mask].sum()
    result = scored(A, np.where(mask[:, None], V, 1e9), mask=mask)
    assert (result[~mask] == -np.inf).all()
    np.testing.assert_allclose(result[mask], definitions.eviction_errors(A[mask], V[mask]), rtol=1e-10)


@pytest.mark.parametrize("options", [{}, {"fast": True}], ids=str)
def test_a_token_with_all_the_weight_is_never_the_first_to_go(options):
    V = draw(13)[1]
    result = scored(np.eye(S)[2], V, np.float32, **options)
    assert np.isfinite(result).all() and (np.delete(result, 2) < result[2]).all()


@pytest.mark.parametrize("group", ["exact", "mean"])
def test_a_token_with_all_the_weight_in_one_head_scores_finite_and_first_in_the_exact_form(group):
    A, V = draw(14, (G,), peak=1.0)
    A[1] = np.eye(S)[2]
    result = scored(A, V, np.float32, group=group)
    assert np.isfinite(result).all()
    if group == "exact":
        assert result.argmax() == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12, 1e-20])
def test_near_a_weight_of_one_the_score_is_still_the_error(rest, dtype):
    """1 - a and X - v both vanish there; the values share an offset that a rounding error of X would drown in."""
    values = np.array([[100.0], [101.0], [102.0]])
    A = np.array([1 - rest, rest / 2, rest / 2]).astype(dtype)
    result = scored(A, values, dtype)
    if A[0] < 1:
        np.testing.assert_allclose(result[0], definitions.eviction_errors(A, values)[0], rtol=1e-5)
    assert np.isfinite(result).all() and result.argmax() == 0


def test_the_only_live_token_scores_the_largest_finite_number():
    mask = np.arange(S) == 3
    result = scored(mask, draw(15)[1], np.float32, mask=mask)
    assert result[3] == np.float32(LARGEST) and (result[~mask] == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["value", "weight"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_slot_that_is_not_finite_loses_and_does_not_poison_the_others(bad, where, fast):
    A, V = draw(19, peak=1.0)
    clean = A.copy()
    clean[2] = 0
    mask = np.arange(S) != 2
    expected = scored(clean, V, fast=fast, mask=mask)
    if where == "value":
        V[2, 1] = bad
    else:
        A[2] = bad
    result = scored(A, V, fast=fast)  # under jit, where NaN weights cannot be refused
    assert result[2] == -np.inf
    np.testing.assert_allclose(result[mask], expected[mask], rtol=1e-12)


def test_gradients_are_finite_at_no_weight_and_where_a_value_is_the_output():
    A = np.float32([0.5, 0.25, 0.25, 0.0])
    V = np.float32([[0.0, 0.0], [2.0, 1.0], [-2.0, -1.0], [3.0, 3.0]])  # X == v_0
    grads = jax.jit(jax.grad(lambda A, V: compiled()(A, V).sum(), argnums=(0, 1)))(A, V)
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)


@pytest.mark.parametrize("behind", [False, True], ids=["plain", "behind W_O"])
def test_the_gradient_is_the_slope_of_the_brute_force_error(behind):
    """Along a direction in which the weights still sum to 1, by central differences."""
    A, V = draw(21, (G,), peak=1.0)
    W = draw_projection(35) if behind else None
    rng = np.random.default_rng(21)
    dA, dV = rng.normal(size=A.shape), rng.normal(size=V.shape) * V.std()
    dA = A * (dA - (A * dA).sum(-1, keepdims=True))
    h = 1e-5
    ends = [definitions.layer_errors(A + s * h * dA, V + s * h * dV, W) for s in (1, -1)]
    with jax.enable_x64(True):
        slope = jax.jvp(lambda A, V: compiled(group="exact")(A, V, projection=W), (A, V), (dA, dV))[1]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-5)


# Behind the output projection.

E = 9


def draw_projection(seed: int) -> np.ndarray:
    """W_O of a group, [G, D, E], whose columns have different scales."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(G, D, E)) * 10 ** rng.uniform(-1, 1, size=E)


@functools.partial(jax.jit, static_argnums=1)
def parts_of(W, cross: bool) -> list:
    """The same W_O in all forms that `score` takes: itself, its factor, all parts, the part that is read alone."""
    kind = "factor" if cross else "gram"
    made = kvjax.output_projection(W, 1, ["factor", "gram", "weight"])
    one = jax.tree.map(lambda x: x[0], made)
    return [W, one.factor, one, kvjax.OutputProjection(**{kind: getattr(one, kind)})]


@functools.cache
def behind_all_forms(cross: bool):
    score = functools.partial(kvjax.score, group="exact", cross=cross)
    return jax.jit(lambda A, V, W: [score(A, V, projection=form) for form in parts_of(W, cross)])


@pytest.mark.parametrize("cross", [True, False])
@few
@hypothesis.given(seed=seeds)
def test_behind_w_o_the_score_is_the_error_of_the_layers_output_in_float64(cross, seed):
    A, V = draw(seed, (G,))
    W = draw_projection(seed)
    expected = definitions.layer_errors(A, V, W, cross)
    with jax.enable_x64(True):
        results = behind_all_forms(cross)(A, V, W)
    for form, result in enumerate(results):
        np.testing.assert_allclose(result, expected, rtol=1e-9, err_msg=str(form))


@few
@hypothesis.given(seed=seeds)
def test_behind_w_o_the_score_holds_in_float32(seed):
    A, V = (x.astype(np.float32) for x in draw(seed, (G,), peak=1.5))
    W = draw_projection(seed).astype(np.float32)
    scale = definitions.layer_errors(A, V, W, cross=False)  # heads may cancel, and float32 is as exact as each alone
    expected = definitions.layer_errors(A, V, W)
    for form, result in enumerate(map(np.asarray, behind_all_forms(True)(A, V, W))):
        assert result.dtype == np.float32
        np.testing.assert_array_less(np.abs(result - expected) / scale, 1e-5, err_msg=str(form))


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7, 1e-12])
def test_behind_w_o_a_weight_near_one_in_one_head_is_still_the_error(rest):
    values = np.array([[100.0, 0.0], [101.0, 1.0], [102.0, -1.0]])
    A = np.array([[1 - rest, rest / 2, rest / 2], [0.2, 0.3, 0.5]]).astype(np.float32)
    W = np.random.default_rng(33).normal(size=(2, 2, 5)).astype(np.float32)
    result = scored(A, values, np.float32, group="exact", projection=W)
    assert np.isfinite(result).all()
    if A[0, 0] < 1:
        np.testing.assert_allclose(result[0], definitions.layer_errors(A, values, W)[0], rtol=1e-4)
    else:
        assert result[0] == np.float32(LARGEST)


def test_behind_w_o_the_ends_are_those_of_the_plain_score():
    """All weight in one head, tokens without weight, masked and not finite ones, weights whose squares vanish."""
    A, V = draw(34, (G,), peak=1.0)
    W = draw_projection(34)
    behind = functools.partial(scored, dtype=np.float32, group="exact", projection=W)
    one = A.copy()
    one[1] = np.eye(S)[2]
    assert behind(one, V)[2] == np.float32(LARGEST)
    none = np.where(np.arange(S) == 3, 0, A)
    assert behind(none / none.sum(-1, keepdims=True), V)[3] == 0
    assert (behind(np.zeros((G, S)), V) == 0).all()
    for bad in (np.nan, np.inf):
        V_bad = V.copy()
        V_bad[4, 1] = bad
        result = behind(A, V_bad)
        np.testing.assert_array_equal(result, behind(A, V, mask=np.arange(S) != 4))
        assert result[4] == -np.inf and np.isfinite(np.delete(result, 4)).all()
    tiny = np.array([[0.5, 0.5 - 1e-20, 1e-30, 1e-25, 1e-20, 0, 0]] * G)
    ones = np.eye(S, D) / 4
    assert (np.diff(behind(tiny, ones)[2:5]) > 0).all()
    equal = A.copy()
    equal[:, 4], V[4] = equal[:, 1], V[1]
    result = behind(equal / equal.sum(-1, keepdims=True), V)
    assert result[1] == result[4]


def test_weights_are_looked_at_where_they_are_known():
    """Leave what is refused to tests/bad_input/calls.txt. What is masked, and bfloat16's rounding, do not count."""
    none, V = np.float32([0.5, 0.5, 0.5]), np.ones((3, 2), np.float32)
    assert kvjax.score(none, V, mask=np.array([True, True, False])).shape == (3,)
    assert kvjax.score(np.float32([0.35, 0.34, 0.34]), V).shape == jax.jit(kvjax.score)(none, V).shape == (3,)
    with (
        jax.disable_jit(),
        pytest.raises(ValueError, match=r"weights of a row add up to 1\.5; expected"),
    ):
        jax.jit(kvjax.score)(none, V)
