"""Operations, one folder each: the definition in plain JAX and, where they are faster, kernels for TPU and GPU."""

from kernels_pallas.add_rms_norm.api import add_rms_norm
from kernels_pallas.cache_attention.api import cache_attention
from kernels_pallas.cache_attention.reference import ONLY_REFERENCE, STATISTICS, ColumnStatistics
from kernels_pallas.caote_topk.api import caote_topk
from kernels_pallas.caote_topk.reference import Ends, Kept
from kernels_pallas.carry_statistic.api import carry_statistic
from kernels_pallas.carry_statistic.reference import Carried
from kernels_pallas.insert_token.api import insert_token
from kernels_pallas.insert_token.reference import Inserted
from kernels_pallas.keep_topk.api import keep_topk
from kernels_pallas.mse_logits.api import mse_logits
from kernels_pallas.order_tokens.api import order_tokens
from kernels_pallas.order_tokens.reference import Order
from kernels_pallas.paged_attention.api import paged_attention
from kernels_pallas.select_attention.api import select_attention
from kernels_pallas.split_heads.api import split_heads
from kernels_pallas.split_heads.reference import QueryKeyValue

__all__ = [
    "ONLY_REFERENCE",
    "STATISTICS",
    "Carried",
    "ColumnStatistics",
    "Ends",
    "Inserted",
    "Kept",
    "Order",
    "QueryKeyValue",
    "add_rms_norm",
    "cache_attention",
    "caote_topk",
    "carry_statistic",
    "insert_token",
    "keep_topk",
    "mse_logits",
    "order_tokens",
    "paged_attention",
    "select_attention",
    "split_heads",
]
