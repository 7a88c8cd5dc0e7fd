"""Gemma 4 and 3n: layers of two shapes or that share keys and values, inputs of layers, experts beside a network."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
import models
from models import engine
from models.config import AltUp, GlobalHeads
from models.config_json import from_hugging_face, to_hugging_face
from models.sizing import full_cache_bytes
from tests.models import tiny
from tests.models.make_golden import BLOCK, GOLDEN, PROMPT, RECENT
from tests.tiers import first, nightly

NAMES = ("gemma4_e", "gemma3n", "gemma4", "gemma4_moe")
RAW = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in NAMES}
ARRAYS = np.load(GOLDEN / "gemma4_e" / "golden.npz")
TOKENS = ARRAYS["tokens_0"]
TOKENS_3N = np.load(GOLDEN / "gemma3n" / "golden.npz")["tokens_0"]


@functools.cache
def model(name="gemma4_e"):
    return models.load(GOLDEN / name)[0]


SETTINGS = dict(policy="recency", budget=RECENT, block=BLOCK)


def test_layers_that_share_a_cache_see_what_its_own_layer_saw_before_it_evicted():
    found = models.hidden_states(model(), TOKENS[:, :PROMPT], **SETTINGS).hidden
    expected = ARRAYS["recency_0"][:, :PROMPT]
    np.testing.assert_allclose(engine.logits_of(model(), found), expected, atol=1e-4, rtol=0)


def test_streams_that_layers_predict_and_correct_give_the_logits_of_transformers():
    golden = np.load(GOLDEN / "gemma3n" / "golden.npz")
    np.testing.assert_allclose(jax.jit(model("gemma3n"))(TOKENS_3N), golden["logits_0"], atol=1e-4, rtol=0)


@pytest.mark.matrix
def test_a_model_that_does_not_scale_the_active_stream_has_scales_that_nothing_reads():
    own = model("gemma3n")
    scaled = {path: np.ones_like(array) if "scale" in path else array for path, array in own.arrays().items()}
    config = dataclasses.replace(own.config, altup=dataclasses.replace(own.config.altup, scaled=False))
    found, expected = models.Decoder(config, own.arrays()), models.Decoder(own.config, scaled)
    np.testing.assert_allclose(jax.jit(found)(TOKENS_3N), jax.jit(expected)(TOKENS_3N), atol=1e-5, rtol=0)


POLICIES = ("h2o+caote", "snapkv(window=4)+caote(target='output')", "kvzip@uniform")
EACH = [*zip(NAMES, (*POLICIES[1:], *POLICIES), strict=False)]  # of the models, with a policy
WHOLE = first(len(EACH), [*EACH, *sorted({*itertools.product(NAMES, POLICIES)} - {*EACH})], rest=nightly)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "policy"), WHOLE)
def test_a_budget_for_all_tokens_changes_nothing(name, policy):
    settings = dict(max_new_tokens=4, end=(), block=BLOCK)
    whole = models.generate(model(name), TOKENS[:, :24], **settings)
    found = models.generate(model(name), TOKENS[:, :24], policy=policy, budget=64, **settings)
    assert found.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.matrix
def test_policies_that_read_one_prompt_keep_what_each_keeps_alone():
    settings, policies = dict(budget=RECENT, when="prompt"), ("snapkv(window=4)", "keydiff")
    each = models.prefill_each(model("gemma4"), TOKENS, policies=policies, **settings)
    for policy, found in zip(policies, each, strict=True):
        alone = models.prefill(model("gemma4"), TOKENS, policy=policy, **settings).cache
        assert tiny.held(found.cache) == tiny.held(alone)


def test_a_layer_has_a_cache_of_its_own_heads_or_none(tmp_path):
    cache = models.prefill(model(), TOKENS[:, :PROMPT], **SETTINGS).cache
    shapes = [layer.key.shape[1:] for layer in cache.layers]
    assert shapes == [(2, 7 + BLOCK, 8), (2, 7 + BLOCK, 8), (2, RECENT + BLOCK, 16)]  # of 6 layers
    assert np.asarray(cache.num_live).max(axis=(1, 2)).tolist() == [6, 6, RECENT]  # which the next token sees
    kvjax.save_cache(tmp_path / "cache", cache, policy="recency")
    loaded = kvjax.load_cache(tmp_path / "cache")
    assert jax.tree.map(np.shape, loaded) == jax.tree.map(np.shape, cache)
    assert kvjax.cache_info(tmp_path / "cache")["full_cache_bytes"] == full_cache_bytes(model(), PROMPT)


def test_heads_that_a_layer_lacks_hold_nothing_and_take_no_bytes():
    sizes = dict(layers=2, kv_heads=(2, 1), head_dim=(8, 16), query_heads=4, budget=6)
    cache = jax.jit(lambda: kvjax.empty_cache("h2o", block=2, **sizes))()
    assert cache.heads_shape == (2, 1, 2) and not cache.alike
    assert [layer.key.shape for layer in cache.layers] == [(1, 2, 8, 8), (1, 1, 8, 16)]
    assert (np.asarray(cache.position) == -1).all() and np.asarray(cache.num_live).tolist() == [[[0, 0]], [[0, 0]]]
    found = kvjax.memory("h2o", block=2, dtype="float32", **sizes)
    assert found.total == cache.nbytes and found.keys_values == 2 * 4 * (2 * 8 * 8 + 8 * 16)
    with pytest.raises(ValueError, match="kv_heads has 3 entries for 2 layers"):
        kvjax.empty_cache("h2o", **sizes | dict(kv_heads=(1, 1, 1)))
    with pytest.raises(ValueError, match="lets heads of all layers compete"):
        kvjax.empty_cache("h2o@model", **sizes)
    with pytest.raises(ValueError, match="lets heads of all layers compete"):
        kvjax.evict(cache, np.zeros(cache.slots_shape), 2, allocation="model")
    with pytest.raises(ValueError, match="pages hold tokens of one head dim"):
        kvjax.pack(cache, pages=4, page_size=2, most=4)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("gemma4", dict(policy="laprox"), "lets heads of all layers compete, which needs layers of one number"),
        ("gemma4_e", dict(policy="h2o+merge"), "changes keys or values that stay, but some layers of this model"),
        (
            "gemma3n",
            dict(policy="laprox"),
            "lets heads of all layers compete .take '@uniform'., but some layers of this",
        ),
        ("gemma3n", dict(select="oracle", budget=0.5), "this run reads select= in every layer, but this model's layer"),
        ("gemma4_e", dict(policy="h2o+positions(kind='compact')"), "turns keys .take 'absolute' positions"),
        ("gemma4", dict(select="oracle", budget=0.5), "this run reads select= in every layer, but this model's layers"),
        ("gemma4", dict(policy="kvgrad@uniform"), "reads the gradient of a loss in every layer, but this model's"),
    ],
)
def test_what_needs_layers_that_are_alike_is_refused_in_one_sentence(name, options, sentence):
    with pytest.raises(ValueError, match=sentence) as said:
        models.generate(model(name), TOKENS, max_new_tokens=1, **dict(budget=16) | options)
    assert str(said.value).endswith(".") and ". " not in str(said.value)


@pytest.mark.matrix
def test_what_is_measured_of_all_layers_is_refused():
    with pytest.raises(ValueError, match="what is measured of the layers is one array, but this model's layers differ"):
        models.q_filters(model(), TOKENS)


@pytest.mark.parametrize("name", first(2, NAMES))
def test_a_saved_model_has_the_tensors_that_were_read(name, tmp_path):
    models.save(tmp_path, model(name))
    expected, found = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("kind", "name"), [("gemma4", "gemma4_e"), ("gemma3n", "gemma3n")])
def test_the_language_model_of_one_that_sees_is_read_without_what_no_layer_reads(kind, name, tmp_path):
    tensors = load_file(GOLDEN / name / "model.safetensors")
    inside = {f"model.language_model.{key.removeprefix('model.')}": array for key, array in tensors.items()}
    inside |= {f"model.{part}.weight": np.zeros((2, 2), np.float32) for part in ("vision_tower", "embed_audio.x")}
    inside["model.vision_tower.x.weight"] = inside.pop("model.vision_tower.weight")
    inside["model.language_model.layers.4.self_attn.k_proj.weight"] = np.zeros((16, 16), np.float32)
    save_file(inside, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": RAW[name]}))
    read = models.load(tmp_path)[0]
    found, expected = read.arrays(), model(name).arrays()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


def test_fields_are_read_as_transformers_does():
    config = from_hugging_face(RAW["gemma4_e"])
    assert config.sliding_windows == (7, 7, None, 7, 7, None) and config.global_heads == GlobalHeads(2, 16)
    assert config.sources == (None, None, None, 1, 1, 2)
    assert (config.cached_layers, config.sharing_size, config.layer_input_size) == ((0, 1, 2), 48, 6)
    assert [config.at(layer).intermediate_size for layer in (2, 3)] == [24, 48] and len(config.kinds) == 4
    by_name = {key: value for key, value in RAW["gemma4"].items() if key != "per_layer_config"}
    by_name |= dict(global_head_dim=16, num_global_key_value_heads=1)
    read = from_hugging_face(by_name)
    assert read == from_hugging_face(RAW["gemma4"]) and read.global_heads == GlobalHeads(1, 16, keys_as_values=True)
    assert from_hugging_face(by_name | {"attention_k_eq_v": False}).global_heads == GlobalHeads(2, 16)
    ends = ["full_attention"] + ["sliding_attention"] * 3
    assert from_hugging_face(by_name | {"layer_types": ends}).sliding_windows == (None, 7, 7, None)
    unified = by_name | {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"}
    del unified["hidden_size_per_layer_input"], unified["architectures"]
    config = from_hugging_face({"model_type": "gemma4_unified", "text_config": unified})
    assert config.layer_input_size == 0 and to_hugging_face(config)["model_type"] == "gemma4_unified_text"


def test_fields_of_gemma_3n_are_read_as_transformers_does():
    raw = RAW["gemma3n"]
    config = from_hugging_face(raw)
    assert (config.altup, config.layer_input_vocab) == (AltUp(3, 1, rank=4), 56) and config.altup.scaled
    assert config.sources == (None, None, None, 2, 1) and config.activation_sparsity == (0.6, 0.6, 0.0, 0.0, 0.0)
    assert [config.at(layer).activation_sparsity for layer in (1, 2)] == [(0.6,) * 5, ()] and len(config.kinds) == 3
    old = {key: value for key, value in raw.items() if key != "rope_parameters"}
    old |= dict(intermediate_size=20, rope_theta=1e6, rope_local_base_freq=10_000.0)
    assert from_hugging_face(old) == config
    public = from_hugging_face({"model_type": "gemma3n", "text_config": {}})  # E4B leaves all to transformers
    assert public.activation_sparsity == (0.95,) * 10 + (0.0,) * 25 and public.sliding_windows[::5] == (512,) * 7
    assert public.sliding_windows[4::5] == (None,) * 7 and public.cached_layers == tuple(range(20))
    assert from_hugging_face(raw | {"activation_sparsity_pattern": None}).activation_sparsity == ()


ROPES = RAW["gemma4"]["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("gemma4", {"attention_bias": True}, "attention_bias is set, which is not supported for gemma4_text"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is set"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config must give the layers with full"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention have rope_type"),
        ("gemma4", {"rope_parameters": ROPES | {"sliding_attention": {"factor": 2.0}}}, "and a factor or a partial"),
        ("gemma4", {"enable_moe_block": True}, "num_experts is None; it must be a positive integer"),
        ("gemma4_moe", {"top_k_experts": 5}, "experts_per_token is 5; expected 1 to 4"),
        ("gemma3n", {"intermediate_size": [20, 24]}, "intermediate_size is [20, 24]; expected one size for all of 5"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5]}, "1 activation_sparsity were given for 5 layers"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 5}, "activation_sparsity is (1.0, 1.0, 1.0, 1.0, 1.0)"),
        ("gemma3n", {"altup_active_idx": 3}, "stream 3 of 3 is active, and the rank is 4; expected a number below"),
        ("gemma3n", {"hidden_size_per_layer_input": None}, "altup was given; expected norms='both' and a layer_input"),
        ("gemma4_e", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6 of 6 layers; expected at least one"),
        ("gemma4_e", {"num_kv_shared_layers": 4}, "4 of 6 layers share keys and values; before them each needs a"),
    ],
)
def test_a_config_that_is_almost_right_is_refused_in_one_sentence(name, fields, sentence):
    with pytest.raises(ValueError) as said:
        from_hugging_face(RAW[name] | fields)
    assert sentence in str(said.value) and str(said.value).endswith(".") and ". " not in str(said.value)
