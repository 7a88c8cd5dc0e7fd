"""GGUF files of families whose tensors llama.cpp changes: the tests' tiny checkpoints, converted as its converter does.

What is written here follows that converter, not the reader: names are a table, and each change is its definition.
"""

import dataclasses
import json
import math
import re
import statistics
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.loading import describe
from tests.models.make_golden import GOLDEN, NEAR
from tests.models.test_gguf import put, refused, write
from tests.models.test_loading import assert_same, parameters
from tests.tiers import first

# Of each layer, without their endings; "#" is the layer.
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.k_b": "attn_k_b", "self_attn.v_b": "attn_v_b",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_a": "ssm_alpha",
    "mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias", "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm", "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router.layer": "ffn_gate_inp", "block_sparse_moe.output_linear": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_exps", "block_sparse_moe.up": "ffn_up_exps",
    "layer_scalar": "layer_output_scale.weight", "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj", "per_layer_input_gate": "inp_gate",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj",
    "altup.correction_coefs": "altup_correct_coef", "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.prediction_coefs": "altup_predict_coef", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm", "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm", "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
}  # fmt: skip


def read(name):
    """The config and the tensors of a language model, its experts stacked."""
    raw, tensors = (
        json.loads((GOLDEN / name / "config.json").read_text()),
        load_file(GOLDEN / name / "model.safetensors"),
    )
    raw = raw.get("text_config", raw)
    tensors = {key.replace("model.language_model.", "model."): array for key, array in tensors.items()}
    found = {key: array for key, array in tensors.items() if not re.search(r"\.visual\.|experts\.\d", key)}
    for key in [key for key in tensors if ".experts.0." in key]:
        each = [key.replace(".experts.0.", f".experts.{x}.") for x in range(len(tensors))]
        found[key.replace(".experts.0.", ".experts.")] = np.stack([tensors[one] for one in each if one in tensors])
    return raw, found


def named(tensors, own):
    """Tensors by llama.cpp's names."""
    names, found = NAMES | own, {}
    for key, array in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", key)
        short = key[layer.end() :] if layer else key
        base, _, kind = short.rpartition(".")
        found[(f"blk.{layer[1]}." if layer else "") + (names.get(short) or f"{names[base]}.{kind}")] = array
    return found


def common(raw, architecture, **own):
    """The keys that every file has, and those of one."""
    rope = raw["rope_parameters"]
    keys = {
        "block_count": raw["num_hidden_layers"], "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"], "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"], "vocab_size": raw["vocab_size"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"], "rope.freq_base": rope.get("rope_theta"),
        "feed_forward_length": raw.get("intermediate_size"),
    }  # fmt: skip
    if rope.get("rope_type") == "yarn":
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }  # fmt: skip
    ids = {"bos": raw["bos_token_id"], "eos": raw["eos_token_id"], "padding": raw["pad_token_id"]}
    return (
        {"general.architecture": architecture}
        | {f"{architecture}.{key}": value for key, value in (keys | own).items()}
        | {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()}
    )


def experts(raw, number):
    return {
        "expert_count": number, "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
    }  # fmt: skip


def deepseek(name, old=False, architecture="deepseek2"):
    raw, tensors = read(name)
    latent, rotated, plain, value = (
        raw[f"{part}"] for part in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    keys = experts(raw, raw["n_routed_experts"]) | {
        "leading_dense_block_count": raw.get("first_k_dense_replace", 1), "attention.kv_lora_rank": latent,
        "expert_shared_count": raw["n_shared_experts"], "expert_weights_scale": raw["routed_scaling_factor"],
        "rope.dimension_count": rotated, "expert_group_count": raw["n_group"],
        "expert_group_used_count": raw["topk_group"], "attention.q_lora_rank": raw["q_lora_rank"],
        "attention.key_length": plain + rotated if old else latent + rotated,
        "attention.value_length": value if old else latent,
    }  # fmt: skip
    if raw["norm_topk_prob"]:
        keys["expert_weights_norm"] = True
    if raw["model_type"] != "deepseek_v2":
        keys["expert_gating_func"] = 2
    if "mscale_all_dim" in raw["rope_parameters"]:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * raw["rope_parameters"]["mscale_all_dim"]
    if not old:
        keys |= {
            "attention.head_count_kv": 1, "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
        }  # fmt: skip
        for key in [key for key in tensors if "kv_b_proj" in key]:
            heads = tensors.pop(key).reshape(-1, plain + value, latent)
            tensors[key.replace("kv_b_proj", "k_b")] = np.ascontiguousarray(heads[:, :plain].transpose(0, 2, 1))
            tensors[key.replace("kv_b_proj", "v_b")] = np.ascontiguousarray(heads[:, plain:])
    if "index_topk" in raw:
        keys |= {
            "attention.indexer.head_count": raw["index_n_heads"], "attention.indexer.top_k": raw["index_topk"],
            "attention.indexer.key_length": raw["index_head_dim"],
        }  # fmt: skip
    if "indexer_types" in raw:
        keys["attention.indexer.types"] = [int(kind == "full") for kind in raw["indexer_types"]]
    indexer = dict(k_norm="k_norm", weights_proj="proj", wk="attn_k", wq_b="attn_q_b")
    own = {f"self_attn.indexer.{theirs}": f"indexer.{ours}" for theirs, ours in indexer.items()}
    return common(raw, architecture, **keys), named(tensors, own)


def in_turns(array, key_heads, size, axis=0):
    """Value heads, each of so many numbers along an axis: the first of every key head, then the second of every one."""
    array = np.moveaxis(array, axis, 0)
    each = len(array) // size // key_heads
    heads = [array[(key * each + own) * size :][:size] for own in range(each) for key in range(key_heads)]
    return np.moveaxis(np.concatenate(heads), 0, axis)


def delta_net(name, architecture, old=False):
    raw, tensors = read(name)
    heads, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    D, W = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
    keys = {
        "ssm.conv_kernel": raw["linear_conv_kernel_dim"], "ssm.state_size": D, "ssm.group_count": heads,
        "ssm.time_step_rank": values, "ssm.inner_size": W * values,
        "full_attention_interval": raw["layer_types"].index("full_attention") + 1,
        "attention.key_length": raw["head_dim"], "attention.value_length": raw["head_dim"],
        "rope.dimension_count": int(raw["head_dim"] * raw["rope_parameters"]["partial_rotary_factor"]),
    }  # fmt: skip
    if "num_experts" in raw:
        keys |= experts(raw, raw["num_experts"])
        keys["expert_shared_feed_forward_length"] = raw["shared_expert_intermediate_size"]
    for key, array in list(tensors.items()):
        part = key.rsplit("linear_attn.", 1)[-1]
        if key.endswith("norm.weight") and part != "norm.weight":
            tensors[key] = array + 1
        elif part == "A_log":
            tensors[key] = -np.exp(array)
        elif part == "conv1d.weight":
            tensors[key] = array[:, 0]
        elif part == "in_proj_qkvz.weight" and not old:
            rows = tensors.pop(key).reshape(heads, -1, array.shape[-1])
            query, key_, value, gate = np.split(rows, np.cumsum([D, D, W * values // heads]), axis=1)
            joined = np.concatenate([part.reshape(-1, array.shape[-1]) for part in (query, key_, value)])
            tensors |= {key.replace("qkvz", "qkv"): joined, key.replace("qkvz", "z"): gate.reshape(-1, array.shape[-1])}
    if architecture != "qwen3next":  # keys come before the values that have turns
        keys["rope.dimension_sections"] = [*raw["rope_parameters"]["mrope_section"], 0]
        first = 2 * heads * D
        for key, array in tensors.items():
            part = key.rsplit("linear_attn.", 1)[-1]
            if part in ("in_proj_qkv.weight", "conv1d.weight"):
                tensors[key] = np.concatenate([array[:first], in_turns(array[first:], heads, W)])
            elif part == "in_proj_z.weight":
                tensors[key] = in_turns(array, heads, W)
            elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
                tensors[key] = in_turns(array, heads, 1)
            elif part == "out_proj.weight":
                tensors[key] = in_turns(tensors[key], heads, W, axis=1)
    return common(raw, architecture, **keys), named(tensors, {"post_attention_layernorm": "post_attention_norm"})


def neighbours(array, heads):
    """The rows of heads with element i beside element i + D / 2."""
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def granite(raw, tensors, architecture):
    recurrent = [kind in ("linear_attention", "mamba") for kind in raw["layer_types"]]
    heads, groups = raw["num_key_value_heads"], raw["mamba_n_groups"]
    keys = {
        "attention.scale": raw["attention_multiplier"], "embedding_scale": raw["embedding_multiplier"],
        "residual_scale": raw["residual_multiplier"], "logit_scale": raw["logits_scaling"],
        "attention.head_count_kv": [0 if without else heads for without in recurrent],
        "rope.scaling.finetuned": not any(recurrent), "ssm.conv_kernel": raw["mamba_d_conv"],
        "ssm.state_size": raw["mamba_d_state"], "ssm.group_count": groups, "ssm.time_step_rank": raw["mamba_n_heads"],
        "ssm.inner_size": raw["mamba_n_heads"] * raw["mamba_d_head"], "expert_count": raw["num_local_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_shared_feed_forward_length": raw["shared_intermediate_size"],
    }  # fmt: skip
    if not raw["num_local_experts"]:
        keys["feed_forward_length"] = raw["shared_intermediate_size"]
    found = {}
    for key, array in tensors.items():
        part = key.rsplit("mamba.", 1)[-1]
        if part == "A_log":
            array = -np.exp(array)
        if part in ("A_log", "D"):
            array = array[:, None]
        elif part == "conv1d.weight":
            array = array[:, 0]
        elif part == "norm.weight":
            array = array.reshape(groups, -1)
        elif "q_proj" in key or "k_proj" in key:
            array = neighbours(array, raw["num_attention_heads"] if "q_proj" in key else heads)
        if "input_linear" in key:
            for half, name in zip(np.split(array, 2, axis=-2), ("gate", "up"), strict=True):
                found[key.replace("input_linear", name)] = half
        else:
            found[key] = array
    shared = "_shexp" if raw["num_local_experts"] else ""
    own = {f"shared_mlp.{part}": f"ffn_{part}{shared}" for part in ("gate", "up")}
    own["shared_mlp.output_linear"] = f"ffn_down{shared}"
    return common(raw, architecture, **keys), named(found, own)


def gemma4(name):
    raw, tensors = read(name)
    windowed = [kind == "sliding_attention" for kind in raw["layer_types"]]
    whole, rope = raw["per_layer_config"][str(windowed.index(False))], raw["rope_parameters"]
    dims, size, shared = (whole["head_dim"], raw["head_dim"]), raw["intermediate_size"], raw["num_kv_shared_layers"]
    heads = raw["num_key_value_heads"], whole.get("num_key_value_heads")
    keys = {
        "attention.sliding_window": raw["sliding_window"], "attention.sliding_window_pattern": windowed,
        "attention.key_length": dims[0], "attention.value_length": dims[0], "attention.key_length_swa": dims[1],
        "attention.value_length_swa": dims[1], "rope.dimension_count": dims[0], "rope.dimension_count_swa": dims[1],
        "attention.shared_kv_layers": shared, "final_logit_softcapping": raw["final_logit_softcapping"],
        "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    if heads[1] is not None:
        keys["attention.head_count_kv"] = [heads[0] if has else heads[1] for has in windowed]
    if raw["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [size] * (len(windowed) - shared) + [2 * size] * shared
    if raw["enable_moe_block"]:
        keys |= experts(raw | {"num_experts_per_tok": raw["top_k_experts"]}, raw["num_experts"])
    pairs = dims[0] // 2
    rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
    stored = named(tensors, {"post_attention_layernorm": "post_attention_norm"})
    stored["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)
    return common(raw, "gemma4", **keys), stored


def gemma3n(name="gemma3n"):
    """Also the checkpoint with a layer's input of every token, as a GGUF file has it: the others have the first's."""
    raw, tensors = read(name)
    windowed, rope = [kind == "sliding_attention" for kind in raw["layer_types"]], raw["rope_parameters"]
    inputs = tensors["model.embed_tokens_per_layer.weight"]
    more = np.repeat(inputs[:1], raw["vocab_size"] - len(inputs), axis=0)
    tensors["model.embed_tokens_per_layer.weight"] = np.concatenate([inputs, more])
    stored = {key: array for key, array in tensors.items() if "model.altup_" not in key}
    for part in ("altup_projections", "altup_unembed_projections"):
        each = [f"model.{part}.{stream}.weight" for stream in range(raw["altup_num_inputs"] - 1)]
        stored[f"model.{part}.weight"] = np.stack([tensors[one] for one in each])
    keys = {
        "attention.sliding_window": raw["sliding_window"], "attention.sliding_window_pattern": windowed,
        "attention.key_length": raw["head_dim"], "attention.value_length": raw["head_dim"],
        "attention.shared_kv_layers": raw["num_kv_shared_layers"], "altup.active_idx": raw["altup_active_idx"],
        "altup.num_inputs": raw["altup_num_inputs"], "final_logit_softcapping": raw["final_logit_softcapping"],
        "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    shares, beyond = raw["activation_sparsity_pattern"], statistics.NormalDist().inv_cdf
    keys["activation_sparsity_scale"] = [beyond(share) if share else -math.inf for share in shares]
    named_so = named(stored, {"post_attention_layernorm": "post_attention_norm"})
    return raw | {"vocab_size_per_layer_input": raw["vocab_size"]}, tensors, common(raw, "gemma3n", **keys), named_so


CASES = {
    "deepseek_v3": lambda: deepseek("deepseek_v3"),
    "deepseek_v2": lambda: deepseek("deepseek_v2"),
    "deepseek_v2, as old files": lambda: deepseek("deepseek_v2", old=True),
    "deepseek_v2_lite": lambda: deepseek("deepseek_v2_lite"),
    "glm4_moe_lite": lambda: deepseek("glm4_moe_lite"),
    "deepseek_v32": lambda: deepseek("deepseek_v32", architecture="deepseek32"),
    "glm_moe_dsa": lambda: deepseek("glm_moe_dsa", architecture="glm-dsa"),
    "qwen3_next": lambda: delta_net("qwen3_next", "qwen3next"),
    "qwen3_next, as old files": lambda: delta_net("qwen3_next", "qwen3next", old=True),
    "qwen3_5": lambda: delta_net("qwen3_5", "qwen35"),
    "qwen3_5_text": lambda: delta_net("qwen3_5_text", "qwen35"),
    "qwen3_5_moe": lambda: delta_net("qwen3_5_moe", "qwen35moe"),
    "granite4_h": lambda: granite(*read("granite4_h"), "granitehybrid"),
    "granite4_h_moe": lambda: granite(*read("granite4_h_moe"), "granitehybrid"),
    "granite4": lambda: granite(*read("granite4"), "granite"),
    "gemma4": lambda: gemma4("gemma4"),
    "gemma4_e": lambda: gemma4("gemma4_e"),
    "gemma4_moe": lambda: gemma4("gemma4_moe"),
}


@pytest.fixture
def made(tmp_path):
    def make(case, keys=None, change=lambda tensors: None):
        own, tensors = gemma3n()[2:] if case == "gemma3n" else CASES[case]()
        change(tensors)
        return write(tmp_path / "model.gguf", own | (keys or {}), tensors)

    return make


@pytest.mark.parametrize("case", CASES)
def test_the_model_of_a_file_is_that_of_the_folder_it_was_made_from(case, made, monkeypatch):
    expected, _ = models.load(GOLDEN / case.split(",")[0])
    monkeypatch.setattr(sys.modules["models.mesh"], "CHUNK_BYTES", 200)  # ends within a head
    found, _ = models.load(made(case))
    assert dataclasses.replace(found.config, architecture=expected.config.architecture) == expected.config
    arrays = parameters(expected)
    for name, array in parameters(found).items():  # numbers that llama.cpp stores changed are rounded twice
        np.testing.assert_allclose(array, arrays.pop(name), atol=2e-6, err_msg=name)
    assert not arrays


@pytest.mark.parametrize("case", first(1, [*CASES, "gemma3n"]))
def test_the_logits_of_a_file_are_those_of_transformers(case, made):
    name = case.split(",")[0]
    golden, (model, _) = np.load(GOLDEN / name / "golden.npz"), models.load(made(case))
    found = jax.jit(lambda model, tokens: model(tokens))(model, golden["tokens_0"])
    np.testing.assert_allclose(found, golden["logits_0"], atol=NEAR[name], rtol=0)


def granite_moe(shared):
    """Granite 4's one layer with attention and experts, alone and rotated; also without the network of all tokens."""
    raw, tensors = read("granite4_h_moe")
    raw |= {"num_hidden_layers": 1, "layer_types": ["attention"], "position_embedding_type": "rope"}
    kept = {
        key.replace("layers.1.", "layers.0."): array
        for key, array in tensors.items()
        if not re.search(r"layers\.[02]\.", key) and (shared or "shared_mlp" not in key)
    }
    if not shared:
        raw |= {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "shared_intermediate_size": 0}
    return raw, kept, *granite(raw, kept, "granitemoe")


@pytest.mark.parametrize("build", [lambda: granite_moe(True), lambda: granite_moe(False), gemma3n])
def test_the_model_of_a_file_is_that_of_a_folder_that_is_no_fixture(build, tmp_path):
    raw, tensors, keys, stored = build()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (found, _), (expected, _) = models.load(write(tmp_path / "model.gguf", keys, stored)), models.load(tmp_path)
    assert found.config == expected.config and found.config.shared_size == raw.get("shared_intermediate_size", 0)
    assert_same(found, expected)


def test_layers_that_only_predict_later_tokens_are_not_read(made):
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    more = {"blk.4.attn_norm.weight": np.ones(16), "blk.4.nextn.eh_proj.weight": np.ones((16, 32))}
    assert describe(made("qwen3_5", keys, put(more)))[0] == describe(GOLDEN / "qwen3_5")[0]


WRONG = {
    "gemma3n": [({"blk.0.laurel_l.weight": None}, "its keys cannot be read (KeyError: 'blk.0.laurel_l.weight')")],
    "deepseek_v32": [({"deepseek32.attention.indexer.top_k": 2.5}, "index_topk is 2.5")],
    "deepseek_v3": [
        ({"deepseek2.expert_gating_func": 3}, "gating is 3; expected 1 (softmax) or 2 (sigmoid). In the file it is"),
        ({"deepseek2.expert_count": 0}, "lacks the key deepseek2.expert_count"),
        ({"deepseek2.attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
        ({"blk.1.attn_v_b.weight": np.ones((4, 5, 7))}, "attn_k_b.weight and blk.1.attn_v_b.weight are not a key and"),
        ({"blk.1.exp_probs_b.bias": None}, "lacks the tensor blk.1.exp_probs_b.bias"),
    ],
    "qwen3_next": [
        ({"qwen3next.ssm.inner_size": None}, "lacks the key qwen3next.ssm.inner_size"),
        (
            {"blk.1.attn_qkv.weight": np.ones((80, 16))},
            "attn_qkv.weight has shape (80, 16); its config requires (88, 16)",
        ),
        ({"blk.1.ssm_a": np.ones(4)}, "blk.1.ssm_a holds NaN or infinite numbers"),
    ],
    "qwen3_5": [
        ({"qwen35.ssm.group_count": 0}, "lacks the key qwen35.ssm.group_count"),
        ({"blk.0.attn_gate.weight": np.ones((30, 16))}, "shape (30, 16); its metadata requires (40, 16)"),
        ({"blk.4.attn_norm.weight": np.ones(16)}, "holds the tensor blk.4.attn_norm.weight"),
    ],
    "granite4_h": [
        ({"granitehybrid.ssm.state_size": None}, "lacks the key granitehybrid.ssm.state_size"),
        ({"granitehybrid.ssm.inner_size": 40}, "mamba_n_heads * mamba_d_head is 40"),
        ({"granitehybrid.attention.head_count": [4, 4, 2, 4]}, "differs from layer to layer"),
    ],
    "gemma4": [
        ({"gemma4.attention.sliding_window_pattern": None}, "layers with a sliding window are not named"),
        ({"gemma4.attention.value_length_swa": 4}, "or their heads are not of one size"),
        ({"gemma4.attention.head_count_kv": None}, "its keys cannot be read (KeyError: 'kv_heads'); convert it again."),
        ({"gemma4.attention.key_length_swa": None}, "lacks the key gemma4.attention.key_length_swa"),
        ({"gemma4.attention.sliding_window_pattern": [False, True] * 2}, "per_layer_config must give the layers"),
        ({"rope_freqs.weight": None}, "lacks the tensor rope_freqs.weight"),
        ({"blk.0.attn_v.weight": None}, "lacks the tensor blk.0.attn_v.weight"),
    ],
    "gemma4_e": [
        (
            {"blk.5.attn_k.weight": np.ones((16, 16)), "blk.6.attn_k.weight": np.ones(2)},
            "the tensor blk.6.attn_k.weight",
        ),
    ],
    "deepseek_v2": [({"deepseek2.expert_weights_norm": True}, "norm_topk_prob is True; only False is supported")],
}


@pytest.mark.parametrize(("case", "changed", "said"), [(case, *wrong) for case in WRONG for wrong in WRONG[case]])
def test_what_is_almost_right_is_refused(case, changed, said, made):
    keys = {key: value for key, value in changed.items() if not key.startswith(("blk", "rope_freqs"))}
    refused(made(case, keys, put({key: value for key, value in changed.items() if key not in keys})), said)
