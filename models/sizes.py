"""The bytes of a cache that holds all tokens."""

from __future__ import annotations

from typing import Any

import kvjax
from kvjax._src.quantise import DtypesLike
from models.decoder import Decoder
from models.recurrent import states_of


def full_cache_bytes(model: Decoder, tokens: int, dtype: DtypesLike | None = None) -> int:
    """Compute the bytes of a cache of so many tokens; ``dtype`` is of keys and values, the model's by default."""
    if not tokens:
        return 0
    config, own = model.config, model.embedding[...].dtype
    heads, dims = zip(*config.cached_heads, strict=True)
    sizes: Any = dict(layers=len(heads), kv_heads=heads, head_dim=dims)
    sizes["rotated"] = None if config.latent is None else config.latent.rotated
    sizes |= dict(recurrent=states_of(config, own))
    return kvjax.memory(**sizes, budget=tokens, block=0, dtype=own if dtype is None else dtype).total
