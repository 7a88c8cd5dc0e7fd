"""Makes tests/models/golden: tiny random models as transformers saves them, with the logits it computes.

Run in an environment of its own, Python 3.11 with torch 2.13 (CPU) and transformers 5.2 (for those of MASKED 5.24, as
5.2 scales the rotary embedding of OLMo 3's layers with a window), from the repository's root:

    python tests/models/make_golden.py            # all of them
    python tests/models/make_golden.py granite    # only some

Each folder holds config.json, of which the rest is made, model.safetensors and golden.npz (tokens_0, logits_0, ...;
one row each, because transformers scales "dynamic" by the longest row of a batch). Weights are wide, so that attention
is far from uniform, and norms and biases are random, so that a missed one shows. Two folders hold tokenizers and what
they make of the texts, chats and template that are there.
"""

import json
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
# A model's seed is its place here. In qwen3_moe_mixed, layers 1 and 5 have experts.
NAMES = """
llama2 llama3 llama_tied llama_bias llama_linear llama_dynamic llama_llama3 llama_yarn llama_yarn_untruncated
llama_yarn_attention_factor llama_yarn_mscale mistral mistral_full qwen2 qwen2_layer_types qwen2.5 qwen3 qwen3_sliding
olmo2 olmo2_bias smollm3 smollm3_sliding granite phi3 phi4_mini qwen3_moe qwen3_moe_sliding mixtral gemma2 gemma3
qwen3_moe_mixed gemma gemma3_vision olmo3 ministral ministral3 mistral3_vision qwen3_vl exaone4 seed_oss
gpt_oss deepseek_v2 deepseek_v2_lite deepseek_v3 deepseek_v3_bias glm4_moe_lite
qwen3_next qwen3_next_bias qwen3_5 qwen3_5_text qwen3_5_moe deepseek_v32 glm_moe_dsa
granite4 granite4_h granite4_h_moe gemma4 gemma4_e gemma4_moe gemma3n gemma4_unified
""".split()
# Those whose last sequence has logits under recency, too: queries see what a budget of RECENT tokens leaves them, when
# the first tokens, PROMPT or as PROMPTS says, come in blocks and the others one by one.
MASKED = ["llama_llama3", "phi4_mini", *NAMES[NAMES.index("gemma") :]]
RECENT, BLOCK, PROMPT = 12, 8, 32
PROMPTS = {"phi4_mini": 40}  # beyond the positions up to which it has other factors
LENGTHS = {"llama_dynamic": (24, 64), "phi4_mini": (32, 48)}  # of the sequences, where they are not one of 48
MODELS = {name: LENGTHS.get(name, (48,)) for name in NAMES}
NEAR = dict.fromkeys(MODELS, 1e-4) | {"gemma4_e": 3e-4}  # of logits; half of a last bit of its embedding moves 1.1e-4


def make_tokenizers() -> None:
    """A byte-level BPE with a BOS and a chat template, and a byte-fallback BPE in the manner of Llama 2."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    before = json.loads((GOLDEN / "tokenizer" / "expected.json").read_text())
    texts, chats = before["texts"], before["chats"]
    template = (GOLDEN / "tokenizer" / "chat_template.jinja").read_text()
    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator(
        texts * 4,
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
        tokenizer.chat_template = template
        tokenizer.save_pretrained(GOLDEN / name)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(GOLDEN / name)
        ids = [tokenizer.encode(text) for text in texts]
        expected = {
            "texts": texts,
            "ids": ids,
            "plain_ids": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
            "decoded": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "decoded_with_special": [tokenizer.decode(row, skip_special_tokens=False) for row in ids],
            "chats": chats,
            "chat_texts": [
                [
                    tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
                    for prompt in (False, True)
                ]
                for chat in chats
            ],
            "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
            "vocab_size": len(tokenizer),
        }
        (GOLDEN / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def under_recency(model, config, tokens, prompt):
    """The logits under a mask that shows each token the RECENT before its block, and its block up to itself."""
    import torch

    T = tokens.shape[1]
    start = torch.tensor([t // BLOCK * BLOCK if t < prompt else t for t in range(T)])
    at, seen = torch.arange(T), torch.arange(T)[None]
    kept = (seen >= start[:, None] - RECENT) & (seen <= at[:, None])

    def mask(window=None):
        within = kept if window is None else kept & (seen > at[:, None] - window)
        return torch.zeros(T, T).masked_fill(~within, torch.finfo(torch.float32).min)[None, None]

    text, window = config.get_text_config(), getattr(config.get_text_config(), "sliding_window", None)
    types = getattr(text, "layer_types", None) or ()
    if "linear_attention" in types:  # which sees all tokens
        given = {"full_attention": mask(), "linear_attention": None}
    elif "sliding_attention" in types:
        given = {"full_attention": mask(), "sliding_attention": mask(window)}
    else:
        given = mask(window)
    return model(tokens, attention_mask=given).logits.float().numpy()


def main(chosen: list[str]) -> None:
    import numpy as np
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for seed, (name, lengths) in enumerate(MODELS.items()):
        if chosen and name not in chosen:
            continue
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(GOLDEN / name)
        kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        kind = kinds["vision_config" in json.loads((GOLDEN / name / "config.json").read_text())]
        model = kind.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("norm.weight"):
                    around_0 = hasattr(config.get_text_config(), "linear_conv_kernel_dim")  # Qwen's hybrids
                    parameter.uniform_(*(-0.5, 0.5) if around_0 and "linear_attn" not in key else (0.5, 1.5))
                elif key.endswith(("router.scale", "_scale", "layernorm_1.weight", "layernorm_2.weight")):
                    parameter.uniform_(0.5, 1.5)
                elif key.endswith("modality_router.weight"):
                    parameter.normal_(0, 2)  # as what it multiplies is divided by the model dim
                elif key.endswith("bias"):
                    parameter.normal_(0, 0.5)
                elif key.endswith("mamba.D"):
                    parameter.normal_(1, 0.5)
                elif key.endswith("sinks"):
                    parameter.normal_(0, 2)
                elif name == "gpt_oss" and key.endswith("gate_up_proj"):
                    parameter.normal_(0, 1)  # beyond the limits of its gate
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
                elif key.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
        model.save_pretrained(GOLDEN / name)
        arrays = {}
        for row, length in enumerate(lengths):
            # A fresh model for each row: transformers' dynamic rope remembers the longest sequence that it has met.
            fresh = kind.from_pretrained(GOLDEN / name, attn_implementation="eager").eval()
            tokens = torch.randint(0, config.get_text_config().vocab_size, (1, length))
            with torch.no_grad():
                arrays[f"logits_{row}"] = fresh(tokens).logits.float().numpy()
                if name in MASKED and length == lengths[-1]:
                    arrays[f"recency_{row}"] = under_recency(fresh, config, tokens, PROMPTS.get(name, PROMPT))
            arrays[f"tokens_{row}"] = tokens.numpy().astype(np.int32)
        np.savez(GOLDEN / name / "golden.npz", **arrays)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
    if not chosen:
        make_tokenizers()


if __name__ == "__main__":
    main(sys.argv[1:])
