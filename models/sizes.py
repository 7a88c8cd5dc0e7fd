"""The bytes of a cache that holds all tokens."""

from __future__ import annotations

from typing import Any

import kvjax
from kvjax.quantise import DtypesLike
from models.decoder import Decoder


def full_cache_bytes(model: Decoder, tokens: int, dtype: DtypesLike | None = None) -> int:
    """Compute the bytes of a cache that holds all of so many tokens.

    Args:
        dtype: of keys and values; the model's by default.

    Example:
        >>> import models
        >>> from models.sizes import full_cache_bytes
        >>> # 6 layers, 2 KV heads of dimension 64, float32
        >>> model, _ = models.load("retriever")
        >>> full_cache_bytes(model, 512) == 6 * 2 * 512 * (2 * 64 * 4 + 4) + 4
        True
    """
    if not tokens:
        return 0
    config, own = model.config, model.embedding[...].dtype
    sizes: Any = dict(layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return kvjax.memory(**sizes, budget=tokens, block=0, dtype=own if dtype is None else dtype).total
