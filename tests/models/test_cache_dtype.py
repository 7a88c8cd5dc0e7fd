"""Runs whose caches have other dtypes than the model: the tokens, the bytes, what goes on from them."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
import models
from kvjax.cache import dtypes_of
from kvjax.quantise import check_dtypes
from models.layer_caches import LayerCaches
from tests.models.tiny import SETTINGS as SIZES
from tests.models.tiny import STATE, TOKENS, decoder, held, on_mesh, streamed
from tests.tiers import first

SETTINGS = dict(policy=STATE, **SIZES)
PROMPT = TOKENS[:2, :40]


@functools.cache
def prefilled(dtype: str | tuple[str, str] | None):
    return models.prefill(decoder(), PROMPT, cache_dtype=dtype, **SETTINGS)


def test_int8_takes_a_quarter_of_float32_and_changes_the_logits_little():
    eight, floats = prefilled("int8"), prefilled(None)
    assert eight.cache.key.dtype == "int8" and floats.cache.key.dtype == "float32"
    assert (
        4 * (eight.cache.key.nbytes + eight.cache.value.nbytes) == floats.cache.key.nbytes + floats.cache.value.nbytes
    )
    change = np.abs(np.asarray(eight.logits) - floats.logits).max()
    assert 0 < change < 0.05 * np.ptp(floats.logits)


@pytest.mark.parametrize("dtype", first(1, [pytest.param(("int8", "float32")), "float32/float8_e4m3fn"]))
def test_keys_and_values_have_dtypes_of_their_own(dtype):
    mixed = prefilled(dtype)
    expected = check_dtypes(dtype)
    assert dtypes_of(mixed.cache) == expected
    assert (mixed.cache.key_scale is None, mixed.cache.value_scale is None) == tuple(x == "float32" for x in expected)
    change = np.abs(np.asarray(mixed.logits) - prefilled(None).logits).max()
    # Three bits behind the leading one are steps of an eighth; tests/campaign holds both to the reference.
    assert 0 < change < (0.1 if "float8" in str(dtype) else 0.05) * np.ptp(prefilled(None).logits)
    predicted = kvjax.memory(
        layers=2, kv_heads=2, head_dim=8, query_heads=4, batch=2, policy="h2o+caote", budget=16, block=8, dtype=dtype
    )
    assert mixed.cache.nbytes == predicted.total


@pytest.mark.parametrize("dtype", first(0, ["int8", "float32/int8"]))
def test_where_weights_are_traced_the_same_rows_are_kept_as_floats_and_a_derivative_passes(dtype):
    weights = jax.tree.map(lambda x: x, decoder())

    def first_logit(model):
        cache, logits = models.prefill(model, PROMPT, cache_dtype=dtype, **SETTINGS)
        return logits.sum(), (cache, logits)

    (_, (cache, logits)), slope = jax.value_and_grad(first_logit, has_aux=True)(weights)
    assert str(dtypes_of(cache)) == "float32" and cache.key_scale is None and cache.value_scale is None
    np.testing.assert_allclose(logits, prefilled(dtype).logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(cache.position, prefilled(dtype).cache.position)
    of_key, of_value = (np.asarray(slope.layers.arrays()[name]) for name in ("key", "value"))
    assert all(np.isfinite(x).all() and (x != 0).any() for x in (of_key, of_value))


@pytest.mark.parametrize(
    ("dtype", "named", "other"),
    first(1, [("int8/float32", "int8/float32", "int8"), ("int8", "int8", "bfloat16")]),
    ids=["mixed", "int8"],
)
def test_a_conversation_keeps_the_dtypes_of_its_cache(dtype, named, other):
    cache, turn = prefilled(dtype).cache, PROMPT[:, :4]
    for again in (None, named):
        more = models.prefill(decoder(), turn, cache=cache, cache_dtype=again, **SETTINGS).cache
        assert str(dtypes_of(more)) == named and more.next_position.tolist() == [44, 44]
    why = f"the cache is of {named}, but cache_dtype is '{other}': a cache keeps its dtype, so leave cache_dtype out"
    with pytest.raises(ValueError, match=why):
        models.prefill(decoder(), turn, cache=cache, cache_dtype=other, **SETTINGS)
    with pytest.raises(ValueError, match=f"the weights are traced .* but a cache of {named} passes no derivative on"):
        jax.grad(lambda model: models.prefill(model, turn, cache=cache, **SETTINGS).logits.sum())(decoder())


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype is 'int4'; keys and values are floats, such as 'bfloat16', or 'int8'"):
        models.prefill(decoder(), PROMPT, cache_dtype="int4", **SETTINGS)
    with pytest.raises(ValueError, match=r"dtype is .*; expected one dtype, or a pair of keys' and values'"):
        models.prefill(decoder(), PROMPT, cache_dtype=("int8",) * 3, **SETTINGS)


@pytest.mark.matrix
def test_policies_that_share_a_prompt_get_what_each_gets_alone():
    asked = ["h2o", "key_norm"]
    given = dict(when="prompt", cache_dtype="int8", **SIZES)
    each = models.prefill_each(decoder(), PROMPT, policies=asked, **given)
    for policy, (cache, logits) in zip(asked, each, strict=True):
        alone = models.prefill(decoder(), PROMPT, policy=policy, **given)
        np.testing.assert_allclose(logits, alone.logits, rtol=1e-4, atol=2e-5)
        np.testing.assert_array_equal(cache.position, alone.cache.position)
        assert cache.key.dtype == "int8"


@pytest.mark.parametrize("dtype", first(1, ["int8", "int8/float32", "float32/float8_e4m3fn"]))
def test_layer_by_layer_the_caches_have_the_dtypes_of_one_program(run_by_layer, dtype):
    run_by_layer(False)
    one = prefilled(dtype)
    run_by_layer()
    _, cache = next(models.stream(decoder(), PROMPT, cache_dtype=dtype, max_new_tokens=4, end=(), **SETTINGS))
    named = str(check_dtypes(dtype))
    assert isinstance(cache, LayerCaches)
    assert (cache.key_scale is None, cache.value_scale is None) == (named[:4] == "floa", named.endswith("float32"))
    if cache.value_scale is not None:
        assert cache.value_scale.shape == cache.position.shape
    stacked = models.stacked(cache)
    assert str(dtypes_of(stacked)) == named and stacked.nbytes == one.cache.nbytes
    assert held(stacked) == held(one.cache)
    for part in ("key_scale", "value_scale"):
        if getattr(cache, part) is not None:
            np.testing.assert_array_equal(getattr(cache, part), getattr(stacked, part))
            np.testing.assert_allclose(getattr(cache, part), getattr(one.cache, part), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", first(0, ["int8", "float32/int8"]))
def test_a_stream_by_layers_takes_the_tokens_of_one_program(run_by_layer, dtype):
    settings = SETTINGS | dict(cache_dtype=dtype, max_new_tokens=4, end=())
    run_by_layer(False)
    whole = models.generate(decoder(), PROMPT, **settings)
    run_by_layer()
    np.testing.assert_array_equal(streamed(decoder(), PROMPT, **settings)[0], whole.tokens)


@pytest.mark.parametrize(
    ("when", "dtype"),
    [
        pytest.param("prompt", "int8", marks=pytest.mark.matrix),
        # The table of tests/campaign has eight bits in pages.
        *first(0, [("block", "int8"), ("block", "float32/int8")], rest=pytest.mark.nightly),
    ],
)
def test_heads_that_compete_keep_rows_of_eight_bits_in_pages(when, dtype):
    settings = dict(policy="key_norm@layer", page_size=4, when=when, **SIZES)
    eight = models.prefill(decoder(), PROMPT, cache_dtype=dtype, **settings)
    floats = models.prefill(decoder(), PROMPT, **settings)
    assert str(dtypes_of(eight.cache)) == dtype and eight.cache.value_scale.shape == eight.cache.position.shape
    assert int(eight.cache.num_live.sum()) == int(floats.cache.num_live.sum()) == 2 * 2 * 2 * 16
    assert np.abs(np.asarray(eight.logits) - floats.logits).max() < 0.05 * np.ptp(floats.logits)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
@pytest.mark.parametrize("dtype", first(0, ["int8", "int8/float32"]))
def test_a_mesh_splits_scales_as_it_splits_rows(dtype):
    many = models.prefill(on_mesh(), PROMPT, cache_dtype=dtype, **SETTINGS)
    np.testing.assert_array_equal(np.sort(many.cache.position), np.sort(prefilled(dtype).cache.position))
    np.testing.assert_allclose(many.logits, prefilled(dtype).logits, rtol=1e-4, atol=1e-4)
    assert str(dtypes_of(many.cache)) == dtype
    for scale in filter(lambda x: x is not None, (many.cache.key_scale, many.cache.value_scale)):
        assert scale.sharding.spec == PartitionSpec(None, "data", "tensor")
        assert scale.addressable_shards[0].data.shape == (2, 1, 1, 24)
    assert (many.cache.value_scale is None) == (dtype != "int8")
