"""How the next token is drawn, at the ends of what can be asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Sampling, sample
from tests.models.reference import softmax

DRAWS = 4096
WIDTH = 6  # of all logits here, so that they share programs; what is missing is ruled out


def drawn(logits: list[float], dtype: str = "float32", **how: float) -> np.ndarray:
    """How often each token is drawn, in DRAWS rows of the same logits."""
    padded = np.full((DRAWS, WIDTH), -np.inf, np.float32)
    padded[:, : len(logits)] = logits
    found, _ = sample(jnp.asarray(padded, dtype), jax.random.key(0), Sampling(**how))  # type: ignore[arg-type]
    counts = np.bincount(found, minlength=len(logits))
    assert not counts[len(logits) :].any()
    return counts[: len(logits)]


def close(counts: np.ndarray, probability: np.ndarray) -> bool:
    """Within five standard deviations of what is expected."""
    expected = DRAWS * probability
    return bool((np.abs(counts - expected) <= 5 * np.sqrt(np.maximum(expected, 1))).all())


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-40, 5e-324])
def test_the_colder_the_nearer_to_greedy(temperature):
    assert drawn([1.0, 3.0, 2.0, -5.0], temperature=temperature)[1] == DRAWS


@pytest.mark.parametrize("logits", [[3e38, -3e38, 2e38], [np.inf, 3.0, -np.inf]])
def test_large_logits_do_not_overflow(logits):
    assert drawn(logits, temperature=0.5)[int(np.argmax(logits))] == DRAWS


def test_half_precision_logits_are_drawn_in_single():
    logits = [600.0, 500.0, -65504.0, 65504.0]
    assert drawn(logits, "float16", temperature=1e-3)[3] == DRAWS


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, None), (3.0, None, None), (0.7, 4, None), (1.3, None, 0.6), (1.0, 3, 0.8)],
)
def test_frequencies_are_those_of_the_filtered_softmax(temperature, top_k, top_p):
    logits = np.array([2.0, 0.3, 1.1, -0.5, 1.6, 0.9])
    probability = softmax(logits / temperature)
    ranking = np.argsort(-probability)
    if top_k is not None:
        probability[ranking[top_k:]] = 0
        probability /= probability.sum()
    if top_p is not None:  # the fewest tokens that hold the share
        needed = 1 + int(np.searchsorted(np.cumsum(probability[ranking]), top_p))
        probability[ranking[needed:]] = 0
        probability /= probability.sum()
    counts = drawn(logits.tolist(), temperature=temperature, top_k=top_k, top_p=top_p)
    assert close(counts, probability)
    assert (counts[probability == 0] == 0).all()


def test_the_hottest_draws_alike_and_never_what_is_ruled_out():
    counts = drawn([1.0, -np.inf, 50.0], temperature=1e300)
    assert close(counts, np.array([0.5, 0, 0.5])) and counts[1] == 0


@pytest.mark.parametrize("temperature", [1e-40, 1.0, 1e38])
@pytest.mark.parametrize("least", [dict(top_k=1), dict(top_p=5e-324), dict(top_p=1e-9)], ids=str)
def test_top_1_and_the_smallest_share_are_greedy_at_any_temperature(temperature, least):
    assert drawn([2.0, 5.0, 5.0, 1.0], temperature=temperature, **least)[1] == DRAWS


@pytest.mark.matrix
def test_a_share_of_1_leaves_no_token_out():
    logits = jax.random.normal(jax.random.key(1), (1, 50_000)) * 1e-3
    rows = jnp.broadcast_to(logits.at[0, 7].set(-9.0), (1, 50_000))  # the last in order, where rounding adds up
    whole, alone = (Sampling(1.0, top_p=p) for p in (1.0, None))
    for seed in range(20):
        key = jax.random.key(seed)
        assert sample(rows, key, whole)[0].item() == sample(rows, key, alone)[0].item()


def test_top_k_takes_no_more_than_k_of_equals_and_all_beyond_the_vocabulary_and_without_temperature_the_best():
    assert (drawn([1.0, 4.0, 4.0, 4.0], temperature=1.0, top_k=2) > 0).tolist() == [False, True, True, False]
    logits = [1.0, 0.0, 2.0]
    assert close(drawn(logits, temperature=1.0, top_k=2**31 - 1), softmax(np.array(logits)))
    assert drawn([2.0, 1.0, 4.0], temperature=0.0, top_k=3, top_p=0.5)[2] == DRAWS
