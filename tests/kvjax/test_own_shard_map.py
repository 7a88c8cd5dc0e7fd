"""A plain cache inside a shard_map of the caller's own, over the heads of a layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kvjax
from tests.kvjax.blocks import in_layers
from tests.tiers import first

K, N, T, D, E, BUDGET = 4, 8, 4, 8, 6, 6
HEADS, TOKENS = P(None, "tensor"), P(None, None, "tensor")
LINKS = """
h2o+match snapkv(window=2)@cake(window=2) h2o+caote h2o+merge rkv(window=2) h2o tova sage curdkv random h2o+cam
dropkv(window=2) laprox(window=2)@uniform h2o+critical h2o+caote(per='query') expected_attention zap@uniform
kvzip@uniform kvgrad(measure='change')@uniform h2o+sample
lagkv(lag=2) h2o+chunks(size=2) h2o+positions butler(dim=4) dapq(window=2) h2o@model h2o@lava h2o@pyramid h2o@threshold
h2o@d2o(window=2) tova(heads='group')@simlayer h2o+merge@layer
""".split()


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("tensor",))


def rows(seed: int = 0, blocks: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(blocks, 1, T, heads, D)).astype(np.float32) for heads in (N, K, K)]


def context_of(policy: kvjax.Policy) -> kvjax.Context:
    """What the layer of one device provides, of half of the heads."""
    wanted = policy.needs.reconstruction
    copies = None
    if wanted is not None and not wanted.pseudo:
        copies = kvjax.Reconstructed(*(jnp.array([x]) for x in (0, 2, 4)))
    return kvjax.Context(
        layer=0,
        frequency=jnp.ones((1, D // 2)),
        projection=kvjax.output_projection(jnp.ones((N // 2, D, E)), K // 2, ["weight", "gram", "joint", "factor"]),
        predicted=kvjax.Prediction(*(jnp.ones((1, T, N // 2, 4)),) * 2, jnp.ones((1, T, K // 2))),
        reconstructed=copies,
        gradient=None if copies is None else jnp.ones((1, T, E)),
    )


@pytest.mark.parametrize("name", first(2, LINKS))
def test_whatever_evicts_passes_the_default_check_of_what_varies(name):
    """By shapes alone. A loop's carry must vary over the devices from its beginning as it does at its end."""
    policy = kvjax.parse(name)

    def on_device(query, key, value):
        sizes = dict(layers=1, kv_heads=K // 2, query_heads=N // 2, head_dim=D, budget=BUDGET, block=T)
        cache = kvjax.empty_cache(policy, **sizes).map(lambda own: dataclasses.replace(own, axis="tensor"))
        evidence = kvjax.Evidence.of_layers(cache, policy.allocation, merging=policy.merging)
        out, cache, said = kvjax.observe(cache, query, key, value, policy=policy, context=context_of(policy))
        return out, kvjax.evict(cache, evidence.with_layer(cache, 0, said), BUDGET).num_live

    run = jax.shard_map(on_device, mesh=mesh(), in_specs=(TOKENS,) * 3, out_specs=(TOKENS, TOKENS))
    assert jax.eval_shape(run, *(block[0] for block in rows()))[1].shape == (1, 1, K)


def kept(policy: str, axis: str | tuple[()] | None) -> np.ndarray:
    """Feed three blocks, on one device or in a shard_map that says which axis splits the heads."""

    def fed(cache, query, key, value):
        for block in zip(query, key, value, strict=True):
            _, cache = kvjax.attend(cache, *block, policy=policy, budget=BUDGET)
        return cache.position

    sizes = dict(kv_heads=K, query_heads=N, head_dim=D, budget=BUDGET, block=T)
    cache = dataclasses.replace(kvjax.empty_cache(policy, **sizes), axis=axis)
    if axis == "tensor":
        of_cache = jax.tree.map(lambda leaf: HEADS if leaf.ndim > 1 else P(), cache)
        blocks = P(None, None, None, "tensor")
        fed = jax.shard_map(fed, mesh=mesh(), in_specs=(of_cache, *(blocks,) * 3), out_specs=HEADS)
    return np.sort(np.asarray(jax.jit(fed)(cache, *rows(1, blocks=3))))


def test_heads_that_share_one_score_do_so_over_devices():
    np.testing.assert_array_equal(kept("tova", "tensor"), kept("tova", None))


@pytest.mark.parametrize("allocation", first(1, ["layer", "model"]))
def test_layers_know_the_axis_that_splits_their_heads(allocation):
    """Where heads compete, those of one device keep more than those of the other."""
    L, S = 2, 5
    rng, position = np.random.default_rng(2), np.broadcast_to(np.arange(S, dtype=np.int32), (L, 1, K, S))
    scores = rng.random((L, 1, K, S)).astype(np.float32) + np.arange(K)[:, None]
    row = np.zeros((*position.shape, 1), np.float32)
    cache = in_layers(row, row, position, np.full(1, S, np.int32), axis=())

    def evicted(cache, scores):
        return kvjax.evict(cache, scores, 2, allocation=allocation).position

    split = cache.map(lambda own: dataclasses.replace(own, axis="tensor"))
    specs = jax.tree.map(lambda leaf: HEADS if leaf.ndim > 1 else P(), split), P(None, None, "tensor")
    on_devices = jax.shard_map(evicted, mesh=mesh(), in_specs=specs, out_specs=specs[1])
    kept = np.asarray(jax.jit(on_devices)(split, scores))
    np.testing.assert_array_equal(kept, jax.jit(evicted)(cache, scores))
    assert (kept >= 0).sum((0, 1, 3)).tolist() == [0, 0, L * 3, L * 5]


@pytest.mark.matrix
def test_heads_are_numbered_over_devices():
    np.testing.assert_array_equal(kept("random", "tensor"), kept("random", ()))


def test_what_joins_heads_must_know_how_they_are_split():
    cache = kvjax.KVCache.init(batch=1, kv_heads=K, slots=BUDGET + T, head_dim=D)
    scores = np.ones((1, K, BUDGET + T), np.float32)

    def refused(function, *given):
        specs = tuple(jax.tree.map(lambda leaf: P(), tree) for tree in given)
        run = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=P())
        with pytest.raises(ValueError) as error:
            jax.eval_shape(run, *given)
        return str(error.value)

    said = refused(lambda *given: kvjax.attend(*given, policy="tova", budget=BUDGET)[0], cache, *(r[0] for r in rows()))
    assert said == (
        "'tova' joins the heads of a layer, but jax.shard_map over tensor may split them: "
        "give dataclasses.replace(cache, axis='tensor'), or axis=() if it does not."
    )
    said = refused(lambda *given: kvjax.evict(*given, 4, allocation="layer").position, cache, scores)
    assert said.startswith("the allocation 'layer' joins the heads of a layer")
