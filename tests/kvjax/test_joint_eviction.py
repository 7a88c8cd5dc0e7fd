"""`joint_score` against brute force: evict, do the attention of what is left again, and choose anew."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from kvjax.joint_eviction import joint_score
from tests.tiers import first

S, D, G, E = 12, 4, 3, 9
LARGEST = float(np.finfo(np.float32).max)
FORMS = {"value": {}, "output": {"cross": True}, "heads apart": {"cross": False}}
each_form = pytest.mark.parametrize("form", first(1, ["output", "value"]))

seeds = st.integers(0, 2**32 - 1)


class Head(NamedTuple):
    """One KV head: weights of its query heads [G, S], values, W_O [G, D, E], position and protection of its slots."""

    A: np.ndarray
    V: np.ndarray
    W: np.ndarray
    position: np.ndarray
    protected: np.ndarray

    @property
    def live(self) -> np.ndarray:
        return np.flatnonzero(self.position >= 0)

    def output(self, slots: np.ndarray, cross: bool | None) -> np.ndarray:
        """What leaves the heads (cross None), each head's W_O (False), or the layer, with no slots but these."""
        weights = self.A[:, slots] / self.A[:, slots].sum(-1, keepdims=True)
        X = weights @ self.V[slots]
        if cross is None:
            return X
        behind = np.einsum("gd,gde->ge", X, self.W)
        return behind.sum(0) if cross else behind

    def errors(self, left: np.ndarray, cross: bool | None) -> np.ndarray:
        """How the output of the slots that are left moves without each of them."""
        before = self.output(left, cross)
        return np.array([np.linalg.norm(before - self.output(left[left != j], cross)) for j in left])

    def rounds(self, leaving: int, rounds: int, cross: bool | None) -> tuple[list[list[int]], dict[int, float]]:
        """Who leaves in each round, in order, and the errors in the last round of those that stay."""
        left, gone = self.live, []
        for i in range(rounds):
            errors = self.errors(left, cross)
            candidates = sorted(
                (error, self.position[slot], slot)
                for error, slot in zip(errors, left, strict=True)
                if not self.protected[slot]
            )
            n = leaving * (i + 1) // rounds - leaving * i // rounds
            gone.append([int(slot) for *_, slot in candidates[:n]])
            last = dict(zip(left.tolist(), errors.tolist(), strict=True))
            left = left[~np.isin(left, gone[-1])]
        return gone, {slot: last[slot] for slot in left.tolist()}


def draw(seed: int, *, peak: float | None = None, free: int = 2, protected: int = 2) -> Head:
    rng = np.random.default_rng(seed)
    peak = 10 ** rng.uniform(-1, 0.5) if peak is None else peak
    position = rng.permutation(50)[:S].astype(np.int32)
    position[rng.permutation(S)[:free]] = -1
    live = position >= 0
    protects = np.zeros(S, bool)
    protects[rng.permutation(np.flatnonzero(live))[:protected]] = True
    A = np.where(live, np.exp(peak * rng.normal(size=(G, S))), 0)
    V = rng.normal(size=(S, D)) * 10 ** rng.uniform(-2, 2)
    return Head(A / A.sum(-1, keepdims=True), V, rng.normal(size=(G, D, E)), position, protects)


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(joint_score, **options))


def scored(head: Head, leaving, rounds: int, dtype=np.float64, **options) -> np.ndarray:
    with jax.enable_x64(dtype == np.float64):
        A, V, W = (np.asarray(x, dtype) for x in head[:3])
        projection = {"projection": W} if "cross" in options else {}
        result = compiled(rounds=rounds, **options)(
            A, V, np.asarray(leaving, np.int32), position=head.position, protected=head.protected, **projection
        )
        assert result.dtype == dtype
        return np.asarray(result)


def check(result: np.ndarray, head: Head, gone: list[list[int]], stay: dict[int, float], rtol: float) -> None:
    assert (result[head.position < 0] == -np.inf).all()
    np.testing.assert_allclose(result[list(stay)], list(stay.values()), rtol=rtol)
    for i, round_ in enumerate(gone):
        start = i - len(gone)
        assert ((result[round_] >= start) & (result[round_] <= start + 0.5)).all()
    order = [slot for round_ in gone for slot in round_]
    assert (np.diff(result[order]) > 0).all() and (result[order] < 0).all()


@pytest.mark.parametrize(
    ("form", "rounds"),
    first(2, [("output", 3), ("value", 7), ("heads apart", 1)]),  # a token a round is the greedy order
)
@hypothesis.given(seed=seeds, leaving=st.integers(0, 8))
@hypothesis.settings(max_examples=8)
def test_each_round_is_exact_for_what_the_one_before_has_left(form, rounds, seed, leaving):
    head, options = draw(seed), FORMS[form]
    gone, stay = head.rounds(leaving, rounds, options.get("cross"))
    check(scored(head, leaving, rounds, **options), head, gone, stay, 1e-7)


@each_form
def test_heads_and_rows_lead_do_not_mix_and_lose_different_numbers(form):
    options = FORMS[form]
    heads = [draw(seed, free=seed % 4, protected=seed % 3) for seed in range(6)]
    W = [heads[k].W for k in range(3)]
    heads = [head._replace(W=W[n % 3]) for n, head in enumerate(heads)]
    stacked = Head(*(np.stack(x).reshape(2, 3, *x[0].shape) for x in zip(*heads, strict=True)))
    leaving = np.array([[3, 0, 6], [1, 5, 2]])
    result = scored(stacked._replace(W=np.stack(W)), leaving, 2, **options)  # one W_O a KV head, for all rows
    for n, head in enumerate(heads):
        gone, stay = head.rounds(int(leaving.flat[n]), 2, options.get("cross"))
        check(result[n // 3, n % 3], head, gone, stay, 1e-7)


@each_form
@pytest.mark.parametrize("rest", [1e-3, 1e-6, 1e-9])
def test_tokens_that_come_to_hold_almost_all_weight_keep_an_exact_score(form, rest):
    """The second token is heavy only once the first has left; the values share an offset."""
    A = np.array([[0.7, 0.3 - rest, rest / 2, rest / 2], [0.1, 0.2, 0.3, 0.4]])
    V = np.array([[100.0, 1.0], [101.0, 2.0], [102.0, -1.0], [103.0, 3.0]])
    W = np.random.default_rng(8).normal(size=(2, 2, 5))
    head = Head(A, V, W, np.arange(4, dtype=np.int32), np.array([False, True, True, True]))
    gone, stay = head.rounds(1, 1, FORMS[form].get("cross"))
    later = head._replace(A=np.where(np.arange(4) == 0, 0, A))
    _, expected = later._replace(position=np.array([-1, 1, 2, 3])).rounds(0, 1, FORMS[form].get("cross"))
    # In three rounds, of which only the first finds one that may leave.
    result = scored(head, 3, 3, np.float32, **FORMS[form])
    assert gone == [[0]] and set(stay) == {1, 2, 3} and result[0] < 0
    if np.float32(0.3 - rest) + np.float32(rest) > np.float32(0.3 - rest):
        np.testing.assert_allclose(result[1], expected[1], rtol=1e-4)
    else:  # it holds all the weight there is, as far as float32 can tell
        assert result[1] == np.float32(LARGEST)


def test_a_token_that_holds_all_the_weight_of_a_head_leaves_last():
    A = np.stack([np.eye(S)[2], np.full(S, 1 / S)])
    head = draw(9, free=0, protected=0)._replace(A=A)
    result = scored(head, S - 1, S, np.float32)
    assert (
        np.isfinite(result).all() and np.flatnonzero(result >= 0).tolist() == [2] and result[2] == np.float32(LARGEST)
    )


@each_form
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_that_are_not_finite_leave_first_and_poison_nothing(form, bad):
    head, options = draw(10, protected=0), FORMS[form]
    slot = head.live[3]
    stale = head._replace(V=np.where((head.position < 0)[:, None], bad, head.V))
    np.testing.assert_array_equal(scored(stale, 4, 3, **options), scored(head, 4, 3, **options))
    V = head.V.copy()
    V[slot, 1] = bad
    result = scored(head._replace(V=V), 3, 3, **options)
    freed = head._replace(
        position=np.where(np.arange(S) == slot, -1, head.position), A=np.where(np.arange(S) == slot, 0, head.A)
    )
    gone, stay = freed.rounds(2, 2, options.get("cross"))
    assert result[slot] == -np.inf
    check(result, freed, [[], *gone], stay, 1e-7)


def test_tiny_scores_keep_their_order():
    A = np.array([[0.5, 0.5 - 1e-15, 1e-22, 1e-30, 1e-26]] * 2)
    result = np.asarray(compiled(rounds=1)(A.astype(np.float32), np.eye(5, dtype=np.float32), 3))
    assert np.argsort(result).tolist()[:3] == [3, 4, 2] and len(set(result[2:].tolist())) == 3


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, r"rounds is 0; give an int from 1"),
        ({"group": "mean", "projection": np.ones((G, D, E))}, r"group is 'mean', .*a projection needs group='exact'"),
        ({"projection": np.ones((G, D + 1, E))}, r"projection \(3, 5, 9\) does not fit 3 query heads of dimension 4"),
        ({"position": np.arange(S + 1)}, r"position \(13,\) and values \(12, 4\) do not match: expected \(12,\)"),
        ({"A": np.ones((2, G, S))}, r"weights \(2, 3, 12\) and values \(12, 4\) do not match"),
    ],
    ids=str,
)
def test_input_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        joint_score(**{"A": np.ones((G, S)), "V": np.ones((S, D)), "leaving": 2, "rounds": 2, **options})
