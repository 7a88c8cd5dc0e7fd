"""Operations, one folder each: the definition in plain JAX and, where they are faster, kernels for TPU and GPU."""

from kernels_pallas.cache_attention.api import cache_attention
from kernels_pallas.cache_attention.reference import ONLY_REFERENCE, STATISTICS, ColumnStatistics
from kernels_pallas.caote_topk.api import caote_topk
from kernels_pallas.caote_topk.reference import Kept
from kernels_pallas.mse_logits.api import mse_logits
from kernels_pallas.paged_attention.api import paged_attention
from kernels_pallas.select_attention.api import select_attention

__all__ = [
    "ONLY_REFERENCE",
    "STATISTICS",
    "ColumnStatistics",
    "Kept",
    "cache_attention",
    "caote_topk",
    "mse_logits",
    "paged_attention",
    "select_attention",
]
