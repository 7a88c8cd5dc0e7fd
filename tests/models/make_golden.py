"""Makes tests/models/golden: tiny random models as transformers saves them, with the logits it computes.

Run in an environment of its own, Python 3.11 with torch 2.13 (CPU) and transformers 5.2, from the repository's root:

    python tests/models/make_golden.py            # all of them
    python tests/models/make_golden.py granite    # only some

Each folder holds config.json, model.safetensors and golden.npz (tokens_0, logits_0, ...; one row each, because
transformers scales "dynamic" by the longest row of a batch). Weights are wide, so that attention is far from uniform,
and norms and biases are random, so that a missed one shows. Two folders hold tokenizers and what they make of texts.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
TINY = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, initializer_range=0.25,
)  # fmt: skip
# Two heads of 16: eight rotation frequencies, enough to lie on both sides of what each scaling bends.
WIDE = TINY | dict(num_attention_heads=2, num_key_value_heads=1)
MOE = TINY | dict(hidden_size=16, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
SLIDING = dict(use_sliding_window=True, sliding_window=16)
PADDED = dict(pad_token_id=0)


def rope(kind: str = "default", theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type=kind, rope_theta=theta, **more)}


YARN = dict(kind="yarn", factor=4.0, original_max_position_embeddings=64)
YARN_WIDE = YARN | dict(beta_fast=8.0, beta_slow=1.0)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LONGROPE = dict(short_factor=[1.0, 1.1, 1.3, 1.4, 1.6, 1.9], long_factor=[1.2, 1.7, 2.5, 3.1, 4.0, 6.0])
GEMMA3_ROPES = {
    "full_attention": dict(rope_type="linear", rope_theta=1_000_000.0, factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
}

# name -> (transformers' config class, its arguments)
ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", TINY | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3": ("LlamaConfig", TINY | dict(rms_norm_eps=1e-5) | rope(theta=500_000.0)),
    "llama_tied": ("LlamaConfig", TINY | dict(tie_word_embeddings=True)),
    "llama_bias": ("LlamaConfig", TINY | dict(attention_bias=True)),
    "llama_linear": ("LlamaConfig", WIDE | rope("linear", factor=4.0)),
    "llama_dynamic": ("LlamaConfig", WIDE | dict(max_position_embeddings=32) | rope("dynamic", factor=4.0)),
    "llama_llama3": ("LlamaConfig", WIDE | rope("llama3", **LLAMA3)),
    "llama_yarn": ("LlamaConfig", WIDE | rope(**YARN)),
    "llama_yarn_untruncated": ("LlamaConfig", WIDE | rope(**YARN_WIDE, truncate=False)),
    "llama_yarn_attention_factor": ("LlamaConfig", WIDE | rope(**YARN, attention_factor=1.7)),
    "llama_yarn_mscale": ("LlamaConfig", WIDE | rope(**YARN_WIDE, mscale=3.0, mscale_all_dim=0.5)),
    "mistral": ("MistralConfig", TINY | dict(head_dim=12, sliding_window=16)),
    "mistral_full": ("MistralConfig", TINY | dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", TINY | SLIDING | dict(num_hidden_layers=3, max_window_layers=1)),
    "qwen2_layer_types": (
        "Qwen2Config", TINY | SLIDING | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "qwen2.5": (
        "Qwen2Config",
        TINY | dict(use_sliding_window=False, sliding_window=16, max_window_layers=1, tie_word_embeddings=True)
        | rope(theta=1_000_000.0),
    ),
    "qwen3": ("Qwen3Config", TINY | dict(head_dim=12) | rope(theta=1_000_000.0)),
    "qwen3_sliding": ("Qwen3Config", TINY | SLIDING | dict(head_dim=12, attention_bias=True, max_window_layers=1)),
    "olmo2": ("Olmo2Config", TINY),
    "olmo2_bias": ("Olmo2Config", TINY | dict(attention_bias=True, num_hidden_layers=1)),
    "smollm3": ("SmolLM3Config", TINY | PADDED | dict(num_hidden_layers=4)),
    "smollm3_sliding": (
        "SmolLM3Config",
        TINY | SLIDING | PADDED | dict(no_rope_layers=[0, 1], attention_bias=True, tie_word_embeddings=False)
        | rope(**YARN, theta=100.0),
    ),
    "granite": (
        "GraniteConfig",
        TINY | dict(embedding_multiplier=3.0, attention_multiplier=0.5, residual_multiplier=0.4, logits_scaling=2.5)
        | dict(tie_word_embeddings=True),
    ),
    "phi3": ("Phi3Config", TINY | PADDED | dict(num_hidden_layers=1, sliding_window=16)),
    "phi4_mini": (
        "Phi3Config",
        WIDE | PADDED | dict(original_max_position_embeddings=32, tie_word_embeddings=True, partial_rotary_factor=0.75)
        | rope("longrope", **LONGROPE),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | dict(num_experts=5, norm_topk_prob=True)),
    "qwen3_moe_sliding": (
        "Qwen3MoeConfig",
        MOE | SLIDING
        | dict(num_hidden_layers=1, attention_bias=True, num_experts_per_tok=3, norm_topk_prob=False),
    ),
    "mixtral": (
        "MixtralConfig",
        TINY | dict(hidden_size=16, intermediate_size=12, sliding_window=16)
        | dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "gemma2": (
        "Gemma2Config",
        TINY | PADDED | dict(head_dim=12, sliding_window=16, query_pre_attn_scalar=10)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        TINY | PADDED | dict(num_hidden_layers=3, head_dim=12, sliding_window=16, query_pre_attn_scalar=12)
        | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], attention_bias=True)
        | dict(rope_parameters=GEMMA3_ROPES),
    ),
    # Layers 1 and 5 have experts. It is the last because a model's seed is its place here.
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        MOE | dict(num_hidden_layers=6, intermediate_size=20, norm_topk_prob=True, decoder_sparse_step=2)
        | dict(mlp_only_layers=[3]),
    ),
}  # fmt: skip
LENGTHS = {"llama_dynamic": (24, 64), "phi4_mini": (32, 48)}  # of the sequences, where they are not one of 48
MODELS = {name: (*given, LENGTHS.get(name, (48,))) for name, given in ARGUMENTS.items()}


TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading and  double   spaces\nand\tlines ",
    "naïve café, 東京, Привет, 👩\u200d🚀 and e\u0301",
    "<s>not text<|end|> but a token, 12345",
    "",
)
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}
            {{- "[assistant]" + message.content | trim + eos_token }}
        {%- endgeneration %}
        {%- continue %}
    {%- endif %}
    {{- "[" + message.role + "]" + message.content | trim }}
{%- endfor %}
{% if tools %}
tools
{% endif %}
    {% if add_generation_prompt %}
[assistant]
    {% endif %}
{{ {"é": "<b>", "list": [1, true]} | tojson(indent=1) }}
"""
CHATS = (
    [{"role": "user", "content": " Hello <there> "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2\n"},
        {"role": "user", "content": "Thanks."},
    ],
)


def make_tokenizers() -> None:
    """A byte-level BPE with a BOS and a chat template, and a byte-fallback BPE in the manner of Llama 2."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator(
        TEXTS * 4,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "<|end|>", "<pad>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    byte_level.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )

    words = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"Thequickbrown"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [("▁", "T"), ("T", "h"), ("▁", "q")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    fallback = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback.add_special_tokens(["<unk>", "<s>", "</s>"])
    fallback.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )

    for name, backend, special in (
        ("tokenizer", byte_level, {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<pad>"}),
        ("tokenizer_byte_fallback", fallback, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    ):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(GOLDEN / name)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(GOLDEN / name)
        ids = [tokenizer.encode(text) for text in TEXTS]
        expected = {
            "texts": TEXTS,
            "ids": ids,
            "plain_ids": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
            "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "decoded_with_special": [tokenizer.decode(row, skip_special_tokens=False) for row in ids],
            "chats": CHATS,
            "chat_texts": [
                [
                    tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
                    for prompt in (False, True)
                ]
                for chat in CHATS
            ],
            "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
            "vocab_size": len(tokenizer),
        }
        (GOLDEN / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main(chosen: list[str]) -> None:
    import numpy as np
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for seed, (name, (config_class, arguments, lengths)) in enumerate(MODELS.items()):
        if chosen and name not in chosen:
            continue
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**arguments)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif key.endswith("bias"):
                    parameter.normal_(0, 0.5)
        model.save_pretrained(GOLDEN / name)
        arrays = {}
        for row, length in enumerate(lengths):
            # A fresh model for each row: transformers' dynamic rope remembers the longest sequence that it has met.
            fresh = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, attn_implementation="eager").eval()
            tokens = torch.randint(0, config.vocab_size, (1, length))
            with torch.no_grad():
                arrays[f"logits_{row}"] = fresh(tokens).logits.float().numpy()
            arrays[f"tokens_{row}"] = tokens.numpy().astype(np.int32)
        np.savez(GOLDEN / name / "golden.npz", **arrays)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
    if not chosen:
        for name in ("tokenizer", "tokenizer_byte_fallback"):
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
        make_tokenizers()


if __name__ == "__main__":
    main(sys.argv[1:])
