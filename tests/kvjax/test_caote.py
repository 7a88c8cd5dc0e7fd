"""The link `caote`: what it measures, through W_O, over a block's scores. Its formula: test_scores.py."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks
from tests.kvjax.blocks import B, D, G, K, N
from tests.kvjax.definitions import attention_weights, eviction_errors, layer_errors, softmax

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


@pytest.mark.parametrize("link", ["caote", "caote(group='mean')", "fast_caote", "caote(target='output')"])
def test_beside_sinks_it_is_the_error_of_evicting_with_their_weight_left(link):
    """A sink is a token without a value that nobody evicts; in FastCAOTE's mean value it does not count."""
    rng, policy, sinks = np.random.default_rng(8), kvjax.parse(f"tova(heads='group')+{link}"), np.array([2.0, -1.0])
    key, value = rng.normal(size=(2, 1, 6, 1, D)).astype(np.float32)
    query = (12 * rng.normal(size=(1, 6, 2, D))).astype(np.float32)  # one token has most of the weight
    weight = rng.normal(size=(2, D, E)).astype(np.float32)
    kinds = tuple(policy.needs.projections)
    projection = kvjax.output_projection(weight, 1, kinds) if kinds else None
    context = kvjax.Context(sink_logits=sinks.astype(np.float32), projection=projection)
    cache = blocks.empty(policy, batch=1, kv_heads=1, query_heads=2, head_dim=D, budget=4, block=6)
    step = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=4))
    _, cache, evidence = step(cache, query, key, value, context=context)
    found = np.asarray(evidence.scores)[0, 0][np.argsort(np.asarray(cache.position)[0, 0])][-6:]
    logits = query[0, -1].astype(np.float64) @ key[0, :, 0].T / D**0.5
    A = softmax(np.append(logits, sinks[:, None], axis=1))
    V = np.append(value[0, :, 0], np.zeros((1, D)), axis=0).astype(np.float64)
    if link == "fast_caote":
        each = A[:, :-1] / (1 - A[:, :-1]) * np.linalg.norm(V[:-1].mean(0) - V[:-1], axis=-1)
        expected = np.linalg.norm(each, axis=0)
    elif "output" in link:
        expected = layer_errors(A, V, weight)[:-1]
    else:
        expected = eviction_errors(A.mean(0) if "mean" in link else A, V)[:-1]
    assert A[:, :-1].max() > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def scored(policy, **given):
    """The scores of six tokens [1, 1, S] in a layer with what is given, before anything is evicted."""
    query, key, value = np.random.default_rng(8).normal(size=(3, 1, 6, 2, D)).astype(np.float32)
    cache = blocks.empty(policy, batch=1, kv_heads=2, query_heads=2, head_dim=D, budget=6, block=6)
    step = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=6, context=kvjax.Context(**given)))
    return np.asarray(step(cache, query, key, value)[2].scores)[..., :6]


@pytest.mark.parametrize("score", ["h2o", "tova(heads='group')"])
def test_a_sink_that_takes_nothing_changes_nothing_where_tokens_have_left_the_sliding_window(score):
    policy = kvjax.parse(f"{score}+caote(target='value')+normalise@uniform")
    alone, beside = (scored(policy, sliding_window=4, **sink) for sink in ({}, {"sink_logits": np.full(2, -1e9)}))
    np.testing.assert_allclose(beside, alone, rtol=1e-5)


def test_beside_sinks_an_allocation_that_measures_attention_changes_no_score():
    name, sinks = "tova(heads='group')+caote", np.full(2, 0.5, np.float32)
    alone, measured = (scored(kvjax.parse(f"{name}{at}"), sink_logits=sinks) for at in ("@layer", "@d2o(window=4)"))
    np.testing.assert_allclose(measured, alone, rtol=1e-6)


def test_normalised_scores_keep_their_order_beside_a_value_that_is_not_finite():
    q, k, v = np.random.default_rng(9).normal(size=(3, 1, 5, 1, D)).astype(np.float32)
    v[0, 4] = np.nan
    policies = [kvjax.parse(f"tova(heads='group')+caote{link}") for link in ("", "+normalise")]
    kept = []
    for policy in policies:
        cache = blocks.empty(policy, batch=1, kv_heads=1, query_heads=1, head_dim=D, budget=2, block=5)
        _, cache = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=2))(cache, q, k, v)
        kept.append(sorted(set(np.asarray(cache.position).ravel().tolist())))
    assert kept[0] == kept[1] and 4 not in kept[0]
