"""kvjax: a language model's KV cache inside a fixed memory budget, in pure JAX.

``c = kvjax.score(A, V)`` says what losing each token does to the attention output, and
``kvjax.evict(cache, c, budget=2048)`` keeps the tokens whose loss would hurt most.
"""

from kvjax import allocation, sources
from kvjax.allocation import Allocation
from kvjax.attention import attend, observe
from kvjax.cache import HeadState, KVCache, compact
from kvjax.caote import caote, fast_caote
from kvjax.eviction import Evidence, evict
from kvjax.eviction_error import score
from kvjax.insertion import insert
from kvjax.memory import Memory, memory
from kvjax.observation import Context, Needs, Observation, Prediction, Weights
from kvjax.paged import PagedCache, pack, pages_for
from kvjax.policy import (
    Policy,
    Protection,
    base_score,
    chain,
    check_block,
    check_budget,
    no_state,
    parse,
    protected,
    retention_scores,
)
from kvjax.projection import OutputProjection, output_projection
from kvjax.rotary import rotate, turn
from kvjax.scores import (
    butler,
    cake,
    expected_attention,
    fit_predictor,
    h2o,
    key_norm,
    keydiff,
    laprox,
    lava,
    random,
    sage,
    snapkv,
    streaming,
    tova,
)
from kvjax.select import select, selected_mask
from kvjax.sources import Source, parse_source
from kvjax.topk import keep_mask
from kvjax.transforms import critical, normalise, pool, positions, protect

__version__ = "0.1.0"
__all__ = [
    "Allocation",
    "Context",
    "Evidence",
    "HeadState",
    "KVCache",
    "Memory",
    "Needs",
    "Observation",
    "OutputProjection",
    "PagedCache",
    "Policy",
    "Prediction",
    "Protection",
    "Source",
    "Weights",
    "allocation",
    "attend",
    "base_score",
    "butler",
    "cake",
    "caote",
    "chain",
    "check_block",
    "check_budget",
    "compact",
    "critical",
    "evict",
    "expected_attention",
    "fast_caote",
    "fit_predictor",
    "h2o",
    "insert",
    "keep_mask",
    "key_norm",
    "keydiff",
    "laprox",
    "lava",
    "memory",
    "no_state",
    "normalise",
    "observe",
    "output_projection",
    "pack",
    "pages_for",
    "parse",
    "parse_source",
    "pool",
    "positions",
    "protect",
    "protected",
    "random",
    "retention_scores",
    "rotate",
    "sage",
    "score",
    "select",
    "selected_mask",
    "snapkv",
    "sources",
    "streaming",
    "tova",
    "turn",
]
