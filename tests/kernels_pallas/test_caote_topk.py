"""CAOTE's eviction, the reference and the kernels interpreted, against NumPy float64: errors, sets, odd shapes."""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import caote_topk
from kernels_pallas.caote_topk import gpu, tpu
from kernels_pallas.caote_topk.reference import Ends
from kernels_pallas.keep_topk import gpu as selection
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, needs, platforms, run_here
from tests.kvjax import definitions
from tests.tiers import first, matrix, nightly

OPTIONS: dict[str, Any] = dict(fast=False, norm=2, group="exact", excess=None, with_scores=True)


class Case(NamedTuple):
    weights: np.ndarray
    value: np.ndarray
    position: np.ndarray
    budget: np.ndarray
    protected: np.ndarray


def case(seed: int, B: int = 2, K: int = 2, G: int = 2, S: int = 9, D: int = 5, sharpness: float = 1) -> Case:
    """Slots in any order, some free and holding NaN; the sharper, the more weight lies on few tokens."""
    rng = np.random.default_rng(seed)
    position = np.stack([rng.permutation(S + 6)[:S] for _ in range(B * K)]).reshape(B, K, S)
    position[rng.random((B, K, S)) < 0.2] = -1
    weights = np.where(position[:, :, None] >= 0, rng.exponential(size=(B, K, G, S)) ** sharpness, 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    value = rng.normal(size=(B, K, S, D))
    value[position < 0] = np.nan
    budget, protected = rng.integers(1, S + 1, B), rng.random((B, K, S)) < 0.1
    return Case(*map(np.float32, (weights, value)), *map(np.int32, (position, budget)), protected)


def compiled(name: str, program=targets.compiled_run, **options):
    return program("caote_topk", name, **OPTIONS | options)


def run(name: str, given: Case, **options) -> tuple[np.ndarray, np.ndarray]:
    kept = compiled(name, **options)(*given)
    return np.asarray(kept.position), np.asarray(kept.scores)


def errors(given: Case, fast: bool = False, group: str = "exact") -> np.ndarray:
    """The definition, token by token: evict it, renormalise, measure; inf where protected, -inf where free."""
    B, K, S = given.position.shape
    result = np.full((B, K, S), -np.inf)
    for b, k in np.ndindex(B, K):
        live = given.position[b, k] >= 0
        A, V = (x.astype(np.float64) for x in (given.weights[b, k][:, live], given.value[b, k][live]))
        if not live.any():
            continue
        A = A.mean(0, keepdims=True) if group == "mean" else A
        if fast:
            others = A.sum(-1, keepdims=True) - A
            away = A / np.where(others > 0, others, 1) * np.linalg.norm(V.mean(0) - V, axis=-1)
        else:
            away = np.stack([evicting_each(a, V) for a in A])
        away = np.sqrt((away**2).sum(0))
        holds_all = ((A > 0) & (A.sum(-1, keepdims=True) <= A)).any(0)
        result[b, k, live] = np.where(holds_all, np.finfo(np.float32).max, away)
        result[b, k, live & given.protected[b, k]] = np.inf
    return result


def evicting_each(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How far one head's output moves when a token is taken away and the attention done again, for every token."""
    without = weights * ~np.eye(len(weights), dtype=bool)
    total = without.sum(-1, keepdims=True)
    output = (weights @ values) / max(weights.sum(), 1e-300)
    return np.linalg.norm(output - without @ values / np.where(total > 0, total, 1), axis=-1)


def best(scores: np.ndarray, position: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """The kept positions by a sort: by score, then by position."""
    heads = np.ndindex(position.shape[:2])
    mask = [definitions.kept(scores[b, k], position[b, k], int(budget[b])) for b, k in heads]
    return np.where(np.reshape(mask, position.shape), position, -1)


def check(name: str, given: Case, rtol: float = 2e-5, **options) -> None:
    kept, scores = run(name, given, **options)
    expected = errors(given, options.get("fast", False), options.get("group", "exact"))
    np.testing.assert_allclose(scores, expected, rtol=rtol, atol=1e-7)
    np.testing.assert_array_equal(kept, best(scores, given.position, given.budget))


every = pytest.mark.parametrize("name", ["reference", *targets.INTERPRETED])
anew = targets.compiled_run.__wrapped__


@every
@hypothesis.given(seed=st.integers(0, 2**32 - 1), sharpness=st.sampled_from([0.5, 1, 4]))
@hypothesis.settings(max_examples=4)
def test_the_kept_are_those_whose_loss_hurts_most(name, seed, sharpness):
    check(name, case(seed, sharpness=sharpness))


@every
def test_fast_caote_and_the_groups_mean(name):
    check(name, case(1), fast=True, group="mean")


@every
@pytest.mark.parametrize("excess", [None, 1])
def test_first_and_last_tokens_stay(name, excess):
    given = case(2)
    given = given._replace(budget=np.maximum((given.position >= 0).sum(-1).min(-1) - 1, 1).astype(np.int32))
    following = given.position.max(axis=(1, 2)) + 1
    ends = Ends(*(np.resize(np.int32(x), len(following)) for x in ([2, 0, 1], [1, 3, 0])), following)
    sinks, recent, following = (x[:, None, None] for x in ends)
    stays = (given.position < sinks) | (given.position >= following - recent)
    found = compiled(name, excess=excess)(*given, ends=ends)
    expected = compiled(name, excess=excess)(*given._replace(protected=given.protected | stays))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.isposinf(np.asarray(found.scores)).sum() > given.protected.sum()


@pytest.mark.parametrize("name", ["tpu", "gpu"])
@pytest.mark.parametrize(("fast", "excess"), first(1, [(False, None), (True, 1)]))
def test_values_may_pass_through_in_chunks(name, fast, excess, monkeypatch):
    """As a long cache's do: several chunks of a head on a TPU, programs and a selection by XLA on a GPU."""
    monkeypatch.setattr(tpu, "STEP", 128)
    monkeypatch.setattr(tpu, "VALUE_BYTES", 2 * 128 * 512)
    in_many_programs(monkeypatch)
    given = case(3, B=1, K=1, S=600, D=5, sharpness=3)
    if excess == 1:
        given = given._replace(budget=(given.position >= 0).sum(-1)[:, 0].astype(np.int32) - 1)
    kept = compiled(name, anew, fast=fast, excess=excess)(*given)
    np.testing.assert_allclose(kept.scores, errors(given, fast), rtol=2e-5)
    np.testing.assert_array_equal(kept.position, best(np.asarray(kept.scores), given.position, given.budget))


def in_many_programs(monkeypatch):
    """Ten chunks of 64 slots for four programs, then five, on a GPU, and ten programs that free a slot."""
    monkeypatch.setattr(gpu, "ELEMENTS", 16 * 64)
    monkeypatch.setattr(gpu, "PARTS", (4, 5))
    monkeypatch.setattr(gpu, "SLOTS", 64)
    monkeypatch.setattr(selection, "SELECTED", 128)


def test_of_equal_tokens_in_many_programs_the_oldest_leaves(monkeypatch):
    in_many_programs(monkeypatch)
    position = np.random.default_rng(0).permutation(600)[None, None].astype(np.int32)
    alike = np.full((1, 1, 1, 600), 1 / 600, np.float32), np.full((1, 1, 600, 5), 0.5, np.float32)
    run = compiled("gpu", anew, excess=1, with_scores=False)
    kept = run(*alike, position, np.int32([599]), None)
    np.testing.assert_array_equal(kept.position, np.where(position == 0, -1, position))
    assert kept.scores is None


@every
@pytest.mark.parametrize("scale", first(1, [2.0**126, 2.0**-90, 3.0]))
def test_weights_need_no_sum_of_one_however_large_or_small_they_are(name, scale):
    """As sums of attention have none; beyond 2^127 their sum overflows."""
    given = case(10, D=5, S=40)
    given.weights[:, :, 0] *= np.float32(8)
    weights = (given.weights * np.float64(scale)).astype(np.float32)
    kept, scores = run(name, given._replace(weights=weights))
    expected = errors(given._replace(weights=weights.astype(np.float64)))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_array_equal(kept, best(scores, given.position, given.budget))


@every
def test_half_precision_values_are_scored_in_float32(name):
    given = case(4)
    narrow = given.value.astype(jnp.dtype("bfloat16"))
    kept, scores = run(name, given._replace(value=narrow))
    np.testing.assert_allclose(scores, errors(given._replace(value=narrow.astype(np.float32))), rtol=2e-5)
    np.testing.assert_array_equal(kept, best(scores, given.position, given.budget))


@every
@pytest.mark.parametrize(
    ("mean", "spread", "heads"), first(2, [(0.0, 1.0, 2), (10.0, 0.1, 2), (10.0, 0.1, 5), (0.0, 1.0, 17)])
)
def test_stale_values_in_free_slots_count_nowhere_and_near_ones_are_told_apart(name, mean, spread, heads):
    """Values whose distance is a hundredth of their length, in half precision, and finite numbers in free slots."""
    given = case(9, G=heads, S=70, D=5)
    value = mean + spread * np.random.default_rng(9).normal(size=given.value.shape)
    narrow = value.astype(jnp.dtype("bfloat16"))
    kept, scores = run(name, given._replace(value=narrow))
    expected = errors(given._replace(value=narrow.astype(np.float32)))
    np.testing.assert_allclose(scores, expected, rtol=5e-5)
    np.testing.assert_array_equal(kept, best(scores, given.position, given.budget))


@every
def test_of_equal_tokens_the_more_recent_stay(name):
    given = case(5)
    live = given.position >= 0
    alike = given._replace(
        weights=np.where(live, 1 / live.sum(-1, keepdims=True), 0)[:, :, None].repeat(2, 2).astype(np.float32),
        value=np.where(live[..., None], np.float32(0.5), np.full_like(given.value, np.nan)),
        protected=np.zeros_like(live),
        budget=np.int32([3, 4]),
    )
    kept, _ = run(name, alike)
    for b, k in np.ndindex(2, 2):
        newest = np.sort(alike.position[b, k][live[b, k]])[-alike.budget[b] :]
        assert sorted(kept[b, k][kept[b, k] >= 0]) == sorted(newest)


@every
def test_the_one_token_too_many_in_decode_is_found_without_a_bisection(name):
    given = case(16)
    most = (given.position >= 0).sum(-1).max(-1)
    check(name, given._replace(budget=np.int32([most[0] - 1, most[1]])), excess=1)

    def bisections(excess: int | None) -> int:
        run = functools.partial(targets.run_of("caote_topk", name), **(OPTIONS | {"excess": excess}))
        # The first of 32 steps is outside the loop.
        return str(jax.make_jaxpr(run)(*map(jnp.asarray, given))).count("length=31")

    assert (bisections(None), bisections(1)) == (2, 0)


@every
@pytest.mark.parametrize("share", [0.9999, 1 - 1e-7, 1.0])
def test_a_token_with_nearly_all_the_weight_keeps_its_own_error(name, share):
    given = case(6)
    heavy = np.argmax(given.weights[..., :1, :], axis=-1)
    weights = given.weights.astype(np.float64)
    np.put_along_axis(weights, heavy[..., None].repeat(2, 2), 0, axis=-1)
    weights *= (1 - share) / weights.sum(-1, keepdims=True)
    np.put_along_axis(weights, heavy[..., None].repeat(2, 2), share, axis=-1)
    check(name, given._replace(weights=weights.astype(np.float32)), rtol=1e-4)


@every
@pytest.mark.parametrize("where", ["value", "weights"])
def test_what_is_not_finite_leaves_first_and_counts_nowhere(name, where):
    given = case(8)
    bad = np.argmax(given.weights[..., 0, :], axis=-1)  # the heaviest of each head
    index = (*np.indices(bad.shape), bad)
    poisoned = given._replace(value=given.value.copy(), weights=given.weights.copy(), protected=given.protected & False)
    if where == "value":
        poisoned.value[(*index, 0)] = np.inf
    else:
        poisoned.weights[index[0], index[1], 1, index[2]] = np.nan
    without = poisoned._replace(position=given.position.copy(), weights=given.weights.copy())
    without.position[index] = -1
    kept, scores = run(name, poisoned)
    assert (scores[index] == -np.inf).all()
    np.testing.assert_allclose(scores, run("reference", without)[1], rtol=1e-5)
    live = (given.position >= 0).sum(-1)
    assert (kept[index] == -1)[live > given.budget[:, None]].all()


def shapes(B: int, K: int, G: int, S: int, D: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = (((B, K, G, S), jnp.float32), ((B, K, S, D), dtype), ((B, K, S), jnp.int32), ((B,), jnp.int32))
    return tuple(jax.ShapeDtypeStruct(*size) for size in (*sizes, ((B, K, S), jnp.bool_)))


def evict(weights, value, position, budget, protected, excess=None):
    return caote_topk(weights, value, position, budget, protected=protected, excess=excess)


evict_one = functools.partial(evict, excess=1)


TARGETS = [
    (1, 8, 4, 8320, 128, "bfloat16"),
    (1, 1, 1, 1, 64, "float32"),
    (2, 3, 5, 1001, 80, "bfloat16"),
    (1, 2, 16, 513, 96, "float32"),
    (1, 3, 7, 40_000, 256, "bfloat16"),
]


# Where one token leaves, the selection alone is another: of a few slots, and of more than a GPU's kernel takes.
@pytest.mark.parametrize(
    ("leaves", "sizes"), first(2, [(evict, TARGETS[0]), (evict_one, TARGETS[4]), (evict_one, TARGETS[2])])
)
@platforms
def test_auto_lowers_to_the_kernels(platform, leaves, sizes):
    one_less = leaves is evict and sizes[3] > selection.SELECTED  # there XLA selects
    assert kernels_in(platform, leaves, *shapes(*sizes)) == {"tpu": 1, "cuda": 3 - one_less}[platform]


@matrix
@platforms
def test_values_beyond_32_bits_lower(platform):
    given = shapes(256, 8, 4, 8320, 128, "bfloat16")
    assert kernels_in(platform, evict, *given) == {"tpu": 1, "cuda": 3}[platform]


@pytest.mark.accelerator
@pytest.mark.parametrize(("sizes",), first(1, [(x,) for x in (*TARGETS, (1, 2, 2, 300, 128, "float16"))]), ids=str)
@pytest.mark.parametrize("fast", first(1, [False, True]))
def test_it_runs_on_a_gpu_or_tpu(fast, sizes):
    needs("gpu", "tpu")
    B, K, G, S, D, dtype = sizes
    given = case(16, B, K, G, S, D)
    arrays = [jnp.asarray(x) for x in given]
    arrays[1] = arrays[1].astype(dtype)
    options = OPTIONS | {"fast": fast}
    kept, expected = run_here("caote_topk", arrays, **options)
    np.testing.assert_allclose(kept.scores, expected.scores, rtol=1e-4, atol=1e-9)
    np.testing.assert_array_equal(kept.position, best(np.asarray(kept.scores), given.position, given.budget))


# On a mesh, each chip on its own heads: see test_dispatch.py.
@pytest.mark.tpu
@matrix  # the TPU compiler is dear
@pytest.mark.parametrize(("sizes",), first(1, [(x,) for x in TARGETS], rest=nightly), ids=str)
@pytest.mark.parametrize(
    ("topology", "leaves"), first(1, [("v5e:2x2", evict), ("v6e:2x2", evict_one)], rest=nightly), ids=["many", "one"]
)
def test_it_compiles_for_a_tpu(topology, leaves, sizes):
    program = compiled_for_tpu(topology, leaves, *shapes(*sizes))
    assert "tpu_custom_call" in program.as_text()
    B, K, _, S, D, dtype = sizes
    values = B * K * S * D * jnp.dtype(dtype).itemsize
    assert program.memory_analysis().temp_size_in_bytes < 0.25 * values + 2**20  # no second copy of V
