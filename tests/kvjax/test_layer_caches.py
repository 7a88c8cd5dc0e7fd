"""Layers of unequal slots: what is done with a model's cache is what is done with each layer's own."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KVCache, LayerCaches

B, K, D, SLOTS = 2, 2, 2, (3, 6, 4)
HELD = (2, 5, 4)  # tokens per head of each layer

compact = jax.jit(kvjax.compact, static_argnums=1)
pack = jax.jit(kvjax.pack, static_argnames=("pages", "page_size", "most"))
layer_of = jax.jit(lambda cache, number: cache.layer(number))


@functools.cache
def layers(batch: int = B, slots: tuple[int, ...] = SLOTS) -> LayerCaches:
    """Layers that hold their newest tokens, of 7, with a state of each slot and of each head."""
    rng, made = np.random.default_rng(batch), []
    for own, held in zip(slots, HELD, strict=True):
        shape = batch, K, own
        place = np.stack([rng.permutation(own)[:held] for _ in range(batch * K)]).reshape(batch, K, held)
        position = np.full(shape, -1, np.int32)
        np.put_along_axis(position, place, np.arange(7 - held, 7, dtype=np.int32)[None, None], axis=2)
        key, value = rng.normal(size=(2, *shape, D)).astype(np.float32)
        state = rng.normal(size=shape).astype(np.float32), kvjax.HeadState(rng.normal(size=shape[:2]))
        made.append(KVCache.of(key, value, position, np.full(batch, 7, np.int32), state=state))
    return jax.device_put(LayerCaches(tuple(made)))


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other), a, b)


def test_positions_are_those_of_all_slots_and_none_where_a_layer_has_no_slot():
    cache = layers()
    assert (cache.num_slots, cache.layer_slots, cache.slots_shape) == (6, SLOTS, (3, B, K, 6))
    for whole, own in zip(np.asarray(cache.position), cache.layers, strict=True):
        np.testing.assert_array_equal(whole[..., : own.num_slots], own.position)
        assert (whole[..., own.num_slots :] == -1).all()
    assert isinstance(jax.device_get(cache).position, np.ndarray)
    assert cache.num_live.tolist() == [[[n] * K] * B for n in HELD]
    assert cache.nbytes == sum(own.nbytes for own in cache.layers) - 2 * 4 * B


FUNCTIONS = {
    "rewind": lambda cache: kvjax.rewind(cache, np.array([5, 9])),
    "repeat": lambda cache: kvjax.repeat(cache, 2),
    "leave": lambda cache: kvjax.leave(cache, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_cache_is_that_of_each_layer(name):
    cache, function = layers(), jax.jit(FUNCTIONS[name])
    assert_same(function(cache), LayerCaches(tuple(map(function, cache.layers))))


def test_a_row_joins_layer_by_layer_or_says_which_slots_are_too_few():
    join, one = jax.jit(kvjax.join, static_argnums=1), layers(1, (2, 6, 4))
    each = (join(own, 1, row) for own, row in zip(layers().layers, one.layers, strict=True))
    assert_same(join(layers(), 1, one), LayerCaches(tuple(each)))
    with pytest.raises(ValueError, match=r"the row has 5 slots per head, the batch 4; compact it first"):
        kvjax.join(layers(), 0, layers(1, (2, 5, 5)))


def test_layers_of_unequal_slots_are_made_smaller_and_larger():
    for slots, expected in ((5, (3, 5, 4)), (6, SLOTS), (8, (8, 8, 8))):
        made = compact(layers(), slots)
        assert made.layer_slots == expected
        for own, before in zip(made.layers, layers().layers, strict=True):
            assert_same(own, compact(before, own.num_slots))


@pytest.mark.parametrize("allocation", ["uniform", "layer", "model(normalise=False)"])
def test_evicting_by_scores_of_all_slots_keeps_what_the_pages_keep(allocation):
    """Scores where a layer has no slot count for nothing, however large."""
    scores = np.random.default_rng(3).normal(size=layers().slots_shape).astype(np.float32)
    scores = np.where(np.asarray(layers().position) < 0, np.inf, scores)
    evict = jax.jit(functools.partial(kvjax.evict, budget=2, allocation=allocation))
    left = evict(layers(), scores)
    assert left.layer_slots == SLOTS
    paged = pack(layers(), pages=60, page_size=1, most=6)
    of_pages = np.zeros(paged.position.shape, np.float32)
    table = np.asarray(paged.table)
    for layer, row, head in np.ndindex(3, B, K):
        live = np.asarray(layers().position)[layer, row, head] >= 0
        pages = table[layer, row, head]
        of_pages[pages[pages >= 0], 0] = scores[layer, row, head][live]
    whole = evict(paged, of_pages)

    def tokens(own: KVCache) -> list[list[int]]:
        return [sorted(head[head >= 0].tolist()) for head in np.asarray(own.position).reshape(B * K, -1)]

    assert [tokens(own) for own in left.layers] == [tokens(layer_of(whole, layer)) for layer in range(3)]


def test_pages_hold_what_the_layers_held():
    paged = pack(layers(), pages=30, page_size=2, most=6)
    for number, own in enumerate(layers().layers):
        here = jax.device_get(layer_of(paged, number))
        for row, head in np.ndindex(B, K):
            order, place = (np.argsort(np.asarray(cache.position)[row, head]) for cache in (own, here))
            for of_own, of_pages in ((own.key, here.key), (own.value, here.value), (own.state[0], here.state[0])):
                np.testing.assert_array_equal(
                    np.asarray(of_own)[row, head][order[-HELD[number] :]],
                    np.asarray(of_pages)[row, head][place[-HELD[number] :]],
                )


def test_evidence_of_layers_says_minus_infinity_where_a_layer_has_no_slot():
    cache = layers()

    @jax.jit
    def said_of_layers(cache):
        evidence = kvjax.Evidence.of_layers(cache, kvjax.parse("h2o@layer").allocation)
        for number, own in enumerate(cache.layers):
            said = kvjax.Evidence(np.full((B, K, own.num_slots), number, np.float32), np.ones(B, np.int32))
            evidence = evidence.with_layer(cache, number, said)
        return evidence

    evidence = said_of_layers(cache)
    for number, scores in enumerate(np.asarray(evidence.scores)):
        assert (scores[..., : SLOTS[number]] == number).all() and (scores[..., SLOTS[number] :] == -np.inf).all()
