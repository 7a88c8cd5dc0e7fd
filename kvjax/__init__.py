"""kvjax: a language model's KV cache inside a fixed memory budget, in pure JAX.

    c = kvjax.score(A, V)                          # what losing each token does to the attention output
    cache = kvjax.evict(cache, c, budget=2048)     # keep the tokens whose loss would hurt most
"""

from kvjax import scores as _scores
from kvjax.attention import attend
from kvjax.cache import KVCache, compact, insert
from kvjax.eviction import evict, keep_mask
from kvjax.eviction_error import score
from kvjax.policy import (
    Observation,
    Policy,
    Protection,
    base_score,
    chain,
    check_budget,
    no_state,
    parse,
    protected,
    retention_scores,
)
from kvjax.scores import *  # noqa: F403

__version__ = "0.1.0"
__all__ = [
    "KVCache",
    "Observation",
    "Policy",
    "Protection",
    "attend",
    "base_score",
    "chain",
    "check_budget",
    "compact",
    "evict",
    "insert",
    "keep_mask",
    "no_state",
    "parse",
    "protected",
    "retention_scores",
    "score",
    *_scores.__all__,
]
