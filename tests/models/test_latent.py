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

import models
from models.config import Config, Latent, Rope, Routing
from models.config_json import from_hugging_face
from models.decoder import _chosen
from tests.models import reference, tiny
from tests.models.make_golden import GOLDEN
from tests.models.reference import latent
from tests.tiers import first, matrix

SIZES = Latent(size=8, rotated=4, plain=6, value=5, query=10)
CONFIG = Config(
    64, 16, 24, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=SIZES.head_dim, architecture="deepseek_v3",
    latent=SIZES, rope=Rope(theta=100.0, partial_rotary_factor=SIZES.rotated / SIZES.head_dim), max_positions=64,
    attention_multiplier=10**-0.5,
)  # fmt: skip
TOKENS = np.random.default_rng(0).permutation(64)[:28]
PROMPT, SETTINGS = 20, dict(budget=9, block=6)
POLICIES = first(
    2,
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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_latents_keeps_what_the_definition_does_and_attends_without_absorption_as_with_it(policy):
    found = reference.run(weights(), CONFIG, TOKENS[:PROMPT], policy=reference.policy(policy), new_tokens=8, **SETTINGS)
    out = models.generate(model(), TOKENS[None, :PROMPT], policy=policy, max_new_tokens=8, end=(), **SETTINGS)
    tiny.assert_keeps(out.cache, 0, found)
    assert out.tokens[0].tolist() == found.tokens
    fed = np.array([*TOKENS[:PROMPT], *found.tokens[:-1]])
    if "positions" not in policy:  # turned keys are at other places than the text's
        np.testing.assert_allclose(latent.logits(weights(), CONFIG, fed, found.seen), found.logits, atol=1e-9)


def test_output_projections_are_those_behind_the_latents():
    whole = latent.output(CONFIG, {name: np.asarray(array, np.float64) for name, array in weights().items()})[0]
    (found,) = models.output_projection(model(), "laprox(window=4)")
    np.testing.assert_allclose(found.gram[0], whole @ whole.swapaxes(1, 2), atol=1e-4)


RAW = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in ("deepseek_v2", "deepseek_v3")}


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "convert the weights to bfloat16 first"),
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


def test_a_cache_for_each_query_head_is_refused():
    with pytest.raises(ValueError, match="share one latent per token; take heads='group'"):
        models.prefill(model(), TOKENS[None], policy="sage(heads='query')", budget=16)


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
