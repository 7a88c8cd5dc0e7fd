"""How the next token is drawn, at the ends of what can be asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import sampling
from models.sampling import Draws, Sampling
from tests.models.reference import softmax

sample = jax.jit(sampling.sample)
DRAWS = 4096
WIDTH = 6  # of all logits here, so that they share programs; what is missing is ruled out


def drawn(logits: list[float], dtype: str = "float32", **how: float) -> np.ndarray:
    """How often each token is drawn, in DRAWS rows of the same logits."""
    padded = np.full((DRAWS, WIDTH), -np.inf, np.float32)
    padded[:, : len(logits)] = logits
    found, _ = sample(jnp.asarray(padded, dtype), Draws(jax.random.key(0)), Sampling.of(**how))
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
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, None, None, None), (3.0, None, None, None), (0.7, 4, None, None), (1.3, None, 0.6, None),
        (1.0, 3, 0.8, None), (1.0, None, None, 0.3), (0.7, 5, None, 0.12),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_the_filtered_softmax(temperature, top_k, top_p, min_p):
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
    if min_p is not None:  # in the scaled probabilities, as in transformers
        probability[probability < min_p * probability.max()] = 0
        probability /= probability.sum()
    counts = drawn(logits.tolist(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
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
    whole, alone = (Sampling.of(temperature=1.0, top_p=p) for p in (1.0, None))
    for seed in range(20):
        key = jax.random.key(seed)
        assert sample(rows, Draws(key), whole)[0].item() == sample(rows, Draws(key), alone)[0].item()


def test_top_k_takes_no_more_than_k_of_equals_and_all_beyond_the_vocabulary_and_without_temperature_the_best():
    assert (drawn([1.0, 4.0, 4.0, 4.0], temperature=1.0, top_k=2) > 0).tolist() == [False, True, True, False]
    logits = [1.0, 0.0, 2.0]
    assert close(drawn(logits, temperature=1.0, top_k=2**31 - 1), softmax(np.array(logits)))
    assert drawn([2.0, 1.0, 4.0], temperature=0.0, top_k=3, top_p=0.5)[2] == DRAWS


def test_equals_of_the_most_likely_token_are_all_drawn_at_a_min_p_of_1():
    assert (drawn([4.0, 3.999, 4.0], temperature=1.0, min_p=1.0) > 0).tolist() == [True, False, True]


def test_a_repetition_penalty_divides_positive_logits_of_what_was_seen_and_multiplies_the_others():
    """As in transformers' RepetitionPenaltyLogitsProcessor: of both kinds, one is now below its neighbour."""
    logits = jnp.asarray([[3.0, 2.6, -1.0, -np.inf], [-2.0, -1.0, -1.1, -np.inf], [0.5, 3.0, 2.6, -np.inf]])
    seen = np.array([[True, False, True, True], [False, True, False, False], [True, False, True, False]])
    how, made = Sampling(repetition_penalty=1.2), []
    draws = Draws(None, seen)
    for _ in range(3):
        token, draws = sample(logits, draws, how)
        made.append(token.tolist())
    # Behind each choice its token is seen, too: 2.6 / 1.2 < 3 / 1.2, and -1.1 * 1.2 < -1 * 1.2.
    assert made == [[1, 2, 1], [0, 1, 1], [0, 1, 1]]
    assert np.asarray(draws.seen).sum(axis=1).tolist() == [4, 2, 3]


def test_a_repetition_penalty_comes_before_the_temperature_and_the_filters():
    logits, seen = jnp.asarray([[2.0, 1.9, 1.0]] * DRAWS), np.array([[True, False, False]] * DRAWS)
    how = Sampling(0.5, top_k=2, repetition_penalty=2.5)  # 0.8, 1.9, 1.0
    token, _ = sample(logits, Draws(jax.random.key(0), seen), how)
    expected = np.array([0, *softmax(np.array([1.9, 1.0]) / 0.5)])
    assert close(np.bincount(token, minlength=3), expected) and not (np.asarray(token) == 0).any()
