"""kvjax: a language model's KV cache inside a fixed memory budget, in pure JAX.

``c = kvjax.score(A, V)`` scores each token by how much its eviction changes the attention output, and
``kvjax.evict(cache, c, budget=2048)`` keeps the tokens of largest score.
"""

from kvjax import allocation, sources
from kvjax.allocation import Allocation
from kvjax.attention import attend, observe
from kvjax.cache import HeadState, KVCache, compact
from kvjax.cache_file import cache_info, load_cache, save_cache
from kvjax.caote import caote, fast_caote
from kvjax.chains import base_score, chain, no_state, parse, register
from kvjax.eviction import Evidence, evict
from kvjax.eviction_error import score
from kvjax.insertion import insert, rewind
from kvjax.layers import LayerCaches
from kvjax.making import empty_cache, repeat
from kvjax.matching import match_attention
from kvjax.memory import Memory, memory
from kvjax.observation import Context, Needs, Observation, Prediction, Weights
from kvjax.paged import PagedCache, pack, pages_for
from kvjax.policy import Moments, Policy, Protection
from kvjax.policy_checks import check_block, check_budget, protected
from kvjax.projection import OutputProjection, output_projection
from kvjax.quantise import Quantised, dequantise, quantise, straight_through
from kvjax.reconstruction import Reconstructed, Reconstruction, RepeatPrompt
from kvjax.rotary import rotate, turn
from kvjax.rows import join, leave
from kvjax.scores import (
    butler,
    cake,
    dapq,
    dropkv,
    expected_attention,
    finch,
    fit_predictor,
    h2o,
    kvgrad,
    kvzip,
    laprox,
    lava,
    random,
    recency,
    sage,
    snapkv,
    snapkv_tuned,
    streaming,
    tova,
    zap,
)
from kvjax.scores_of_generations import rkv, triattention
from kvjax.scores_of_keys import curdkv, key_norm, keydiff, lagkv, q_filters
from kvjax.selection import select, selected_mask
from kvjax.several_policies import observe_each
from kvjax.sources import Source, parse_source
from kvjax.split import SplitCache
from kvjax.topk import keep_mask
from kvjax.transforms import cam, chunks, critical, match, merge, normalise, pool, positions, protect

__version__ = "0.2.0"
__all__ = [
    "Allocation",
    "Context",
    "Evidence",
    "HeadState",
    "KVCache",
    "LayerCaches",
    "Memory",
    "Moments",
    "Needs",
    "Observation",
    "OutputProjection",
    "PagedCache",
    "Policy",
    "Prediction",
    "Protection",
    "Quantised",
    "Reconstructed",
    "Reconstruction",
    "RepeatPrompt",
    "Source",
    "SplitCache",
    "Weights",
    "allocation",
    "attend",
    "base_score",
    "butler",
    "cache_info",
    "cake",
    "cam",
    "caote",
    "chain",
    "check_block",
    "check_budget",
    "chunks",
    "compact",
    "critical",
    "curdkv",
    "dapq",
    "dequantise",
    "dropkv",
    "empty_cache",
    "evict",
    "expected_attention",
    "fast_caote",
    "finch",
    "fit_predictor",
    "h2o",
    "insert",
    "join",
    "keep_mask",
    "key_norm",
    "keydiff",
    "kvgrad",
    "kvzip",
    "lagkv",
    "laprox",
    "lava",
    "leave",
    "load_cache",
    "match",
    "match_attention",
    "memory",
    "merge",
    "no_state",
    "normalise",
    "observe",
    "observe_each",
    "output_projection",
    "pack",
    "pages_for",
    "parse",
    "parse_source",
    "pool",
    "positions",
    "protect",
    "protected",
    "q_filters",
    "quantise",
    "random",
    "recency",
    "register",
    "repeat",
    "rewind",
    "rkv",
    "rotate",
    "sage",
    "save_cache",
    "score",
    "select",
    "selected_mask",
    "snapkv",
    "snapkv_tuned",
    "sources",
    "straight_through",
    "streaming",
    "tova",
    "triattention",
    "turn",
    "zap",
]
