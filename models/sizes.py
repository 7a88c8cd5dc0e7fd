"""The bytes of a run's cache beside those of a full one, and how commands say them."""

from __future__ import annotations

from typing import Any

import kvjax
from kvjax import Policy
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


def sizes_in_words(held: int, full: int, peak: int) -> str:
    """Return the bytes of a cache, of a full one, and of the largest that there was, as commands print them.

    Example:
        >>> from models.sizes import sizes_in_words
        >>> (
        ...     sizes_in_words(13 << 20, 42 << 20, 15 << 20),
        ...     sizes_in_words(2 << 20, 1 << 20, 2 << 20),
        ... )
        ('13.0 of 42.0 MiB (31%), peak 15.0', '2.00 MiB (1.00 would hold all tokens), peak 2.00')
    """
    now, whole, most = (f"{size / 2**20:.{1 if full >= 10 * 2**20 else 2}f}" for size in (held, full, peak))
    said = f"{now} of {whole} MiB ({held / full:.0%})" if held <= full else f"{now} MiB ({whole} would hold all tokens)"
    return f"{said}, peak {most}"


def policy_in_words(policy: Policy | str | None, budget: int | float | None) -> str:
    """Return a policy and its budget, as commands print them.

    Example:
        >>> from models.sizes import policy_in_words
        >>> (
        ...     policy_in_words("snapkv", 1024), policy_in_words("curdkv", 0.25),
        ...     policy_in_words(None, None)
        ... )
        ('snapkv, keeps 1,024 tokens per head', 'curdkv, keeps 25% of the tokens', 'full, keeps all tokens')
    """
    many = (
        f"{budget:.0%} of the tokens" if isinstance(budget, float) else f"{budget:,} tokens per head" if budget else ""
    )
    name = "full" if policy is None else str(policy if isinstance(policy, str) else policy.name)
    return f"{name}, keeps {many or 'all tokens'}"
