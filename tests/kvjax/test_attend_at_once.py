"""Blocks whose policy ends in CAOTE are scored and evicted from in one operation: the same tokens stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas.caote_topk.api import caote_topk_unchecked
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in

B, K, G, D, BUDGET, BLOCK = 2, 2, 2, 4, 8, 4

AT_ONCE = """
h2o+caote tova(heads='group')+fast_caote+protect(sinks=1,recent=0.25) snapkv(window=2)+caote(group='mean')
h2o+protect(sinks=2)+caote(norm=1) key_norm+normalise+caote tova(heads='group')+caote+positions(kind='index')
""".split()
IN_TWO = ["h2o", "h2o+caote+pool", "tova+caote", "snapkv(window=2)+caote@layer"]


SIZES = dict(batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=BUDGET, block=BLOCK)
ROWS = [np.ones((B, BLOCK, heads, D), np.float32) for heads in (K * G, K, K)]
FREQUENCY = np.float32([[1.0, 0.1]])
TURNED = kvjax.Context(frequency=jnp.asarray(FREQUENCY))


@pytest.mark.parametrize("name", AT_ONCE + IN_TWO)
def test_one_operation_scores_and_evicts_where_caote_has_the_last_word(name, monkeypatch):
    policy, calls = kvjax.parse(name), []
    monkeypatch.setattr(
        kvjax._src.eviction,
        "caote_topk_unchecked",
        lambda *x, **options: calls.append(x) or caote_topk_unchecked(*x, **options),
    )
    attend = functools.partial(kvjax.attend, policy=policy, budget=BUDGET, context=TURNED)
    jax.eval_shape(lambda *block: attend(kvjax.empty_cache(policy, **SIZES), *block), *ROWS)
    assert len(calls) == (name in AT_ONCE)


@pytest.mark.parametrize(("platform", "kernels"), [("tpu", 3), ("cuda", 6)])
def test_on_an_accelerator_attention_scores_and_eviction_are_kernels(platform, kernels):
    """Attention and its statistics, their sums so far, and the eviction: one kernel on a TPU, three on a GPU."""
    policy = kvjax.parse("h2o+caote")
    attend = functools.partial(kvjax.attend, policy=policy, budget=BUDGET)
    assert kernels_in(platform, lambda *rows: attend(kvjax.empty_cache(policy, **SIZES), *rows), *ROWS) == kernels


@pytest.mark.matrix
@pytest.mark.tpu
def test_layers_that_are_donated_are_read_and_written_where_they_are():
    """The program of a decode step over all layers holds no copy of one layer's keys or values."""
    policy, layers = kvjax.parse("tova(heads='group')+caote"), 4
    sizes: dict = dict(batch=2, kv_heads=8, query_heads=32, head_dim=128, dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: kvjax.empty_cache(policy, layers=layers, budget=4096, block=128, **sizes))
    leaves, tree = jax.tree.flatten(cache)

    def decode(query, key, value, *leaves):
        cache = jax.tree.unflatten(tree, leaves)
        for layer in range(layers):
            context = kvjax.Context(layer=layer, excess=1)
            query, cache = kvjax.attend(cache, query, key, value, policy=policy, budget=4096, context=context)
        return query, jax.tree.leaves(cache)

    rows = [jax.ShapeDtypeStruct((2, 1, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]
    program = compiled_for_tpu("v5e:2x2", decode, *rows, *leaves, donate=range(3, 3 + len(leaves)))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2 * layers  # attention, eviction
    one_layer = 2 * 8 * 4224 * 128 * 2
    assert program.memory_analysis().temp_size_in_bytes < one_layer / 2
