"""Makes tests/models/kvpress: a tiny random Llama and which tokens of a prompt kvpress' presses keep in its cache.

Run in an environment of its own, Python 3.11 with torch 2.13 (CPU), transformers 5.2 and kvpress 0.5.5, from the
repository's root:

    python tests/models/make_kvpress.py [SEED]

SEED is the first to try, that of presses.json where only a press was added. The folder has config.json and presses.json
(each press's settings), and gets model.safetensors, how many tokens each press keeps of each layer and KV head, and
kept.npz:

    tokens [T], logits [8, vocabulary] of the last tokens, output_norms [L, K, T]: the mean over the group of |v W_O|_1
    q_filters [L, K, D], head_scores [L, K], merged and shared [K, 40, D]: see the functions
    NAME/40/kept, NAME/64/kept    bool [L, K, T], which positions stay when 40 and 64 tokens a head are asked for
    NAME/scores                   float32 [L, K, T], retention scores where they do not depend on the budget,
    NAME/40/scores, NAME/64/scores    and where they do; a press that masks a full cache has the scores of its base

The whole prompt runs with a full cache: a press shortens a layer's cache after that layer has attended. Seeds are tried
until no kept set changes with the scores by one part in ten thousand, so that rounding and ties do not matter.
"""

import contextlib
import itertools
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "kvpress"
T = 120
KEPT = (40, 64)
# How peaked the attention of each KV head is, layer by layer: scores lie well apart, and heads want uneven budgets.
SHARPNESS = ((1.5, 5.0), (4.0, 1.0), (2.5, 2.5))
NOISE = 1e-4
QUESTION = 8  # tokens at the prompt's end
STREAMING = (4, 4)  # first and last tokens of a streaming head

Press = tuple[str, dict[str, Any], dict[str, Any] | None]  # class, settings, those of the SnapKVPress inside it or None
PRESSES: dict[str, Press] = {
    name: (press["press"], press["settings"], press.get("base", (None, None))[1])
    for name, press in json.loads((FOLDER / "presses.json").read_text())["presses"].items()
}
MASKING = ("AdaKVPress", "CriticalAdaKVPress", "DuoAttentionPress")
NOT_EAGER = (*MASKING, "ChunkKVPress")  # refuse eager attention, which observed attention needs
OWN_SIZE = ("DuoAttentionPress", "SimLayerKVPress")  # they keep a number of tokens of their own, and score none
DEPENDS_ON_BUDGET = ("StreamingLLMPress", "CriticalKVPress")


def make_press(press: Press, model: Any, tokens: Any, kept: int) -> Any:
    import kvpress
    import torch
    from kvpress.utils import compute_n_kept

    length = tokens.shape[1]
    ratio = (length - kept - 0.25) / length  # a quarter of a token, which rounding does not reach
    assert compute_n_kept(length, ratio) == kept, (ratio, compute_n_kept(length, ratio))
    kind, settings, inner = press
    if kind in OWN_SIZE:
        made = getattr(kvpress, kind)(**settings)
        made.load_attention_pattern = lambda model: (*STREAMING, head_scores(model, tokens))
        return made
    if inner is None:
        made = getattr(kvpress, kind)(compression_ratio=ratio, **settings)
        if kind == "QFilterPress":
            made.q_filters, made.post_init_from_model = torch.tensor(q_filters(model, tokens)), lambda model: None
        if kind == "FinchPress":  # instead of a delimiter in the prompt
            made.delimiter_token_id, made.window_size = -1, QUESTION
        return made
    return getattr(kvpress, kind)(press=kvpress.SnapKVPress(compression_ratio=ratio, **inner), **settings)


def make_model(seed: int) -> Any:
    """Random weights of unit gain, but for the keys' (SHARPNESS), and random norms."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.normal_(1, 0.1)
            elif "embed_tokens" in key:
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
        for layer, sharpness in zip(model.model.layers, SHARPNESS, strict=True):
            layer.self_attn.k_proj.weight *= torch.tensor(sharpness).repeat_interleave(config.head_dim)[:, None]
    return model


def read_gguf(file: Path, attention: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a GGUF file, dequantised to float32."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    made = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, attn_implementation=attention
    )
    return made.eval(), transformers.AutoTokenizer.from_pretrained(**place)


def versions() -> np.ndarray:
    return np.array([f"{name} {version(name).split('+')[0]}" for name in ("kvpress", "transformers", "torch")])


def fed(model: Any, tokens: Any, press: Any = None) -> Any:
    """Return the cache behind the tokens, under a press or without one."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    with torch.no_grad(), contextlib.nullcontext() if press is None else press(model):
        model(tokens, past_key_values=cache)
    return cache


def run(model: Any, tokens: Any, which: Press, kept: int, noise: Any = None) -> tuple[Any, Any]:
    """Return the positions that stay and the scores, both [L, K, T]; ``noise`` draws changes of the base scores."""
    import torch

    kind, _, inner = which
    press = make_press(which, model, tokens, kept)
    scored: list[Any] = []

    def listen(scorer: Any, record: bool, noise: Any, method: str = "score") -> None:
        original = getattr(scorer, method)

        def score(*arguments: Any, **keywords: Any) -> Any:
            scores = original(*arguments, **keywords)
            if record:
                scored.append(scores[0].clone())
            if noise is not None:
                scores = scores + NOISE * (scores.abs() + 1e-2 * scores.abs().max()) * noise(scores.shape)
            return scores

        setattr(scorer, method, score)

    if kind == "CriticalKVPress":
        listen(press.press, False, noise)
        listen(press, True, None)
    elif kind == "LagKVPress":  # its scores are ranks, of what is changed here
        listen(press, False, noise, "_get_states_score")
        listen(press, True, None)
    elif kind not in OWN_SIZE:
        listen(press if inner is None else press.press, True, noise)

    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    model.set_attn_implementation("sdpa" if kind in NOT_EAGER else "eager")
    full, cache = fed(model, tokens), fed(model, tokens, press)
    masks = []
    for index, layer in enumerate(model.model.layers):
        keys, left = full.layers[index].keys[0], cache.layers[index].keys[0]
        mask = (keys[:, :, None] == left[:, None]).all(-1).any(-1)
        assert (mask.sum(-1) == left.shape[1]).all(), "two positions have the same key"
        if kind in MASKING:
            _, heads, positions = layer.self_attn.masked_key_indices
            mask[heads, positions] = False
        masks.append(mask)
    model.set_attn_implementation("eager")
    return torch.stack(masks).numpy(), torch.stack(scored).numpy() if scored else None


def output_norms(model: Any, tokens: Any) -> Any:
    import torch
    from kvpress import CriticalKVPress

    cache = fed(model, tokens)
    with torch.no_grad():
        norms = [
            CriticalKVPress.vwl1norm(cache.layers[index].values, layer.self_attn)[0]
            for index, layer in enumerate(model.model.layers)
        ]
    return torch.stack(norms).numpy()


def q_filters(model: Any, tokens: Any) -> Any:
    """[L, K, D], as their authors compute them (arXiv 2503.02812), of an odd number of queries: no signs that tie."""
    import torch
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    filters = []

    def measure(attention: Any, _: Any, given: dict[str, Any]) -> None:
        query = get_prerope_query_states(attention, given["hidden_states"])
        query, _ = apply_rotary_pos_emb(query, query, *given["position_embeddings"])
        left, _, right = torch.linalg.svd(query[0], full_matrices=False)  # of [N, T, D]
        most = torch.where((left[..., 0] > 0).float().mean(-1) > 0.5, 1.0, -1.0)
        filters.append(
            -(most[:, None] * right[:, 0]).reshape(model.config.num_key_value_heads, -1, right.shape[-1]).mean(1)
        )

    hooks = [layer.self_attn.register_forward_pre_hook(measure, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(tokens[:, 1:])
    for hook in hooks:
        hook.remove()
    return torch.stack(filters).numpy()


def head_scores(model: Any, tokens: Any) -> Any:
    """[L, K]: kvpress' own measure of how far back heads look, of the halves of the text as two samples."""
    import kvpress.presses.duo_attention_press as duo
    import torch

    class Given:
        def __getattr__(self, name: str) -> Any:  # a tokenizer, a data set, a table of texts: all lead to the tokens
            return lambda *_, **__: self

        def __getitem__(self, name: str) -> Any:
            return self

        def tolist(self) -> Any:
            return list(tokens[0].view(2, 1, -1))

        def __call__(self, text: Any, **_: Any) -> Any:
            return transformers.BatchEncoding({"input_ids": text})

    import transformers

    duo.AutoTokenizer, duo.load_dataset = Given(), lambda *_, **__: Given()
    with torch.no_grad():
        return duo.duo_attention_on_the_fly.__wrapped__(model, num_samples=2, q_len=50)


def merged_values(model: Any, tokens: Any) -> Any:
    """Layer 1's values [K, 40, D], in the order of positions, after SnapKV has evicted and the others were merged."""
    import kvpress
    import torch

    press = kvpress.MergingPress(press=kvpress.SnapKVPress(compression_ratio=2 / 3, **PRESSES["snapkv"][1]))
    full, cache = fed(model, tokens), fed(model, tokens, press)
    keys, left = full.layers[1].keys[0], cache.layers[1].keys[0]
    place = (keys[:, :, None] == left[:, None]).all(-1).float().argmax(1)  # of each slot, its position
    values = cache.layers[1].values[0]
    return torch.stack([value[at.argsort()] for value, at in zip(values, place, strict=True)]).numpy()


def shared_values(model: Any, tokens: Any) -> Any:
    """Layer 1's values [K, 40, D] after TOVA has evicted and CaM shared the others by its probabilities, without draws.

    CAMPress works in decode alone. So it is handed the attention of the prompt, and merges all that leave.
    """
    import kvpress
    import torch
    import transformers

    attention, given, cache = model.model.layers[1].self_attn, {}, transformers.DynamicCache()
    hook = attention.register_forward_pre_hook(lambda _, __, seen: given.update(seen), with_kwargs=True)
    with torch.no_grad():
        weights = model(tokens, past_key_values=cache, output_attentions=True).attentions[1]
    hook.remove()
    keys, values = cache.layers[1].keys, cache.layers[1].values
    received = weights.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)
    press = kvpress.CAMPress(base_press=kvpress.TOVAPress(), target_size=KEPT[0])
    press.layer_step_counts[1], press._running_attn_sum[1] = T - KEPT[0], received
    draw, torch.bernoulli = torch.bernoulli, lambda chance: chance
    with torch.no_grad():
        _, values = press.compress(attention, given["hidden_states"], keys, values, received, given)
    torch.bernoulli = draw
    return values[0].numpy()


def is_stable(model: Any, tokens: Any, seed: int) -> bool:
    import torch

    random = torch.Generator().manual_seed(seed)
    for (name, press), kept in itertools.product(PRESSES.items(), KEPT):
        expected, _ = run(model, tokens, press, kept)
        for _ in range(4):
            noisy, _ = run(model, tokens, press, kept, lambda shape: 2 * torch.rand(shape, generator=random) - 1)
            if (noisy != expected).any():
                print(f"seed {seed}: {name} at {kept} hangs on a rounding")
                return False
    return True


def main() -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for seed in itertools.count(int(sys.argv[1]) if sys.argv[1:] else 0):
        model = make_model(seed)
        tokens = torch.randperm(model.config.vocab_size)[None, :T]
        if is_stable(model, tokens, seed):
            break
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    with torch.no_grad():
        logits = model(tokens).logits[0, -8:].numpy()

    arrays = {
        "tokens": tokens[0].numpy().astype(np.int32),
        "logits": logits,
        "output_norms": output_norms(model, tokens),
        "q_filters": q_filters(model, tokens),
        "head_scores": head_scores(model, tokens),
        "merged": merged_values(model, tokens),
        "shared": shared_values(model, tokens),
    }
    presses: dict[str, Any] = {}
    for name, press in PRESSES.items():
        kind, settings, inner = press
        presses[name] = {"press": kind, "settings": settings} | ({"base": ["SnapKVPress", inner]} if inner else {})
        presses[name]["kept"] = {}
        for kept in KEPT:
            mask, scores = run(model, tokens, press, kept)
            arrays[f"{name}/{kept}/kept"] = mask
            if scores is not None:
                arrays[f"{name}/{kept}/scores" if kind in DEPENDS_ON_BUDGET else f"{name}/scores"] = scores
            presses[name]["kept"][kept] = mask.sum(-1).tolist()
    np.savez_compressed(FOLDER / "kept.npz", **arrays)
    header = {"versions": dict(text.split() for text in versions()), "seed": seed}
    lines = [f"  {json.dumps(name)}: {json.dumps(press)}" for name, press in presses.items()]
    text = json.dumps(header)[:-1] + ', "presses": {\n' + ",\n".join(lines) + "\n}}\n"
    (FOLDER / "presses.json").write_text(text)


if __name__ == "__main__":
    main()
