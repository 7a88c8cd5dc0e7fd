"""Each source's selected set against a brute-force reading of its rule: NumPy, one head and one query at a time."""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.sources import Reading
from tests.kvjax.definitions import kept
from tests.models.reference import selections

B, N, K, S, D, LAYER = 2, 4, 2, 13, 6, 3
LENGTHS = (13, 8)  # of the rows; what follows is padding


class Case(NamedTuple):
    query: np.ndarray  # [B, S, N, D]
    key: np.ndarray  # [B, S, K, D]
    position: np.ndarray  # [B, S], -1 for padding
    given: dict[str, np.ndarray]  # logits [B, N, S, S] of others

    @property
    def slots(self) -> np.ndarray:
        """[B, K, S]: slot p holds position p."""
        return np.broadcast_to(self.position[:, None], (B, K, S))


def case(seed: int = 0, dtype=np.float32) -> Case:
    """Keys and queries of few values, so that logits and pages tie; what padding holds is NaN."""
    rng = np.random.default_rng(seed)
    query, key = (rng.integers(-2, 3, shape).astype(dtype) for shape in ((B, S, N, D), (B, S, K, D)))
    position = np.arange(S, dtype=np.int32)[None]
    position = np.where(position < np.array(LENGTHS)[:, None], position, -1)
    query[position < 0], key[position < 0] = np.nan, np.nan
    given = {name: rng.integers(-3, 4, (B, N, S, S)).astype(dtype) for name in ("predicted", "first", "previous")}
    return Case(query, key, position, given)


@functools.cache
def compiled(name: str):
    def run(case: Case, slots, queries):
        source = kvjax.parse_source(name)
        state = source.insert(source.init(B, K, S, D), case.key, case.position)
        others = {field: value[:, :, queries] for field, value in case.given.items()}
        query, position = case.query[:, queries], case.position[:, queries]
        return source.importance(state, Reading(query, position, slots, LAYER, case.key.swapaxes(1, 2), **others))

    return jax.jit(run)


def whole(name: str, case: Case, queries=slice(None)) -> np.ndarray:
    """Importance of a whole sequence at once, or of some of its queries: [B, N, S, S]."""
    return np.asarray(compiled(name)(case, case.slots, np.arange(S)[queries]))


def true_logits(case: Case, b: int, n: int, t: int) -> np.ndarray:
    query, keys = np.float64(case.query[b, t, n]), np.float64(case.key[b, :, n // (N // K)])
    return keys @ query / math.sqrt(D)


def page_bounds(case: Case, b: int, n: int, t: int, page_size: int) -> np.ndarray:
    query, keys = np.float64(case.query[b, t, n]), np.float64(case.key[b, : t + 1, n // (N // K)])
    bounds = selections.bounds(query[None], keys[None], page_size)[0]
    return np.pad(bounds, (0, S - t - 1), constant_values=-np.inf)


def hashes(case: Case, b: int, n: int, t: int, seed: int) -> np.ndarray:
    return np.pad(selections.hashes(seed, LAYER, t, N)[n], (0, S - t - 1))


def together(rule, join):
    """The rule of a group: what its query heads give, joined."""

    def joined(case: Case, b: int, n: int, t: int) -> np.ndarray:
        group = range(n // (N // K) * (N // K), (n // (N // K) + 1) * (N // K))
        return join(np.stack([np.asarray(rule(case, b, head, t), np.float64) for head in group]), t)

    return joined


def mean_weights(logits: np.ndarray, t: int) -> np.ndarray:
    weights = np.exp(logits[:, : t + 1] - logits[:, : t + 1].max(1, keepdims=True))
    means = np.mean(weights / weights.sum(1, keepdims=True), axis=0)
    return np.pad(np.log(means), (0, logits.shape[1] - t - 1), constant_values=-np.inf)


def predicted(case: Case, b: int, n: int, t: int) -> np.ndarray:
    return case.given["predicted"][b, n, t]


RULES = {
    "butler(group='max')": together(predicted, lambda logits, t: logits.max(0)),
    "butler(group='mean')": together(predicted, lambda logits, t: logits.mean(0)),
    "oracle(group='weights')": together(true_logits, mean_weights),
    "quest(group='max',page_size=4)": together(
        functools.partial(page_bounds, page_size=4), lambda logits, t: logits.max(0)
    ),
    "butler": predicted,
    "oracle": true_logits,
    "quest(page_size=1)": functools.partial(page_bounds, page_size=1),
    "quest(page_size=4)": functools.partial(page_bounds, page_size=4),
    "quest": functools.partial(page_bounds, page_size=16),
    "first_layer": lambda case, b, n, t: case.given["first"][b, n, t],
    "previous_layer": lambda case, b, n, t: case.given["previous"][b, n, t],
    "random(seed=5)": functools.partial(hashes, seed=5),
    "streaming": lambda case, b, n, t: np.arange(S),
}


def definition(name: str, case: Case) -> np.ndarray:
    """The half that each head of each query reads, and four sinks, [B, N, S, S]."""
    out = np.zeros((B, N, S, S), bool)
    for b, n, t in np.ndindex(B, N, S):
        if case.position[b, t] < 0:
            continue
        seen = np.where(np.arange(S) <= t, np.arange(S), -1)
        # Logits of equal integer products tie exactly; rounded, they do in float64, too.
        scores = np.round(np.nan_to_num(np.asarray(RULES[name](case, b, n, t), np.float64), neginf=-1e9), 5)
        out[b, n, t] = kept(scores, seen, (t + 2) // 2) | ((seen >= 0) & (seen < 4))
    return out


chosen = jax.jit(functools.partial(kvjax.selected_mask, budget=0.5, sinks=4))


@pytest.mark.parametrize("name", RULES)
def test_each_query_reads_what_the_rule_says(name):
    given = case(1)
    mask = np.asarray(chosen(whole(name, given), given.slots, query_position=given.position))
    mask = np.repeat(mask, N // mask.shape[1], axis=1)
    np.testing.assert_array_equal(mask, definition(name, given))


@pytest.mark.parametrize("name", ["butler", "oracle", "quest(page_size=4)", "random(seed=5)", "streaming"])
def test_importance_is_float32_of_every_head_query_and_slot(name):
    importance = whole(name, case(4, jnp.bfloat16))
    assert (importance.shape, importance.dtype) == ((B, N, S, S), np.float32)


def test_a_quest_step_reads_no_key():
    """The compiled step of a long cache touches the pages alone: its bytes follow S / page_size."""
    source, slots = kvjax.parse_source("quest(page_size=16)"), 4096
    state = jax.eval_shape(lambda: source.init(1, K, slots, 64))
    reading = Reading(
        jax.ShapeDtypeStruct((1, 1, N, 64), jnp.float32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
        jax.ShapeDtypeStruct((1, K, slots), jnp.int32),
        LAYER,
    )
    compiled = jax.jit(source.importance).lower(state, reading).compile()
    keys = K * slots * 64 * 4
    assert compiled.memory_analysis().argument_size_in_bytes < keys / 16 * 2 * 1.2
    assert compiled.cost_analysis()["bytes accessed"] < keys


def test_a_page_that_is_filled_again_and_again_is_updated_in_place():
    source = kvjax.parse_source("quest(page_size=16)")
    state = jax.eval_shape(lambda: source.init(1, K, 4096, 64))
    arrived = jax.ShapeDtypeStruct((1, 1, K, 64), jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    memory = jax.jit(source.insert, donate_argnums=0).lower(state, *arrived).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * K * 256 * 64 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 100


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_a_sharded_step_chooses_without_communication():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    source = kvjax.parse_source("quest(page_size=4)")

    def sharded(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    state = jax.eval_shape(lambda: source.init(2, K, 64, D))
    state = jax.tree.map(lambda leaf: sharded(leaf.shape, leaf.dtype, "data", "tensor"), state)
    new_key = sharded((2, 1, K, D), jnp.float32, "data", None, "tensor")
    key = sharded((2, K, 64, D), jnp.float32, "data", "tensor")
    others = sharded((2, N, 1, 64), jnp.float32, "data", "tensor")
    fields = {field: key if field == "key" else others for field in source.reads}
    query = sharded((2, 1, N, D), jnp.float32, "data", None, "tensor")
    position, slots = sharded((2, 1), jnp.int32, "data"), sharded((2, K, 64), jnp.int32, "data", "tensor")

    @functools.partial(jax.jit, out_shardings=key.sharding)
    def step(state, new_key, reading):
        state = source.insert(state, new_key, reading.query_position)
        importance = source.importance(state, reading)
        return kvjax.select(importance[:, :, 0], reading.position, 0.5)

    program = step.lower(state, new_key, Reading(query, position, slots, LAYER, **fields)).compile().as_text()
    assert not re.findall(r"all-\w+|collective-\w+|reduce-scatter", program)


@pytest.mark.parametrize(
    ("name", "field"),
    [("butler", "predicted"), ("oracle", "key"), ("first_layer", "first"), ("previous_layer", "previous")],
)
def test_what_a_source_reads_must_be_handed_over(name, field):
    given, source = case(8), kvjax.parse_source(name)
    assert source.reads == {field}
    with pytest.raises(ValueError, match=f"'{name}' reads .*hand them over as {field}="):
        source.importance((), Reading(given.query, given.position, given.slots, LAYER))


def test_the_logits_of_a_group_are_joined_after_the_soft_cap():
    logits = np.array([[0.0, 4.0], [3.0, 2.0]]).reshape(1, 2, 1, 2)
    reading = Reading(np.zeros((1, 1, 2, 4), np.float32), np.int32([[1]]), np.int32([[[0, 1]]]), layer=1, soft_cap=1.5)
    expected = (1.5 * np.tanh(logits / 1.5)).mean(axis=1, keepdims=True)
    found = jax.jit(lambda x: kvjax.sources.join_group(x, reading, "mean"))(logits.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
