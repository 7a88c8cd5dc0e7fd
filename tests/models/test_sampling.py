"""How the next token is drawn, at the ends of what can be asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Sampling, sample

DRAWS = 4096


def drawn(logits: list[float], dtype: str = "float32", **how: float) -> np.ndarray:
    """How often each token is drawn, in DRAWS rows of the same logits."""
    rows = jnp.broadcast_to(jnp.array(logits, dtype), (DRAWS, len(logits)))
    return np.bincount(sample(rows, jax.random.key(0), Sampling(**how)), minlength=len(logits))  # type: ignore[arg-type]


def expected(logits: list[float], temperature: float) -> np.ndarray:
    x = np.array(logits, np.float64) / temperature
    e = np.exp(x - x.max())
    return DRAWS * e / e.sum()


def close(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Within five standard deviations of what is expected."""
    return bool((np.abs(counts - expected) <= 5 * np.sqrt(np.maximum(expected, 1))).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-38, 1e-40, 5e-324])
def test_the_colder_the_nearer_to_greedy(temperature, dtype):
    assert drawn([1.0, 3.0, 2.0, -5.0], dtype, temperature=temperature)[1] == DRAWS


@pytest.mark.parametrize("logits", [[3e38, -3e38, 2e38], [1e30, 2e30, -2e30], [np.inf, 3.0, -np.inf]])
def test_large_logits_do_not_overflow(logits):
    assert drawn(logits, temperature=0.5)[int(np.argmax(logits))] == DRAWS


def test_half_precision_logits_are_drawn_in_single():
    logits = [600.0, 500.0, -65504.0, 65504.0]
    assert drawn(logits, "float16", temperature=1e-3)[3] == DRAWS


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_frequencies_are_those_of_the_softmax(temperature):
    logits = [1.0, 0.0, 2.0, -1.0, 0.5]
    assert close(drawn(logits, temperature=temperature), expected(logits, temperature))


@pytest.mark.parametrize("temperature", [1e38, 1e300])
def test_the_hottest_draws_alike_and_never_what_is_ruled_out(temperature):
    counts = drawn([1.0, -np.inf, 50.0], temperature=temperature)
    assert close(counts, np.array([DRAWS / 2, 0, DRAWS / 2]))
    assert counts[1] == 0


@pytest.mark.parametrize("temperature", [1e-40, 1.0, 1e38])
def test_top_1_is_greedy_at_any_temperature(temperature):
    assert drawn([2.0, 5.0, 5.0, 1.0], temperature=temperature, top_k=1)[1] == DRAWS


def test_of_equals_top_k_has_no_more_than_k():
    assert (drawn([1.0, 4.0, 4.0, 4.0], temperature=1.0, top_k=2) > 0).tolist() == [False, True, True, False]


def test_top_k_beyond_the_vocabulary_draws_from_all():
    logits = [1.0, 0.0, 2.0]
    assert close(drawn(logits, temperature=1.0, top_k=2**31 - 1), expected(logits, 1.0))


@pytest.mark.parametrize("temperature", [1e-40, 1.0, 1e38])
@pytest.mark.parametrize("top_p", [1e-40, 5e-324, 1e-9])
def test_the_smallest_share_is_greedy(temperature, top_p):
    assert drawn([2.0, 4.0, 4.0, 1.0], temperature=temperature, top_p=top_p)[1] == DRAWS


def test_a_share_of_1_leaves_no_token_out():
    logits = jax.random.normal(jax.random.key(1), (1, 50_000)) * 1e-3
    rows = jnp.broadcast_to(logits.at[0, 7].set(-9.0), (1, 50_000))  # the last in order, where rounding adds up
    whole, alone = (Sampling(1.0, top_p=p) for p in (1.0, None))
    for seed in range(20):
        key = jax.random.key(seed)
        assert sample(rows, key, whole).item() == sample(rows, key, alone).item()


@pytest.mark.parametrize(("top_p", "left"), [(0.45, 1), (0.55, 2), (0.75, 3), (0.99, 4)])
def test_a_share_takes_the_fewest_tokens_that_hold_it(top_p, left):
    logits = np.log([0.5, 0.2, 0.2, 0.1]).tolist()
    assert (drawn(logits, temperature=1.0, top_p=top_p) > 0).tolist() == [i < left for i in range(4)]


def test_a_share_counts_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    counts = drawn(logits, temperature=1.0, top_k=2, top_p=0.5)
    assert (counts > 0).tolist() == [True, False, False, False]
