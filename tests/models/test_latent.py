"""Multi-head latent attention: what is evicted from a cache of latents is what the paper's own form does not see."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
import models
from kvjax._src.capacity import CacheSpec
from models import planning
from models.config import Config, Latent, Rope, Routing
from models.config_json import from_hugging_face
from models.decoder import _chosen
from models.sizing import full_cache_bytes
from tests.models import reference, tiny
from tests.models.make_golden import GOLDEN
from tests.models.reference import latent
from tests.tiers import first, matrix, nightly

SIZES = Latent(size=8, rotated=4, plain=6, value=5, query=10)
CONFIG = Config(
    64, 16, 24, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=SIZES.head_dim, architecture="deepseek_v3",
    latent=SIZES, rope=Rope(theta=100.0, partial_rotary_factor=SIZES.rotated / SIZES.head_dim), max_positions=64,
    attention_multiplier=10**-0.5,
)  # fmt: skip
TOKENS = np.random.default_rng(0).permutation(64)[:28]
PROMPT, SETTINGS = 20, dict(budget=9, block=6)
POLICIES = first(
    1,
    [
        "h2o+caote", "snapkv(window=4)", "recency", "keydiff", "snapkv(window=4)+caote(target='output')",
        "laprox(window=4)", "snapkv(window=3)+caote(per='query',target='output')", "expected_attention", "key_norm",
        "h2o@model", "tova+positions(kind='compact')",
    ],
)  # fmt: skip


@functools.cache
def weights():
    return reference.parameters(CONFIG, sharpness=4.0)


@functools.cache
def model():
    return reference.decoder(CONFIG, weights())


@functools.cache
def answered(policy):
    """Return what the definition makes of the prompt and eight tokens, and what the library does."""
    found = reference.run(weights(), CONFIG, TOKENS[:PROMPT], policy=reference.policy(policy), new_tokens=8, **SETTINGS)
    out = models.generate(model(), TOKENS[None, :PROMPT], policy=policy, max_new_tokens=8, end=(), **SETTINGS)
    return found, out


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_latents_keeps_what_the_definition_does_and_attends_without_absorption_as_with_it(policy):
    found, out = answered(policy)
    tiny.assert_keeps(out.cache, 0, found)
    assert out.tokens[0].tolist() == found.tokens
    fed = np.array([*TOKENS[:PROMPT], *found.tokens[:-1]])
    if "positions" not in policy:  # turned keys are at other places than the text's
        np.testing.assert_allclose(latent.logits(weights(), CONFIG, fed, found.seen), found.logits, atol=1e-9)


@matrix
def test_latents_in_eight_bits_are_values_as_they_are_rounded():
    policy, given = "h2o+caote", dict(new_tokens=6, dtypes=("int8", "int8"), **SETTINGS)
    found = reference.run(weights(), CONFIG, TOKENS[:PROMPT], policy=reference.policy(policy), **given)
    settings = dict(policy=policy, max_new_tokens=6, end=(), cache_dtype="int8", **SETTINGS)
    out = models.generate(model(), TOKENS[None, :PROMPT], **settings)
    tiny.assert_keeps(out.cache, 0, found)
    assert out.tokens[0].tolist() == found.tokens


@matrix
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        pytest.param("kvgrad", {}, marks=nightly), ("h2o+caote@model", {}), ("h2o+sample@model", {}),
        ("snapkv(window=4)+caote(per='query')@model", {}), ("h2o+positions(kind='compact')@model", {}),
        (None, dict(select="oracle", budget=0.5)),
    ],
)  # fmt: skip
def test_a_cache_that_also_stores_the_values_keeps_and_answers_the_same(policy, options, monkeypatch):
    """Plain and in pages, while a text is repeated, and in selections."""
    own, tokens = models.load(GOLDEN / "deepseek_v3")[0], TOKENS[None] % 64
    settings = dict(budget=12, block=8, policy=policy, max_new_tokens=4, end=()) | options
    settings = {name: value for name, value in settings.items() if value is not None}
    alone = models.generate(own, tokens, **settings)
    monkeypatch.setattr(planning, "CacheSpec", lambda *given, rotated, **named: CacheSpec(*given, **named))
    both = models.generate(own, tokens, **settings)
    assert alone.cache.arrays.rotated == 4 and both.cache.arrays.rotated is None
    assert alone.tokens.tolist() == both.tokens.tolist()
    np.testing.assert_array_equal(tiny.kept_tokens(alone.cache), tiny.kept_tokens(both.cache))
    stored = [set(x.cache.arrays.entries) for x in (alone, both)]
    assert stored[1] - stored[0] == {"value"}


def test_the_bytes_of_a_cache_of_latents_are_those_of_its_keys():
    sizes = dict(kv_heads=1, query_heads=4, head_dim=12, budget=16, block=4, layers=2)
    cache = jax.eval_shape(lambda: kvjax.empty_cache("h2o", rotated=4, dtype="bfloat16", **sizes))
    assert set(cache.layers[0].entries) == {"key"}
    found = kvjax.memory("h2o", rotated=4, **sizes)
    assert found.total == cache.nbytes and found.keys_values == 2 * 20 * 12 * 2
    whole = full_cache_bytes(model(), 100)
    assert whole == 100 * (12 * 4 + 4) + 4


def test_the_values_of_a_cache_are_latents_and_a_file_holds_them_once(tmp_path):
    expected, out = answered("h2o+caote")
    cache, (layer,) = out.cache, out.cache.layers
    live = np.asarray(layer.position)[0, 0] >= 0
    value = np.asarray(jax.jit(lambda layer: layer.value)(layer))[0, 0]
    at = np.asarray(layer.position)[0, 0, live]
    np.testing.assert_allclose(value[live], expected.value[0, 0, at], atol=1e-5)
    assert (value == 0).sum() >= live.sum() * SIZES.rotated
    kvjax.save_cache(tmp_path / "cache", cache, policy="h2o+caote")
    found = kvjax.load_cache(tmp_path / "cache")
    assert tiny.bytes_of(found) == tiny.bytes_of(cache) and found.layers[0].rotated == SIZES.rotated
    assert kvjax.cache_info(tmp_path / "cache")["full_cache_bytes"] == (PROMPT + 7) * (12 * 4 + 4) + 4


@matrix
def test_rows_on_a_mesh_and_in_a_batch_keep_what_they_keep_alone():
    mesh = models.parse_mesh("data=2")
    settings = dict(policy="h2o@model", budget=12, block=8)
    tokens = np.stack([TOKENS, TOKENS[::-1]]) % 64
    split, _ = models.prefill(models.load(GOLDEN / "deepseek_v3", mesh=mesh)[0], tokens, **settings)
    whole, _ = models.prefill(models.load(GOLDEN / "deepseek_v3")[0], tokens, **settings)
    np.testing.assert_array_equal(tiny.kept_tokens(split), tiny.kept_tokens(whole))
    row, _ = models.prefill(model(), TOKENS[None, :PROMPT], policy="h2o", **SETTINGS)
    batch = jax.jit(kvjax.join)(kvjax.repeat(row, 2), 1, row)
    assert tiny.held(batch, 1) == tiny.held(row)


def test_output_projections_are_those_behind_the_latents():
    whole = latent.output(CONFIG, {name: np.asarray(array, np.float64) for name, array in weights().items()})[0]
    (found,) = models.output_projection(model(), "laprox(window=4,gqa='group')")
    np.testing.assert_allclose(found.gram[0], whole @ whole.swapaxes(1, 2), atol=1e-4)
    (found,) = models.output_projection(model(), "laprox(window=4)")
    np.testing.assert_allclose(found.joint[0], whole.sum(0) @ whole.sum(0).T, atol=1e-3)


RAW = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in ("deepseek_v2", "deepseek_v3")}


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "only FP8 in blocks, and gpt-oss's MXFP4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc' is supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; only 4 is supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        ("deepseek_v3", {"n_group": 3}, "8 experts do not make 3 groups of at least two; give a divisor"),
        ("deepseek_v3", {"topk_group": 5}, "5 groups of experts per token were given; there are 4"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "experts_per_token is 3, but a token's groups"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "the latent's size is 0; give an integer from 1"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "the latent has 8 and 5 rotated numbers; give even sizes"),
        ("deepseek_v3", {"q_lora_rank": "no"}, "q_lora_rank is 'no'; expected"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; only False is supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "expected 'greedy' or 'group_limited_greedy'"),
        ("deepseek_v2", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be a number above 0"),
    ],
)
def test_a_config_that_is_almost_right_is_refused_in_one_sentence(name, fields, sentence):
    with pytest.raises(ValueError) as said:
        from_hugging_face(RAW[name] | fields)
    assert sentence in str(said.value) and str(said.value).endswith(".") and ". " not in str(said.value)


def test_fields_that_are_left_out_are_those_of_transformers():
    fields = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "rope_interleave")
    left = {name: value for name, value in RAW["deepseek_v3"].items() if name not in fields}
    assert from_hugging_face(left).latent == Latent(512, 64, 128, 128, 1536)
    assert from_hugging_face(left | {"q_lora_rank": None}).latent.query == 0


def test_layers_that_predict_later_tokens_are_not_read(tmp_path):
    tensors = load_file(GOLDEN / "deepseek_v3" / "model.safetensors")
    more = {f"model.layers.3.{name}": np.zeros((2, 2), np.float32) for name in ("eh_proj.weight", "mlp.gate.weight")}
    save_file(tensors | more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(RAW["deepseek_v3"] | {"num_nextn_predict_layers": 1}))
    assert models.load(tmp_path)[0].config.num_layers == 3
    shutil.copy(GOLDEN / "deepseek_v3" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.3.eh_proj.weight, which its config.json does not have"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(policy="sage(heads='query')"), "they share one latent per token; take heads='group'"),
        (dict(policy="h2o+merge"), "'h2o.merge' changes the values that stay, but a latent is its own key"),
        (dict(policy="h2o", cache_dtype=("int8", "float32")), "of latents they are the same numbers; give one dtype"),
    ],
)
def test_what_latents_cannot_have_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        models.prefill(model(), TOKENS[None], budget=16, **options)


@pytest.mark.parametrize("rotated", [-2, 3, 12])
def test_a_cache_of_latents_has_pairs_of_rotated_numbers(rotated):
    with pytest.raises(ValueError, match=f"rotated is {rotated}"):
        kvjax.empty_cache("h2o", kv_heads=1, head_dim=12, budget=4, rotated=rotated)


def test_a_cache_beyond_what_an_indexer_chooses_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "glm_moe_dsa" / name, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"index_topk": 16}))
    own, _ = models.load(tmp_path)
    assert (own.config.most_attended, own.config.architecture) == (16, "glm_moe_dsa")
    for settings in (dict(policy="h2o", budget=12, block=8), dict(policy="h2o", budget=8, when="prompt"), {}):
        with pytest.raises(ValueError, match=r"a head may hold \d+ tokens, but of more than 16 the model attends to"):
            models.prefill(own, TOKENS[None], **settings)
    with pytest.raises(ValueError, match="28 tokens were given, but beyond 16 the model's indexer chooses"):
        own(TOKENS[None])
    with pytest.raises(ValueError, match="the model's indexer was not read, so it cannot be saved"):
        models.save(tmp_path / "other", own)
    with pytest.raises(ValueError, match="index_topk is 'all'; it must be a positive integer"):
        from_hugging_face(raw | {"index_topk": "all"})


@matrix
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_those_of_the_best_groups(scores):
    routing = Routing(scores, groups=4, groups_per_token=2, multiplier=3.0)
    config = dataclasses.replace(CONFIG, num_experts=8, experts_per_token=3, normalise_experts=True, routing=routing)
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(1, 20, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    given = None if scores == "softmax" else jnp.asarray(bias)
    share, expert = jax.jit(_chosen, static_argnums=0)(config, jnp.asarray(logits), given)
    for t, row in enumerate(logits[0].astype(np.float64)):
        own = np.exp(row) / np.exp(row).sum() if scores == "softmax" else 1 / (1 + np.exp(-row))
        ranked = own if scores == "softmax" else own + bias
        of_groups = [sorted(ranked[2 * g : 2 * g + 2])[-1 if scores == "softmax" else -2 :] for g in range(4)]
        groups = np.argsort([-sum(best) for best in of_groups])[:2]
        chosen = sorted((e for e in range(8) if e // 2 in groups), key=lambda e: -ranked[e])[:3]
        assert np.asarray(expert)[0, t].tolist() == chosen
        np.testing.assert_allclose(share[0, t], 3 * own[chosen] / own[chosen].sum(), rtol=1e-5)
