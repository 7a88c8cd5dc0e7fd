"""The best tokens in hindsight, and bounds of their error, against enumeration in float64."""

import itertools

import jax
import numpy as np
import pytest

from evals import best_tokens
from tests.kvjax import definitions

G, T, D, S, LATER, B = 2, 3, 4, 8, 2, 3


def draw(seed: int):
    """Logits with a first token that is always read, values, and W_O."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(G, T, S + LATER)) * 1.5
    logits[..., 0] += 2
    logits[:, 0, -1] = -np.inf  # the last token comes after the first query
    return logits, rng.normal(size=(S + LATER, D)), rng.normal(size=(G, D, 5))


def redone(logits, value, weight, kept) -> float:
    """Do the attention again over what stays; ``kept`` [G, S]."""
    total = 0.0
    for g, t in np.ndindex(G, T):
        live = np.concatenate([kept[g], np.ones(LATER, bool)]) & np.isfinite(logits[g, t])
        full = definitions.softmax(logits[g, t]) @ value
        after = definitions.softmax(logits[g, t][live]) @ value[live]
        total += np.sum(((after - full) @ weight[g]) ** 2)
    return total


SETS = np.array([[i in chosen for i in range(S)] for chosen in itertools.combinations(range(S), B)])


def enumerated(logits, value, weight) -> np.ndarray:
    return np.array([redone(logits, value, weight, np.broadcast_to(kept, (G, S))) for kept in SETS])


@pytest.fixture(scope="module")
def drawn():
    with jax.enable_x64(True):
        found = []
        for seed in range(4):
            logits, value, weight = draw(seed)
            found.append((best_tokens.make_case(logits, value, S, weight), enumerated(logits, value, weight)))
        return found


def test_the_error_is_that_of_doing_the_attention_again_for_each_head():
    logits, value, weight = draw(9)
    kept = np.random.default_rng(9).random((G, S)) < 0.5
    with jax.enable_x64(True):
        for behind in (weight, None):
            case = best_tokens.make_case(logits, value, S, behind)
            expected = redone(logits, value, np.broadcast_to(np.eye(D), (G, D, D)) if behind is None else behind, kept)
            assert float(best_tokens.error(case, kept)) == pytest.approx(expected, rel=1e-10)


def test_a_step_knows_the_error_after_each_eviction_and_each_return(drawn):
    case, _ = drawn[0]
    evicted = np.arange(S) % 3 == 1
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(best_tokens._after)(case, jax.jit(best_tokens._squares)(case), evicted))
        for token in range(S):
            changed = evicted.copy()
            changed[token] = ~changed[token]
            assert found[token] == pytest.approx(float(best_tokens.error(case, ~changed)), rel=1e-9)


def test_the_search_is_within_a_tenth_of_enumeration_and_improves_what_it_is_given(drawn):
    with jax.enable_x64(True):
        for case, errors in drawn:
            kept = np.asarray(best_tokens.best(case, B))
            assert kept.sum() == B
            assert errors.min() * (1 - 1e-9) <= float(best_tokens.error(case, kept)) <= 1.1 * errors.min()
            worst = SETS[errors.argmax()]
            better = np.asarray(best_tokens.improve(case, worst))
            assert better.sum() == B and float(best_tokens.error(case, better)) < errors.max()


def test_the_relaxation_is_below_every_set_with_or_without_decided_tokens(drawn):
    with jax.enable_x64(True):
        for case, errors in drawn:
            for evicted, kept in (([], []), ([1], [0, 2])):
                low, high = np.zeros(S), np.ones(S)
                low[evicted], high[kept] = 1, 0
                allowed = SETS[:, kept].all(axis=1) & ~SETS[:, evicted].any(axis=1)
                start = np.full(S, 1 - B / S)
                found, z = best_tokens.lower_bound(case, low, high, S - B, start, steps=100)
                assert 0 < float(found) <= errors[allowed].min()
                assert np.all((z >= low) & (z <= high)) and np.sum(z) == pytest.approx(S - B, abs=1e-6)


def test_branch_and_bound_ends_at_the_smallest_error(drawn, monkeypatch):
    monkeypatch.setattr(best_tokens, "FEW", 4)  # so that it has to branch
    for case, errors in drawn:
        found = best_tokens.bracket(case, B, steps=100)
        assert found.error == pytest.approx(errors.min(), rel=1e-9) and found.nodes > 3
        assert found.lower == pytest.approx(found.error, rel=1e-8)
        early = best_tokens.bracket(case, B, nodes=2, steps=100)
        assert 0 < early.lower <= errors.min() * (1 + 1e-12) and early.error >= errors.min() * (1 - 1e-12)
    # The search alone finds the best of so few tokens: from the worst set, the branches have to.
    monkeypatch.setattr(best_tokens, "improve", lambda case, kept: kept)
    for case, errors in drawn[:2]:
        monkeypatch.setattr(best_tokens, "best", lambda *given: SETS[errors.argmax()])  # noqa: B023
        whole, early = (best_tokens.bracket(case, B, nodes=nodes, steps=100) for nodes in (1000, 2))
        assert whole.error == pytest.approx(errors.min(), rel=1e-9) and early.lower <= errors.min() <= early.error
