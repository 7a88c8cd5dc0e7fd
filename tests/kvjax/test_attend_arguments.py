"""What attend and observe take: short names, counts that are known while tracing, caches with room and with state."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KVCache, PagedCache
from tests.kvjax.test_attend import BUDGET, B, D, G, K, N, S, T, start
from tests.tiers import first

LAYER = "tova(heads='group')@layer"


def block(tokens: int = T):
    q, kv = np.ones((B, tokens, N, D), np.float32), np.ones((B, tokens, K, D), np.float32)
    return q, kv, kv


@functools.cache
def pages(policy: str, *, most: int, pages: int = 99) -> PagedCache:
    init = kvjax.parse(policy).init
    sizes = dict(batch=B, kv_heads=K, pages=pages, page_size=2, most=most, head_dim=D)
    return jax.jit(lambda: PagedCache.init(init_state=lambda b, k, s: init(b, k, G, s, D), **sizes))()


@pytest.mark.parametrize("function", [kvjax.attend, kvjax.observe], ids=["attend", "observe"])
@pytest.mark.parametrize("policy", first(1, [None, "tova"]))
@pytest.mark.parametrize("tokens", first(1, [6, 1]))
def test_a_row_whose_tokens_do_not_fit_under_jit_is_nan(function, policy, tokens):
    promised = kvjax.Context(excess=6 if function is kvjax.observe else None)  # which is about an eviction
    step = jax.jit(functools.partial(function, policy=policy, context=promised))
    position = np.arange(6, dtype=np.int32) + np.zeros((B, 1), np.int32)
    out, cache, *_ = step(start(slots=8), *block(6), position)
    assert np.isfinite(out).all()
    if tokens == 1:
        out, cache, *_ = step(cache, *block(2), position[:, :2] + 6)
        assert np.isfinite(out).all()
    position = cache.next_position[:, None] + np.arange(tokens, dtype=np.int32)
    position = np.where(np.arange(B)[:, None] == 0, position, -1)  # one row needs room, the others none
    with jax.disable_jit(), pytest.raises(ValueError, match=f"{tokens} tokens do not fit"):
        step(cache, *block(tokens), position)
    out, cache, *_ = step(cache, *block(tokens), position)
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()


def test_a_promise_of_room_costs_no_check():
    step = functools.partial(kvjax.attend, policy="tova", budget=BUDGET)
    programs = (jax.make_jaxpr(functools.partial(step, context=kvjax.Context(excess=excess))) for excess in (T, None))
    told, untold = (str(program(start(kvjax.parse("tova")), *block())) for program in programs)
    assert "nan" in untold and "nan" not in told


def test_a_cache_that_holds_tokens_is_looked_into_outside_jit():
    cache, step = start(), jax.jit(kvjax.attend)
    for _ in range(S // T):
        _, cache = step(cache, *block())
    with pytest.raises(ValueError, match=f"{T} tokens do not fit: {T} more free slots are needed"):
        kvjax.attend(cache, *block())


def test_as_many_pages_as_the_budget_needs_will_do():
    step = jax.jit(functools.partial(kvjax.attend, policy=LAYER, budget=6))
    out, _ = jax.eval_shape(step, pages("tova", most=15, pages=20), *block())
    assert out.shape == (B, T, N, D)
    with pytest.raises(ValueError, match="make the cache with 20 pages, not 19"):
        jax.eval_shape(step, pages("tova", most=15, pages=19), *block())


@pytest.mark.parametrize("function", [kvjax.attend, kvjax.observe], ids=["attend", "observe"])
@pytest.mark.parametrize("layer", [None, 2, -1])
def test_in_a_cache_of_layers_a_block_is_of_one_of_them(function, layer):
    cache = kvjax.LayerCaches((start(),) * 2)
    said = rf"^the layer is {layer}; a cache of separate layers needs a number from 0 to 1\.$"
    with pytest.raises(ValueError, match=said):
        function(cache, *block(), policy=None, context=kvjax.Context(layer=layer))


@pytest.mark.parametrize("function", [kvjax.attend, kvjax.observe], ids=["attend", "observe"])
def test_which_layer_it_is_is_known_under_jit(function):
    def run(layer):
        return function(kvjax.LayerCaches((start(),) * 2), *block(), policy=None, context=kvjax.Context(layer=layer))

    with pytest.raises(ValueError, match=r"the layer is .*; a cache of separate layers needs a number from 0 to 1"):
        jax.eval_shape(run, np.int32(0))
    assert jax.eval_shape(functools.partial(run, np.int32(1)))[0].shape == (B, T, N, D)


def of_two_states() -> KVCache:
    """Make a cache of one layer with the state of two."""
    alone = start(kvjax.parse("h2o"))
    state = jax.tree.map(lambda leaf: np.stack([leaf] * 2), alone.state)
    return dataclasses.replace(alone, state=jax.device_put(state))


@pytest.mark.parametrize(
    ("tokens", "context", "message"),
    [
        (0, {}, "the block has no tokens"),
        (T, dict(sink_logits=[3.0]), r"sink_logits are \(1,\); expected"),
        (T, dict(sliding_window=0), "sliding_window is 0"),
        (T, dict(tokens=np.array([1, 7])), r"the context's tokens are \(2,\)"),
    ],
)
def test_what_does_not_fit_a_block_is_said(tokens, context, message):
    for function in (kvjax.attend, kvjax.observe):
        with pytest.raises(ValueError, match=message):
            function(start(), *block(tokens), policy=None, context=kvjax.Context(**context))


def test_a_block_without_tokens_does_not_enter():
    with pytest.raises(ValueError, match="there are no tokens"):
        kvjax.insert(start(), *block(0)[1:])
