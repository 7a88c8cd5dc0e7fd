"""kvjax: a language model's KV cache inside a fixed memory budget, in pure JAX.

``c = kvjax.score(A, V)`` says what losing each token does to the attention output, and
``kvjax.evict(cache, c, budget=2048)`` keeps the tokens whose loss would hurt most.
"""

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
from kvjax.scores import (
    caote,
    fast_caote,
    h2o,
    key_norm,
    normalise,
    pool,
    protect,
    random,
    snapkv,
    streaming,
    tova,
)

__version__ = "0.1.0"
__all__ = [
    "KVCache",
    "Observation",
    "Policy",
    "Protection",
    "attend",
    "base_score",
    "caote",
    "chain",
    "check_budget",
    "compact",
    "evict",
    "fast_caote",
    "h2o",
    "insert",
    "keep_mask",
    "key_norm",
    "no_state",
    "normalise",
    "parse",
    "pool",
    "protect",
    "protected",
    "random",
    "retention_scores",
    "score",
    "snapkv",
    "streaming",
    "tova",
]
