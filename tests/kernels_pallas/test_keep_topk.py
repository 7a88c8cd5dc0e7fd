"""The slots of largest score in each head against a sort in NumPy, by the reference and the kernel for GPU."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas import keep_topk
from kernels_pallas.keep_topk import gpu
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in

B, K, S = 2, 3, 11
ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "keep_topk")


def case(seed: int, S: int = S, dtype: str = "float32") -> tuple:
    """Scores with ties, NaN and infinities, free slots, and positions in any order."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (B, K, S)) if rng.random() < 0.5 else rng.normal(size=(B, K, S))
    scores = np.where(rng.random((B, K, S)) < 0.2, rng.choice([np.nan, np.inf, -np.inf, -0.0], (B, K, S)), scores)
    position = np.stack([rng.permutation(3 * S)[:S] for _ in range(B * K)]).reshape(B, K, S)
    position = np.where(rng.random((B, K, S)) < rng.choice([0.0, 0.3, 1.0], (B, K, 1)), -1, position)
    budget = rng.integers(1, S + 2, B)
    return jnp.asarray(scores, dtype), position.astype(np.int32), budget.astype(np.int32)


def definition(scores, position, budget):
    """A stable sort of each head: the best come first, of equal ones the most recent; NaN is the worst."""
    kept = np.full_like(position, -1)
    for *lead, b, k in np.ndindex(position.shape[:-1]):
        at = (*lead, b, k)
        own = np.asarray(scores[at], np.float32)
        order = [s for s in np.argsort(-position[at], kind="stable") if position[at][s] >= 0]
        order.sort(key=lambda s: (np.isnan(own[s]), -own[s] if not np.isnan(own[s]) else 0))
        for s in order[: budget[b]]:
            kept[at][s] = position[at][s]
    return kept


@ways
@hypothesis.given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]))
@hypothesis.settings(max_examples=12)
def test_the_best_stay_and_of_equal_ones_the_recent(name, seed, dtype):
    given = case(seed, dtype=dtype)
    np.testing.assert_array_equal(compiled(name, excess=None)(*given), definition(*given))


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=12)
def test_where_one_token_is_too_many_the_worst_leaves(seed):
    given = one_too_many(*case(seed)[:2])
    np.testing.assert_array_equal(compiled("reference", excess=1)(*given), definition(*given))


def one_too_many(scores, position) -> tuple:
    """The heads of each row that hold the most tokens, and a budget of one less; the others are empty."""
    held = (position >= 0).sum(-1, keepdims=True)
    budget = np.maximum(held.max((1, 2)) - 1, 1).astype(np.int32)
    return scores, np.where(held > budget[:, None, None], position, -1), budget


def test_slots_are_read_in_several_chunks(monkeypatch):
    monkeypatch.setattr(gpu, "CHUNK", 128)
    run = jax.jit(functools.partial(targets.run_of("keep_topk", "gpu"), excess=None))
    given = case(2, S=300)
    np.testing.assert_array_equal(run(*given), definition(*given))


@ways
def test_layers_may_be_stacked(name):
    each = [case(seed) for seed in range(4)]
    scores, position = (np.stack([one[i] for one in each]) for i in range(2))
    budget = np.int32([3, 5])
    found = compiled(name, excess=None)(scores, position, budget)
    np.testing.assert_array_equal(found, [definition(*one, budget) for one in zip(scores, position, strict=True)])


def shapes(S: int, dtype: str) -> tuple:
    return (
        jax.ShapeDtypeStruct((1, 8, S), dtype),
        jax.ShapeDtypeStruct((1, 8, S), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )


@pytest.mark.parametrize("sizes", [(8320, "float32"), (1001, "bfloat16")], ids=str)
def test_auto_lowers_to_the_kernel(sizes):
    assert kernels_in("cuda", keep_topk, *shapes(*sizes)) == 1


@pytest.mark.parametrize("wide", [False, True])
def test_an_eviction_by_any_score_is_one_kernel(wide):
    cache = jax.eval_shape(lambda: kvjax.KVCache.init(batch=1, kv_heads=8, slots=8320, head_dim=64, dtype="bfloat16"))
    scores, *_ = shapes(8320, "float32")
    with jax.enable_x64(wide):
        assert kernels_in("cuda", functools.partial(kvjax.evict, budget=8192), cache, scores) == 1


@pytest.mark.parametrize(
    ("platform", "name", "T"),
    [("tpu", "pallas_tpu", 1), ("cuda", "pallas_gpu", 1), ("cuda", "pallas_mosaic_gpu", 4), ("cuda", "reference", 4)],
)
def test_the_implementation_of_attention_is_no_word_on_the_selection(platform, name, T):
    sizes = dict(batch=1, kv_heads=2, query_heads=4, head_dim=128, budget=64, block=8)
    cache = jax.eval_shape(lambda: kvjax.empty_cache("tova", dtype="bfloat16", **sizes))
    block = [jax.ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
    context = kvjax.Context(implementation=name, excess=T)
    text = targets.lowered(
        platform, functools.partial(kvjax.attend, policy="tova", budget=64, context=context), cache, *block
    )
    assert ("keep_topk" in text) == (name != "reference" and T > 1)


def test_what_the_kernel_does_not_take_is_left_to_the_reference():
    refused = functools.partial(targets.refused, "cuda", "keep_topk", keep_topk, excess=None)
    refused(shapes(gpu.SELECTED + 1, "float32"), "32769 slots")
    with jax.enable_x64(True):
        refused(shapes(9, "float64"), "scores are float64")


def test_where_one_token_leaves_the_kernel_runs_by_its_name_alone():
    for name, kernels in (("auto", 0), ("pallas_gpu", 1)):
        run = functools.partial(keep_topk, excess=1, implementation=name)
        assert kernels_in("cuda", run, *shapes(9, "float32")) == kernels
    given = one_too_many(*case(3)[:2])
    np.testing.assert_array_equal(compiled("gpu", excess=1)(*given), definition(*given))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda scores, position, budget: (scores[:, :, 1:], position, budget), "scores .2, 3, 10. and positions"),
        (lambda scores, position, budget: (scores, position, budget[1:]), "budget"),
        (lambda scores, position, budget: (scores, position, 0), "budget"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        keep_topk(*wrong(*case(0)))


def test_arrays_of_any_kind_are_taken():
    assert jax.jit(lambda: keep_topk([[[0.5, 0.25, 0.25]]], [[[0, 1, 2]]], 2))().tolist() == [[[0, -1, 2]]]
    assert keep_topk(np.zeros((1, 2, 0)), np.zeros((1, 2, 0), np.int8), 1, excess=1).shape == (1, 2, 0)


@pytest.mark.accelerator
def test_it_runs_on_a_gpu():
    targets.needs("gpu")
    given = case(5, S=9001)
    found, _ = targets.run_here("keep_topk", given, excess=None)
    np.testing.assert_array_equal(found, definition(*given))
