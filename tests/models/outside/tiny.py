"""One tiny decoder, as ours and as other packages' models, and what each of them said of the same prompts.

``python -m tests.models.outside.tiny PACKAGE`` runs the package, from an environment that has it, and writes what it
said to recorded.json. A package has an environment of its own, which ``make outside-gemma``, ``outside-tunix`` or
``outside-keras`` makes.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from models.config import Config, Rope
from models.parameters import join_weights, parameter_shapes

RECORDED = Path(__file__).with_name("recorded.json")
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/other-decoders.md"
VERSIONS = {"gemma": "4.0.1", "google-tunix": "0.1.7", "keras-hub": "0.32.0"}
LENGTH, NEW, BLOCK, BUDGET, ALL = 64, 12, 16, 24, 128
SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CONFIGS = {
    "gemma": Config(
        **SIZES, norms="both", norm_offset=True, query_key_norm=True, activation="gelu_tanh", tie_embeddings=True,
        sliding_windows=(24, None), attention_soft_cap=50.0, logits_soft_cap=30.0, embedding_multiplier=8.0,
    ),
    "google-tunix": Config(**SIZES, rope=Rope(theta=1_000_000.0)),  # the base of all its Llamas
    "keras-hub": Config(**SIZES, norm_epsilon=1e-5),
}  # fmt: skip
PROMPTS = np.random.default_rng(0).integers(110, 128, (2, LENGTH))


def parameters(name: str) -> dict[str, np.ndarray]:
    """The weights of a package's tiny model, by the names of models/parameters.py."""
    config, rng, made = CONFIGS[name], np.random.default_rng(1), {}
    for own, shape in sorted(parameter_shapes(config).items()):
        drawn = rng.normal(size=shape).astype(np.float32)
        made[own] = 0.1 * drawn + (not config.norm_offset) if own.endswith("norm") else drawn / 3
    made["embedding"] *= 0.03 if config.tie_embeddings else 0.3  # else each token is followed by itself
    return made


def ours(name: str, policy: str | None, budget: int) -> list[list[int]]:
    """The tokens of our decoder; gemma and keras-hub feed a prompt's last token as the first step of the answer."""
    config = CONFIGS[name]
    model = models.Decoder(config, join_weights(config, {k: jnp.asarray(v) for k, v in parameters(name).items()}))
    how: Any = dict(policy=policy, budget=budget if policy else None, block=BLOCK)
    if name == "google-tunix":
        return models.generate(model, PROMPTS, max_new_tokens=NEW, end=(), **how).tokens.tolist()
    cache, _ = models.prefill(model, PROMPTS[:, :-1], reserve=NEW + 1, **how)
    return models.generate(model, PROMPTS[:, -1:], cache=cache, max_new_tokens=NEW, end=(), **how).tokens.tolist()


def run_block(heading: str, names: dict[str, Any]) -> Any:
    """Run a section's code block of the page with these names, add its own to them, and return what it ends in."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```py\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    *body, last = ast.parse(block).body
    ends = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if ends else [*body, last], []), PAGE.name, "exec"), names)
    return eval(compile(ast.Expression(last.value), PAGE.name, "eval"), names) if ends else None


class Words:
    """A tokenizer whose words are the numbers of tokens; it passes over all other words."""

    VERSION, FORBIDDEN_TOKENS = 0, ()

    def encode(self, text: str, add_bos: bool = False, **_: Any) -> list[int]:
        return [int(word) for word in re.findall(r"\d+", text)]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(number)) for number in ids)

    def bos_id(self) -> int:
        return 0  # none is put first

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def texts() -> list[str]:
    return [Words().decode(row) for row in PROMPTS]


def gemma_model() -> tuple[Any, Any]:
    """The model of gemma, and its parameters."""
    from gemma import gm
    from gemma.gm.nn import config as configs

    config, p = CONFIGS["gemma"], {k.removeprefix("layers."): v for k, v in parameters("gemma").items()}
    kinds = configs.AttentionType.LOCAL_SLIDING, configs.AttentionType.GLOBAL
    shape = configs.TransformerConfig(
        num_embed=128, embed_dim=64, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, attention_types=kinds,
        final_logit_softcap=30.0, attn_logits_soft_cap=50.0, sliding_window_size=24, use_qk_norm=True,
        use_post_attn_norm=True, use_post_ffw_norm=True,
    )  # fmt: skip
    tree: Any = {"embedder": {"input_embedding": p["embedding"]}, "final_norm": {"scale": p["norm"]}}
    for i in range(config.num_layers):
        attention = {
            "q_einsum": {"w": p["query"][i].swapaxes(0, 1)},
            "kv_einsum": {"w": np.stack([p["key"][i], p["value"][i]]).swapaxes(1, 2)},
            "attn_vec_einsum": {"w": p["output"][i].reshape(4, 16, 64)},
            "_query_norm": {"scale": p["query_norm"][i]},
            "_key_norm": {"scale": p["key_norm"][i]},
        }
        tree[f"layer_{i}"] = {
            "attn": attention,
            "mlp": {"gating_einsum": np.stack([p["gate"][i], p["up"][i]]), "linear": p["down"][i]},
            "pre_attention_norm": {"scale": p["attention_norm"][i]},
            "post_attention_norm": {"scale": p["attention_post_norm"][i]},
            "pre_ffw_norm": {"scale": p["feed_norm"][i]},
            "post_ffw_norm": {"scale": p["feed_post_norm"][i]},
        }
    return gm.nn.Transformer(config=shape, tokens="tokens", dtype=jnp.float32), jax.tree.map(jnp.asarray, tree)


def gemma_4_model() -> tuple[Any, Any]:
    """A Gemma 4 of gemma, and its parameters, drawn at random."""
    from gemma.gm.nn.gemma4 import _config, _modules, _transformer

    class Four(_transformer.Transformer):
        INFO = _transformer.ModelInfo(tokenizer_version=4)  # by which ChatSampler takes Gemma4Sampler

    kinds = (_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL)
    shape = _config.TransformerConfig(
        num_embed=128, embed_dim=64, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, attention_types=kinds,
        final_logit_softcap=30.0, use_post_attn_norm=True, use_post_ffw_norm=True, sliding_window_size=24,
        global_key_size=32, num_global_kv_heads=1, k_eq_v_global=True, global_rope_proportion=0.25,
        local_rope_proportion=1.0,
    )  # fmt: skip
    model = Four(config=shape, tokens="tokens", dtype=jnp.float32)
    params = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))["params"]
    drawn = iter(range(100, 200))
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(next(drawn)), x.shape) / 3, params)
    embedder = jax.tree.map(lambda x: 0.1 * x, params["embedder"])  # else each token is followed by itself
    return model, params | dict(embedder=embedder)


def gemma_words() -> Any:
    """The tokenizer as gemma's samplers know one."""
    from gemma import gm

    class Numbers(Words):
        FORMAT, special_tokens = gm.testing.DummyTokenizer().FORMAT, gm.testing.DummyTokenizer.special_tokens

    return Numbers()


def gemma_sampler(model: Any, params: Any, length: int = 128) -> Any:
    """gemma's sampler."""
    from gemma import gm

    how: Any = dict(tokenizer=gemma_words(), cache_length=length, max_out_length=NEW, pad_length=None)
    return gm.text.Sampler(model=model, params=params, **how)


def gemma_tokens(model: Any, params: Any, prompts: list[str], length: int = 128) -> tuple[list[list[int]], Any]:
    """The tokens that gemma's sampler makes, and its last state."""
    sampler = gemma_sampler(model, params, length)
    out = sampler.sample(prompts, return_state=True)
    return out.tokens.tolist(), out.state


def tunix_model() -> Any:
    """The model of Tunix."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    p = {k.removeprefix("layers."): jnp.asarray(v) for k, v in parameters("google-tunix").items()}
    shape = llama3.ModelConfig(
        num_layers=2, vocab_size=128, embed_dim=64, hidden_dim=64, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=1_000_000, norm_eps=1e-6,
    )  # fmt: skip
    model = llama3.Llama3(shape, rngs=nnx.Rngs(0))
    model.embedder.input_embedding[...], model.final_norm.w[...] = p["embedding"], p["norm"]
    model.lm_head.w[...] = p["head"]
    for i, layer in enumerate(model.layers):
        layer.input_layernorm.w[...], layer.post_attention_layernorm.w[...] = p["attention_norm"][i], p["feed_norm"][i]
        for own, name in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            getattr(layer.attn, own).w[...] = p[name][i]
        layer.attn.o_proj.w[...] = p["output"][i].reshape(4, 16, 64)
        for name in ("gate", "up", "down"):
            getattr(layer.mlp, f"{name}_proj").kernel[...] = p[name][i]
    return model


def tunix_tokens(model: Any, prompts: list[str], size: int = 128, **how: Any) -> list[list[int]]:
    """The tokens that Tunix' sampler makes."""
    from tunix.generate.sampler import CacheConfig, Sampler

    sampler = Sampler(model, Words(), CacheConfig(size, 2, 2, 16))
    out = sampler(prompts, NEW, max_prompt_length=LENGTH, eos_tokens=[500], forbidden_tokens=[0], **how)
    return [row.tolist() for row in out.tokens]


def keras_model() -> Any:
    """The model of keras-hub."""
    import keras_hub

    p = {k.removeprefix("layers."): v for k, v in parameters("keras-hub").items()}
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64,
        intermediate_dim=64, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    backbone.token_embedding.embeddings.assign(p["embedding"])
    backbone.token_embedding.reverse_embeddings.assign(p["head"])
    backbone.layer_norm.scale.assign(p["norm"])
    for i, layer in enumerate(backbone.transformer_layers):
        attention = layer._self_attention_layer
        layer._self_attention_layernorm.scale.assign(p["attention_norm"][i])
        layer._feedforward_layernorm.scale.assign(p["feed_norm"][i])
        for own, name in (("query", "query"), ("key", "key"), ("value", "value")):
            getattr(attention, f"_{own}_dense").kernel.assign(p[name][i])
        attention._output_dense.kernel.assign(p["output"][i].reshape(4, 16, 64))
        for own, name in (("gate", "gate"), ("intermediate", "up"), ("output", "down")):
            getattr(layer, f"_feedforward_{own}_dense").kernel.assign(p[name][i])
    made = keras_hub.models.LlamaCausalLM(backbone=backbone)
    made.compile(sampler="greedy")
    return made


def keras_tokens(model: Any, lengths: tuple[int, int] = (LENGTH, LENGTH)) -> list[list[int]]:
    """The tokens that generate of keras-hub makes after prompts of these lengths."""
    mask = np.arange(LENGTH + NEW) < np.array(lengths)[:, None]
    tokens = np.where(mask, np.pad(PROMPTS, ((0, 0), (0, NEW))), 0)
    inputs = dict(token_ids=tokens, padding_mask=mask.astype(np.int32))
    if "Gemma3" in str(type(model).__mro__):  # whose generate needs a preprocessor
        out = model.make_generate_function()(inputs, stop_token_ids=None)
    else:
        out = model.generate(inputs, stop_token_ids=None)
    return np.asarray(out["token_ids"])[:, LENGTH:].tolist()


H2O = "h2o+caote+protect(recent=0)"
POLICIES = {"gemma": [H2O, "tova"], "google-tunix": [H2O, "tova", "snapkv(window=8)"]}
POLICIES["keras-hub"] = POLICIES["gemma"]


def said(package: str, policy: str | None, budget: int) -> list[list[int]]:
    """The tokens that a package makes, under a budget or, without a policy, as it is."""
    from models.outside import gemma, keras, tunix

    how: Any = dict(policy=policy, budget=budget, block=BLOCK)
    if package == "gemma":
        model, params = gemma_model()
        return gemma_tokens(gemma.under_budget(model, **how) if policy else model, params, texts())[0]
    if package == "google-tunix":
        model = tunix_model()
        return tunix_tokens(tunix.under_budget(model, **how) if policy else model, texts())
    model = keras_model()
    return keras_tokens(keras.under_budget(model, **how) if policy else model)


def record(package: str) -> None:
    """Write what a package says to recorded.json."""
    found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    tokens = {policy: said(package, policy, BUDGET) for policy in POLICIES[package]}
    found[package] = dict(version=VERSIONS[package], tokens={"full": said(package, None, ALL), **tokens})
    lines = json.dumps(found, indent=1, sort_keys=True)
    RECORDED.write_text(lines + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
