"""The model that most tests of runs share, its prompts and what is asked of results: same sizes, same programs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import kvjax
import models
from kvjax._src.layer_caches import LayerCaches
from models import Config
from models.parameters import join_weights, partition
from tests.kvjax import blocks
from tests.models import reference

VOCABULARY = 256


def config(**changes: Any) -> Config:
    """The shared sizes, but for these changes."""
    sizes: dict[str, Any] = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512)
    return Config(VOCABULARY, 32, 48, **(sizes | changes))


CONFIG = config()
SLIDING = config(num_layers=3, architecture="mistral", sliding_windows=(9, None, 30))
BUDGET, BLOCK = 16, 8
SETTINGS = dict(budget=BUDGET, block=BLOCK)
# No token twice in a row of the batch: no two keys of the first layer have one length.
LONG = np.stack([np.random.default_rng(row).permutation(VOCABULARY)[:200] for row in range(3)])
LONG_LENGTHS = np.array([200, 163, 9])
TOKENS, LENGTHS = LONG[:, :60], np.array([60, 37, 9])
DOCUMENT = TOKENS[:1]
QUESTIONS = [np.random.default_rng(9 + row).integers(0, VOCABULARY, 5 + row).tolist() for row in range(3)]
# One policy with state, one with a window, one whose heads exchange slots: identities are shown for these.
STATE, WINDOW, UNEVEN = "h2o+caote", "snapkv(window=4)+caote", "h2o@adakv"


@functools.cache
def weights(config: Config = CONFIG) -> dict[str, np.ndarray]:
    return reference.parameters(config)


@functools.cache
def decoder(config: Config = CONFIG) -> models.Decoder:
    return reference.decoder(config, weights(config))


@functools.cache
def on_mesh(config: Config = CONFIG, data: int = 2, tensor: int = 2) -> models.Decoder:
    """The model on so many devices."""
    mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    arrays = join_weights(config, weights(config))
    placed = {name: jax.device_put(a, NamedSharding(mesh, partition(name, mesh))) for name, a in arrays.items()}
    return models.Decoder(config, placed)


def empty(policy: str | None, config: Config = CONFIG, **changes: Any) -> Any:
    """An empty cache, as a policy has it."""
    sizes = dict(layers=config.num_layers, kv_heads=config.num_kv_heads, query_heads=config.num_heads)
    sizes |= dict(head_dim=config.head_dim, windows=config.sliding_windows, **SETTINGS) | changes
    return blocks.empty(policy, **sizes)


def run(prompt: Any, config: Config = CONFIG, policy: str | None = None, **settings: Any) -> reference.Run:
    """What the reference makes of one prompt."""
    named = None if policy is None else reference.policy(policy)
    return reference.run(weights(config), config, prompt, policy=named, **settings)


def lengths_of(rows: Any) -> np.ndarray:
    return np.array([len(row) for row in rows])


def positions(cache: Any) -> list[np.ndarray]:
    """The positions in each layer's slots, -1 in free ones; read in NumPy, so that nothing is compiled."""
    if isinstance(cache, LayerCaches):
        return [np.asarray(layer.position) for layer in cache.layers]
    if isinstance(cache, kvjax.PagedCache):
        table = np.asarray(cache.table)
        own = np.where(table[..., None] >= 0, np.asarray(cache.position)[table], -1)
        return list(own.reshape(*table.shape[:3], -1))
    return [np.asarray(cache.layer(number).position) for number in range(cache.heads_shape[0])]


def kept_tokens(cache: Any, size: int = 512) -> np.ndarray:
    """Positions as the reference has them: bool [L, B, K, size]; no position may stand in two slots."""
    kept = np.stack([(layer[..., None] == np.arange(size)).sum(axis=-2) for layer in positions(cache)])
    assert kept.max() <= 1
    return kept.astype(bool)


def held(cache: Any, row: int | None = None) -> list[list[list[int]]]:
    """The positions that each layer and head of a row holds, sorted; of all rows without one."""
    rows = [layer if row is None else layer[row : row + 1] for layer in positions(cache)]
    return [[sorted(head[head >= 0].tolist()) for head in layer.reshape(-1, layer.shape[-1])] for layer in rows]


def assert_keeps(cache: Any, row: int, expected: reference.Run) -> None:
    """A row of the cache holds what the reference's run does."""
    padded = np.pad(expected.kept, ((0, 0), (0, 0), (0, 512 - expected.kept.shape[-1])))
    wrong = np.argwhere(kept_tokens(cache)[:, row] != padded)
    closest = min((near.gap for near in expected.choices.near), default=1.0)
    assert wrong.size == 0, f"[layer, head, position] {wrong[:8].tolist()} differ; the closest was {closest:.1e}"


def answers(out: models.Generated) -> list[list[int]]:
    """Each row's tokens, up to where it ended."""
    return [tokens[:length] for tokens, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


def streamed(model: models.Decoder, tokens: Any, **settings: Any) -> tuple[np.ndarray, Any]:
    """The tokens [B, steps] of a stream, and its last cache."""
    steps = list(models.stream(model, tokens, **settings))
    return np.stack([np.asarray(token) for token, _ in steps], axis=1), steps[-1][1]


def bytes_of(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
