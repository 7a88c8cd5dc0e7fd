"""Attention over pages against NumPy float64 on the slots that they hold, one query at a time."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from kernels_pallas import STATISTICS, paged_attention
from tests.kernels_pallas.test_cache_attention import Case, case, check_definition, sinks_of


class Paged(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    position: np.ndarray
    table: np.ndarray
    query_position: np.ndarray


def paged(given: Case, page: int, counts: np.ndarray | None = None, seed: int = 0) -> tuple[Paged, Case]:
    """The slots of a case in pages, anywhere in a pool, and the case with what is left of it.

    Heads have ``counts`` pages each, by default any number from none to all. Pages that no head owns hold NaN and
    positions that would be seen, and so do free slots.
    """
    rng = np.random.default_rng(seed)
    B, K, S = given.key.shape[:3]
    M = S // page
    assert M * page == S
    if counts is None:
        counts = rng.integers(M + 1, size=(B, K))
    owned = np.arange(M) < counts[..., None]  # [B, K, M]
    ids = rng.permutation(B * K * M + 3)
    table = np.where(owned, ids[: B * K * M].reshape(B, K, M), -1).astype(np.int32)
    key_position = np.where(np.repeat(owned, page, axis=2), given.key_position, -1)
    free = (key_position < 0)[..., None]

    def pool(rows: np.ndarray, stale: float) -> np.ndarray:
        whole = np.full((len(ids), page, *rows.shape[3:]), stale, rows.dtype)
        pages = rows.reshape(B, K, M, page, *rows.shape[3:])
        whole[table[owned]] = pages[owned]
        return whole

    stale = given._replace(key=np.where(free, np.nan, given.key), value=np.where(free, np.inf, given.value))
    arrays = (stale.query, pool(stale.key, np.nan), pool(stale.value, np.nan), pool(key_position, 0))
    return Paged(*arrays, table, given.query_position), given._replace(key_position=key_position)


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(paged_attention, **{"statistics": STATISTICS, "window": 2} | options))


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10)
def test_output_and_statistics_are_those_of_the_definition(seed):
    pages, held = paged(case(seed, S=24), 3, seed=seed)
    check_definition(compiled()(*pages), held)


def test_a_single_query_reads_pages_of_one_slot():
    pages, held = paged(case(2, T=1), 1)
    check_definition(compiled()(*pages), held)


@pytest.mark.parametrize("most", [10, 48])
def test_a_head_is_read_at_a_width_that_holds_its_pages(most):
    given = case(5, S=768)
    counts = np.random.default_rng(most).integers(most + 1, size=given.key.shape[:2])
    pages, held = paged(given, 16, counts)
    check_definition(compiled()(*pages), held)


def test_a_slot_has_its_place_by_the_order_of_the_heads_pages():
    pages, held = paged(case(3, S=24), 3)
    out, columns = compiled()(*pages)
    turned = pages._replace(table=pages.table[..., ::-1])
    other, reversed_columns = compiled()(*turned)
    np.testing.assert_allclose(other, out, rtol=1e-5, atol=1e-6)
    for name in STATISTICS:
        column = np.asarray(getattr(columns, name))
        blocks = column.reshape(*column.shape[:2], -1, 3)[:, :, ::-1]
        np.testing.assert_allclose(getattr(reversed_columns, name), blocks.reshape(column.shape), rtol=1e-5, atol=1e-6)
    assert (np.asarray(columns.sum)[np.repeat(held.key_position < 0, 2, axis=1)] == 0).all()


def test_a_sink_takes_its_share_of_each_querys_weight():
    pages, held = paged(case(4, S=24, T=3), 8)
    check_definition(compiled()(*pages, sink_logits=sinks_of(held)), held, sink_logits=sinks_of(held))


def test_options_mean_what_they_mean_for_slots():
    pages, held = paged(case(4, S=24, T=6), 8)
    options = dict(sliding_window=7, scale=0.1, window=3, soft_cap=1.5)
    check_definition(compiled(**options)(*pages), held, **options)


def test_only_one_heads_pages_are_laid_out_at_a_time():
    """The program's memory grows with a head's slots, and hardly with how many heads there are."""

    def temporary(K: int) -> int:
        pages, _ = paged(case(6, B=1, T=1, N=K, K=K, S=1024, D=64), 16)
        return jax.jit(paged_attention).lower(*pages).compile().memory_analysis().temp_size_in_bytes

    one_head = 2 * 1024 * 64 * 4
    assert temporary(8) < temporary(2) + one_head
