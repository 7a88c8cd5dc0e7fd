"""What a policy observes of one block, made up: attention weights, and slots in any order."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

import kvjax
from kernels_pallas import ColumnStatistics
from kvjax import Observation, Policy
from kvjax._src.policy import join_heads, mark_protected, scores_of_weights, update_scores
from kvjax._src.projection import KINDS
from tests.kvjax import definitions

B, K, G, T, S, D, E = 2, 2, 2, 4, 9, 4, 6
DIM = 3  # of what a predictor says
N = K * G


class Block(NamedTuple):
    """The block's weights [B, N, T, S], which queries count [B, T], and what a policy sees of them."""

    weights: np.ndarray
    valid: np.ndarray
    observation: Observation

    def rows(self, b: int, last: int | None = None) -> np.ndarray:
        """The rows of a batch row's valid queries (of the last few): [N, queries, S]."""
        rows = self.weights[b][:, self.valid[b]]
        return rows if last is None else rows[:, -last:]


@functools.partial(jax.jit, static_argnums=1)
def project(weight, kinds) -> kvjax.OutputProjection:
    """What scores read of W_O [N, D, E], in one program."""
    return kvjax.output_projection(weight, K, kinds)


def make(
    seed: int, *, window: int = 2, budget: int = 6, same_heads: bool = False, next_position: tuple[int, int] = (20, 13)
) -> Block:
    """Row 0 has no padding, row 1 has some; heads hold different tokens unless asked otherwise."""
    rng = np.random.default_rng(seed)
    valid = np.array([[True] * T, [False, True, True, False]])
    position = np.full((B, K, S), -1, np.int32)
    query_position = np.full((B, T), -1, np.int32)
    for b in range(B):
        query_position[b, valid[b]] = next_position[b] - valid[b].sum() + np.arange(valid[b].sum())
        for k in range(K):
            live = S - int(rng.integers(3))
            slots = rng.permutation(S)[:live]
            position[b, k, slots] = rng.permutation(next_position[b])[:live]
        if same_heads:
            position[b] = position[b, 0]
    query, key, value = (rng.normal(size=shape) for shape in ((B, T, N, D), (B, K, S, D), (B, K, S, D)))
    live = np.repeat(position >= 0, G, axis=1)
    weights = np.where(live[:, :, None], np.exp(2 * rng.normal(size=(B, N, T, S))), 0)
    weights = weights / weights.sum(-1, keepdims=True) * valid[:, None, :, None]
    columns = {
        name: column.reshape(B, K, -1, S).astype(np.float32)
        for name, column in definitions.column_statistics(weights, valid, window, K).items()
    }
    projection = project(rng.normal(size=(N, D, E)).astype(np.float32), KINDS)
    predicted = kvjax.Prediction(*(rng.normal(size=(B, T, N, DIM)).astype(np.float32) for _ in range(2)))
    observation = Observation(
        columns=ColumnStatistics(**columns),
        query=query.astype(np.float32),
        query_position=query_position,
        key=key.astype(np.float32),
        value=value.astype(np.float32),
        position=position,
        next_position=np.array(next_position, np.int32),
        budget=np.full(B, budget, np.int32),
        context=kvjax.Context(
            layer=np.int32(0), frequency=np.float32([[1.0, 0.1]]), projection=projection, predicted=predicted
        ),
    )
    return Block(weights, valid, jax.device_put(observation))  # nothing of it is a program


def in_context(observation: Observation, **changes) -> Observation:
    """The same block in a layer that offers something else."""
    return observation._replace(context=dataclasses.replace(observation.context, **changes))


def in_layers(key, value, position, next_position, state=(), **others) -> kvjax.LayerCaches:
    """A cache of as many layers as there are on the first axis of the arrays but ``next_position``."""

    def layer(number: int) -> kvjax.KVCache:
        *own, part = jax.tree.map(lambda leaf: leaf[number], (key, value, position, state))
        return kvjax.KVCache.of(*own, next_position, state=part, **others)

    return kvjax.LayerCaches(tuple(map(layer, range(len(position)))))


def retention_scores(policy: Policy, state, observation: Observation):
    """One score per slot, +inf where it is protected, and the new state."""
    observation = mark_protected(policy, observation)
    scores, stays, state = update_scores(policy, state, observation)
    if isinstance(scores, kvjax.Weights):
        return scores_of_weights(scores, observation.value, observation.live, observation.protected), state
    return join_heads(policy, scores, stays, observation.protected, scores.shape[1]), state


@functools.cache
def compiled(policy: Policy):
    return jax.jit(functools.partial(retention_scores, policy))


@functools.cache
def started(policy: Policy):
    """The policy's state of these sizes, which is zero."""
    state = jax.eval_shape(lambda: policy.init(B, K, G, S, D))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)


def scores(policy: Policy | str, block: Block | Observation, state=None) -> np.ndarray:
    """A policy's scores of a block, [B, K, S]; NaN in free slots, so that a test cannot lean on them."""
    policy = kvjax.parse(policy) if isinstance(policy, str) else policy
    observation = block.observation if isinstance(block, Block) else block
    state = started(policy) if state is None else state
    result = np.asarray(compiled(policy)(state, observation)[0])
    assert result.dtype == np.float32
    return np.where(np.asarray(observation.position) >= 0, result, np.nan)


def each_head(block: Block, formula) -> np.ndarray:
    """formula(b, k, live slots) -> scores of these slots, for every head: [B, K, S], NaN in free slots."""
    expected = np.full((B, K, S), np.nan)
    for b, k in np.ndindex(B, K):
        live = np.flatnonzero(np.asarray(block.observation.position[b, k]) >= 0)
        expected[b, k, live] = formula(b, k, live)
    return expected


@functools.lru_cache(maxsize=None, typed=True)  # typed: a size of 1 is not 1.0
def _maker(policy, *sizes):
    return jax.jit(lambda: kvjax.empty_cache(policy, **dict(sizes)))


def empty(policy: Policy | str | None, **sizes) -> kvjax.KVCache | kvjax.PagedCache:
    """An empty cache for a policy; one program for all of its arrays and of its sizes."""
    return _maker(policy, *sizes.items())()


def heads_of(k: int) -> slice:
    return slice(k * G, (k + 1) * G)
