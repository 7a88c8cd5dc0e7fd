"""Floors against arrays that exist, and numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import floors, kernels
from benchmarks.shapes import PUBLISHED, SHAPES, parameter_count

SIZES = kernels.Sizes(budget=24, block=8, context=64, loss_tokens=16)


def found(operation: str) -> dict[str, kernels.Case]:
    given = kernels.cases(SHAPES["tiny"], 2, SIZES, jnp.bfloat16, [operation])
    return {case.case: case for case in given if case.operation == operation}


def test_the_target_s_caote_topk_reads_268_megabytes():
    assert floors.caote_topk(B=8, K=8, S=8192, D=128, width=2) == 2 * 134_217_728


def test_caote_s_floor_is_v_twice_and_fast_once():
    of_v = 2 * 2 * 32 * 64 * 2  # B K S D, two bytes
    cases = found("caote_topk")
    assert cases["block"].numbers_bytes == 2 * of_v and cases["block, fast"].numbers_bytes == of_v
    assert cases["decode"].numbers_bytes == 2 * of_v * 25 // 32  # budget + 1 tokens live


def test_attention_s_floor_is_keys_and_values():
    for case in found("cache_attention").values():
        _, key, value, _, _ = jax.eval_shape(case.make)
        assert case.numbers_bytes == (key.size + value.size) * 2


def test_a_long_block_counts_its_products():
    case, sums = (
        kernels._cache_attention(SHAPES["tiny"], 1, 256, 128, frozenset(names), jnp.float32)
        for names in ((), kernels.STATISTICS)
    )
    assert case.flops == 2 * 2 * 128 * 4 * 256 * 64  # q.k and a.v, T N S D
    assert sums.flops == 3 * 2 * 128 * 4 * 256 * 64  # and q.k once more


def test_paged_attention_s_floor_is_the_pages_that_hold_tokens_and_each_has_one_owner():
    for case in found("paged_attention").values():
        _, key, _, position, table, _ = jax.tree.map(np.asarray, jax.jit(case.make)())
        live = np.unique(table[table >= 0])
        assert (position[live] >= 0).any(axis=1).all()
        assert case.numbers_bytes == 2 * len(live) * key.shape[1] * 64 * 2
    pages = table[table >= 0].tolist()
    assert len(set(pages)) == len(pages) == position.shape[0]
    held = position[table[0, 0][table[0, 0] >= 0]]
    assert sorted(held[held >= 0].tolist()) == list(range((held >= 0).sum()))


def test_selection_s_floor_is_the_rows_that_it_names():
    cases = found("select_attention")
    slots = np.asarray(jax.jit(cases["25%, a set a KV head"].make)()[3])
    assert slots.shape == (2, 2, 16) and all(len(set(row)) == 16 for row in slots.reshape(-1, 16).tolist())
    assert cases["25%, a set a KV head"].numbers_bytes == 2 * slots.size * 64 * 2
    assert cases["25%, a set a query head"].numbers_bytes == 2 * cases["25%, a set a KV head"].numbers_bytes


def test_the_loss_s_floor_is_its_inputs_and_two_gradients():
    case = found("mse_logits")["all pairs, with gradients"]
    query, key, predicted_query, predicted_key = jax.eval_shape(case.make)
    numbers = query.size + key.size + 2 * (predicted_query.size + predicted_key.size)
    assert case.numbers_bytes == 4 * numbers


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_step_reads_all_weights_but_an_untied_embedding(name):
    config = SHAPES[name]
    weights, cache = floors.step_bytes(config, 3, 100, 2)
    unread = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    assert weights == 2 * (parameter_count(config) - unread)
    assert cache == 2 * 3 * config.num_layers * 2 * config.num_kv_heads * 100 * config.head_dim


def test_shapes_have_the_published_numbers_of_parameters():
    billions = [parameter_count(SHAPES[name]) / 1e9 for name in (*PUBLISHED, "small")]
    assert billions == pytest.approx([1.2358, 3.2127, 8.0303, 8.1907, 0.1], abs=1e-3)
