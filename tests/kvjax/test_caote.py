"""The link `caote`: what it measures, through W_O, over a block's scores. Its formula: test_scores.py."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks
from tests.kvjax.blocks import B, D, K, N, scores

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


@pytest.mark.parametrize("cross", [True, False])
def test_without_the_projection_it_says_what_to_hand_over(cross):
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target="output", cross=cross))
    kind = "factor" if cross else "gram"
    message = rf"target='output'.*reads the {kind} of the layer's output projection.*attend \(Context\(projection="
    with pytest.raises(ValueError, match=message):
        scores(policy, blocks.in_context(blocks.make(1).observation, projection=None))
    other, _ = projected(1, kvjax.caote(target="output", cross=not cross))
    with pytest.raises(ValueError, match=message):
        scores(policy, other)


def test_attend_evicts_through_the_output_and_holds_the_budget():
    policy = kvjax.chain(kvjax.h2o(), kvjax.caote(target="output"), kvjax.protect(sinks=1))
    rng = np.random.default_rng(9)
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    projection = blocks.project(weight, policy.needs.projections)
    sizes = dict(batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=6, block=6)
    cache = jax.jit(lambda: kvjax.empty_cache(policy, **sizes))()
    step = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=6))
    for _ in range(3):
        q, k, v = (rng.normal(size=(B, 6, heads, D)).astype(np.float32) for heads in (N, K, K))
        out, cache = step(cache, q, k, v, context=kvjax.Context(projection=projection))
        position = np.asarray(cache.position)
        assert np.isfinite(np.asarray(out)).all()
        assert ((position >= 0).sum(-1) == 6).all() and (position == 0).any(-1).all()
