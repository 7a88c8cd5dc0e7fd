"""kvjax: a language model's KV cache inside a fixed memory budget, in pure JAX.

``c = kvjax.score(A, V)`` scores each token by how much its eviction changes the attention output, and
``kvjax.evict(cache, c, budget=2048)`` keeps the tokens of largest score.
"""

from typing import TYPE_CHECKING

from kvjax._src.first_use import on_first_use

if TYPE_CHECKING:
    from kvjax import allocation, schedule, sources
    from kvjax._src.attention import attend, observe
    from kvjax._src.batch_rows import join, leave
    from kvjax._src.cache import HeadState, KVCache, compact, floats_of
    from kvjax._src.cache_file import cache_info, load_cache, save_cache
    from kvjax._src.caote import caote, fast_caote
    from kvjax._src.chains import base_score, chain, no_state, parse, register
    from kvjax._src.eviction import Evidence, evict
    from kvjax._src.eviction_error import score
    from kvjax._src.insertion import insert, rewind
    from kvjax._src.layer_caches import LayerCaches, RowArray
    from kvjax._src.matching import match_attention
    from kvjax._src.methods import adakv, chunkkv, criticalkv, d2o, defensivekv, momentkv, pyramidkv, simlayerkv
    from kvjax._src.new_caches import Memory, empty_cache, memory, repeat
    from kvjax._src.observation import Context, Needs, Observation, Prediction, Weights
    from kvjax._src.paged import PagedCache, pack, pages_for
    from kvjax._src.policy import Marked, Policy, Protection, Timing
    from kvjax._src.policy_checks import check_block, check_budget, protected
    from kvjax._src.projection import OutputProjection, output_projection
    from kvjax._src.quantise import Quantised, dequantise, quantise, straight_through
    from kvjax._src.reconstruction import Reconstructed, Reconstruction, RepeatPrompt
    from kvjax._src.rotary import rotate, turn
    from kvjax._src.sampling import sample
    from kvjax._src.scores import (
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
        prompted,
        random,
        recency,
        sage,
        snapkv,
        streaming,
        tova,
        zap,
    )
    from kvjax._src.scores_of_generations import rkv, triattention, trimkv
    from kvjax._src.scores_of_keys import curdkv, key_norm, keydiff, lagkv, q_filters
    from kvjax._src.scores_of_last_queries import defensive, restkv
    from kvjax._src.selection import select, selected_mask
    from kvjax._src.several_policies import observe_each
    from kvjax._src.split_cache import SplitCache
    from kvjax._src.topk import keep_mask
    from kvjax._src.transforms import (
        cam,
        chunks,
        critical,
        match,
        merge,
        moments,
        normalise,
        pool,
        pooled,
        positions,
        protect,
    )
    from kvjax.allocation import Allocation
    from kvjax.sources import Source, parse_source
else:
    __getattr__, __dir__ = on_first_use(__name__)

__version__ = "0.3.0"
__all__ = [
    "Allocation",
    "Context",
    "Evidence",
    "HeadState",
    "KVCache",
    "LayerCaches",
    "Marked",
    "Memory",
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
    "RowArray",
    "Source",
    "SplitCache",
    "Timing",
    "Weights",
    "adakv",
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
    "chunkkv",
    "chunks",
    "compact",
    "critical",
    "criticalkv",
    "curdkv",
    "d2o",
    "dapq",
    "defensive",
    "defensivekv",
    "dequantise",
    "dropkv",
    "empty_cache",
    "evict",
    "expected_attention",
    "fast_caote",
    "finch",
    "fit_predictor",
    "floats_of",
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
    "momentkv",
    "moments",
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
    "pooled",
    "positions",
    "prompted",
    "protect",
    "protected",
    "pyramidkv",
    "q_filters",
    "quantise",
    "random",
    "recency",
    "register",
    "repeat",
    "restkv",
    "rewind",
    "rkv",
    "rotate",
    "sage",
    "sample",
    "save_cache",
    "schedule",
    "score",
    "select",
    "selected_mask",
    "simlayerkv",
    "snapkv",
    "sources",
    "straight_through",
    "streaming",
    "tova",
    "triattention",
    "trimkv",
    "turn",
    "zap",
]
