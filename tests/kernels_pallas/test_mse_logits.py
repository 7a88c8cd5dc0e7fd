"""TokenButler's loss and its gradients against the materialised [T, T] arrays, in float64."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import mse_logits


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    predicted_query: np.ndarray
    predicted_key: np.ndarray


def case(seed: int, B: int = 2, T: int = 11, N: int = 4, K: int = 2, M: int = 4, D: int = 6, F: int = 4) -> Case:
    rng = np.random.default_rng(seed)
    return Case(*(rng.normal(size=shape) for shape in ((B, T, N, D), (B, T, K, D), (B, T, N, F), (B, T, M, F))))


def definition(given: Case, valid=None, *, causal: bool = False, scale: float | None = None):
    """The loss and its gradients with respect to q' and k', NumPy, every [T, T] array in full."""
    query, key, predicted_query, predicted_key = (np.asarray(x, np.float64) for x in given)
    B, T, N, D = query.shape
    F, M = predicted_query.shape[3], predicted_key.shape[2]
    key, repeated = (np.repeat(x, N // x.shape[2], axis=2) for x in (key, predicted_key))
    logits = np.einsum("bind,bjnd->bnij", query, key) * (D**-0.5 if scale is None else scale)
    difference = np.einsum("bind,bjnd->bnij", predicted_query, repeated) * F**-0.5 - logits
    valid = np.ones((B, T), bool) if valid is None else np.asarray(valid)
    seen = (valid[:, :, None] & valid[:, None, :] & (np.tri(T, dtype=bool) if causal else True))[:, None]
    pairs = max(N * seen.sum(), 1)
    difference = np.where(seen, difference, 0)
    to_query = 2 * F**-0.5 / pairs * np.einsum("bnij,bjnd->bind", difference, repeated)
    to_key = 2 * F**-0.5 / pairs * np.einsum("bnij,bind->bjnd", difference, predicted_query)
    return (difference**2).sum() / pairs, to_query, to_key.reshape(B, T, M, N // M, F).sum(3)


@functools.cache
def compiled(**options):
    def loss(query, key, predicted_query, predicted_key, valid):
        return mse_logits(query, key, predicted_query, predicted_key, valid, **options)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def check(given: Case, valid=None, *, rtol=1e-9, atol=1e-12, **options):
    with jax.enable_x64(True):
        loss, (to_q, to_k, to_query, to_key) = compiled(**options)(*given, valid)
    options.pop("block", None)
    expected, expected_query, expected_key = definition(given, valid, **options)
    np.testing.assert_allclose(loss, expected, rtol=rtol)
    np.testing.assert_allclose(to_query, expected_query, rtol=rtol, atol=atol)
    np.testing.assert_allclose(to_key, expected_key, rtol=rtol, atol=atol)
    assert not np.any(to_q) and not np.any(to_k)  # the model is frozen


both = pytest.mark.parametrize("causal", [True, False])


@both
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10)
def test_loss_and_gradients_are_those_of_the_definition(causal, seed):
    valid = np.random.default_rng(seed).random((2, 11)) < 0.7
    check(case(seed), valid, causal=causal, block=4)


def test_any_size_and_scale_is_accepted():
    check(case(2, N=6, K=3, M=2), causal=True, block=3, scale=0.3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_padding_holds_does_not_matter(bad):
    causal = True
    valid = np.arange(11) < np.array([[7], [9]])
    stale = Case(*(np.where(valid[..., None, None], x, bad) for x in case(4)))
    clean = Case(*(np.where(valid[..., None, None], x, 0) for x in case(4)))
    with jax.enable_x64(True):
        ours = [np.asarray(x) for x in jax.tree.leaves(compiled(causal=causal, block=4)(*stale, valid))]
    for x, y in zip(ours[:1] + ours[3:], definition(clean, valid, causal=causal), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    assert all((gradient[~valid] == 0).all() for gradient in ours[3:])


def test_half_precision_is_computed_in_float32_and_gradients_come_as_the_inputs_are():
    causal, dtype = True, "bfloat16"
    narrow = Case(*(x.astype(jnp.dtype(dtype)) for x in case(9)))
    loss, gradients = compiled(causal=causal, block=4)(*narrow, None)
    assert loss.dtype == jnp.float32 and all(gradient.dtype == dtype for gradient in gradients)
    expected, expected_query, _ = definition(Case(*(np.asarray(x, np.float64) for x in narrow)), causal=causal)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradients[2], np.float64), expected_query, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("error", [1.0, 0.1, 0.01])
def test_float32_keeps_the_loss_of_a_predictor_that_errs_by_a_share_of_the_logits(error):
    """Sums of squared logits cancel: digits are lost as the square of the share that the predictor errs by."""
    rng = np.random.default_rng(10)
    query, key = rng.normal(size=(1, 300, 2, 16)), rng.normal(size=(1, 300, 1, 16))
    key[..., 3] += 20  # keys of real models lean far to one side
    off = query + error * rng.normal(size=query.shape)
    given = Case(*(x.astype(np.float32) for x in (query, key, off, np.repeat(key, 2, axis=2))))
    loss, gradients = compiled(causal=True)(*given, None)
    expected, *expected_gradients = definition(given, causal=True)
    np.testing.assert_allclose(loss, expected, rtol=1e-6 + 3e-7 / error**2)
    for ours, theirs in zip(gradients[2:], expected_gradients, strict=True):
        distance = np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)
        assert distance < 3e-6 / error


def test_memory_grows_with_the_tokens_and_holds_no_pairs():
    def temporary(T: int) -> int:
        shapes = [(1, T, 4, 32), (1, T, 2, 32), (1, T, 4, 16), (1, T, 4, 16)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        run = jax.jit(jax.value_and_grad(functools.partial(mse_logits, causal=True), argnums=(2, 3)))
        return run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    inputs = 4096 * (4 + 2) * (32 + 16) * 4
    assert long < 4.2 * short and long < 4 * inputs < 4096 * 4096 * 4 / 3


def test_the_backward_pass_through_layers_keeps_none_of_the_models_queries_and_keys():
    given = jax.tree.map(np.float32, case(12))
    residuals = jax.eval_shape(lambda: jax.vjp(lambda *qk: mse_logits(*given[:2], *qk, causal=True), *given[2:])[1])
    kept = sorted(leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.size > 2 * 11 * 4)
    assert all(shape[-1] == given.predicted_query.shape[-1] for shape in kept)
