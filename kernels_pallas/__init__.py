"""Kernels: one folder an operation, each with its definition in plain JAX and, where it pays, kernels for TPU and GPU."""

from kernels_pallas.cache_attention.api import cache_attention
from kernels_pallas.cache_attention.reference import STATISTICS, ColumnStatistics

__all__ = ["STATISTICS", "ColumnStatistics", "cache_attention"]
