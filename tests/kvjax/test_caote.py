"""The link `caote`: what it measures, through W_O, over a block's scores. Its formula: test_scores.py."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks
from tests.kvjax.blocks import B, D, G, K, N
from tests.kvjax.definitions import attention_weights, layer_errors

E = 7


def projected(seed: int, policy: kvjax.Policy | str, **options) -> tuple[blocks.Block, np.ndarray]:
    """A block whose layer offers what the policy asks of W_O, and W_O itself, [N, D, E]."""
    policy = kvjax.parse(policy) if isinstance(policy, str) else policy
    weight = np.random.default_rng(seed).normal(size=(N, D, E)).astype(np.float32)
    block = blocks.make(seed, **options)
    projection = blocks.project(weight, policy.needs.projections)
    return block._replace(observation=blocks.in_context(block.observation, projection=projection)), weight


@pytest.mark.parametrize(("cross", "kind"), [(True, "factor"), (False, "gram")])
def test_through_the_output_it_asks_for_what_it_reads(cross, kind):
    assert kvjax.caote(target="output", cross=cross).needs.projections == {kind}
    assert kvjax.chain(kvjax.h2o(), kvjax.fast_caote(target="output", cross=cross)).needs.projections == {kind}
    assert kvjax.caote().needs.projections == frozenset()


def test_attend_evicts_through_the_output_and_holds_the_budget():
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target="output"), kvjax.protect(sinks=1))
    rng = np.random.default_rng(9)
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    projection = blocks.project(weight, policy.needs.projections)
    sizes = dict(batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=6, block=6)
    cache = blocks.empty(policy, **sizes)
    step = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=6))
    for _ in range(3):
        q, k, v = (rng.normal(size=(B, 6, heads, D)).astype(np.float32) for heads in (N, K, K))
        out, cache = step(cache, q, k, v, context=kvjax.Context(projection=projection))
        position = np.asarray(cache.position)
        assert np.isfinite(np.asarray(out)).all()
        assert ((position >= 0).sum(-1) == 6).all() and (position == 0).any(-1).all()


def test_in_pages_each_head_is_measured_through_its_own_groups_part_of_the_projection():
    positions = jax.jit(lambda cache: (cache.layer() if cache.paged else cache).position)
    rng, found = np.random.default_rng(6), []
    given = [rng.normal(size=(B, 6, heads, D)).astype(np.float32) for heads in (N, K, K)]
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    for policy in map(kvjax.parse, (f"h2o+caote(target='output')+protect(recent=0){a}" for a in ("", "@layer"))):
        cache = blocks.empty(policy, batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=4, block=6, page_size=2)
        context = kvjax.Context(projection=blocks.project(weight, policy.needs.projections))
        _, cache, evidence = jax.jit(functools.partial(kvjax.observe, policy=policy))(cache, *given, context=context)
        place = np.argsort(positions(cache), axis=-1)[..., -6:]
        found.append(np.take_along_axis(np.asarray(evidence.scores), place, axis=-1))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize(("target", "over"), [("value", "mean"), ("output", "mean"), ("value", "max")])
def test_per_query_it_is_the_root_of_the_mean_or_of_each_heads_largest_squared_error(target, over):
    policy = kvjax.parse(f"snapkv(window=2,kernel=1)+caote(per='query',target='{target}',over='{over}')")
    rng = np.random.default_rng(4)
    T = 6
    q, k, v = (rng.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (N, K, K))
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    cache = blocks.empty(policy, batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=4, block=6)
    observe = jax.jit(functools.partial(kvjax.observe, policy=policy))
    context = kvjax.Context(projection=blocks.project(weight, policy.needs.projections))
    _, cache, evidence = observe(cache, q, k, v, context=context)
    for b, h in np.ndindex(B, K):
        at = np.asarray(cache.position[b, h])
        group, squares = slice(h * G, (h + 1) * G), []
        for t in (T - 2, T - 1):
            own = np.stack([attention_weights(q[b, t, n], k[b, :, h], np.arange(T), t) for n in range(N)[group]])
            projected = weight[group] if target == "output" else None
            heads = [own] if over == "mean" else own[:, None]
            squares.append([layer_errors(head, v[b, :, h], projected)[: T - 2] ** 2 for head in heads])
        joined = np.mean(squares, axis=0) if over == "mean" else np.max(squares, axis=0)
        for token, expected in enumerate(np.sqrt(joined.sum(axis=0))):
            np.testing.assert_allclose(np.asarray(evidence.scores[b, h])[at == token], expected, rtol=2e-4)


def test_of_a_single_query_both_kinds_of_errors_are_the_same():
    rng = np.random.default_rng(5)
    given = [rng.normal(size=(B, 6, heads, D)).astype(np.float32) for heads in (N, K, K)]

    def of(name):
        cache = kvjax.empty_cache(name, batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=4, block=6)
        return kvjax.observe(cache, *given, policy=name)[2].scores

    one, other = jax.jit(lambda: (of("tova+caote"), of("tova+caote(per='query')")))()
    np.testing.assert_allclose(one[..., :6], other[..., :6], rtol=1e-4)  # the others are free
