"""Makes kvzip.npz, kvzip_plus.npz and kvgrad.npz in tests/models/kvpress, and golden/smollm2/kvzip.npz: scores.

Run in make_kvpress.py's environment with gguf installed beside kvpress, from the repository's root:

    python -m tests.models.make_kvzip          the first three files, for the tiny random Llama in tests/models/kvpress
    python -m tests.models.make_kvzip FILE     the last one; FILE is what `python -m models.get smollm2` fetched

Each file gets

    versions, tokens [T], first, following, suffix: the token ids that ask the model to repeat
    scores                 float32 [L, K, T] (in half precision for SmolLM2), before sinks are raised above all others
    model/KEPT, layer/KEPT which positions stay when KEPT tokens a head are asked for and the heads of all layers, or
                           those of one layer, compete: the bits of a bool [L, K, T], eight a byte along T

The press reads a tokenizer from the model's folder; here it gets one without a chat template, so that the whole context
is repeated: of a chat's prompt kvpress leaves out the template's first tokens.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER, read_gguf, versions

TINY, PLUS, GRADIENT = FOLDER / "kvzip.npz", FOLDER / "kvzip_plus.npz", FOLDER / "kvgrad.npz"
REAL, TEXT = Path(__file__).parent / "golden/smollm2/kvzip.npz", Path(__file__).parents[2] / "evals" / "haystack.txt"
SINKS = 4
CHUNK = {TINY: 45, PLUS: 45, GRADIENT: 45, REAL: 150}  # three parts of 120 and of 400 tokens
KEPT = {TINY: (40, 64), PLUS: (40,), GRADIENT: (40,), REAL: (100, 200)}
WORDS = {
    "\n\nRepeat the previous context exactly.": [3, 5, 7],
    "\n\nRepeat the part of the previous context exactly, starting with": [11, 13],
    "\n": [17],
    "": [],
}


class Words:
    """A tokenizer that knows the words of KVzipPress alone."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False, return_tensors: str | None = None) -> Any:
        import torch

        ids = WORDS[text]
        return torch.tensor([ids], dtype=torch.long) if return_tensors == "pt" else ids


def press_of(file: Path, tokenizer: Any, **settings: Any) -> Any:
    """A file's press, which takes this tokenizer; its last scores are in ``scored``."""
    from kvpress.presses import kvgrad_press, kvzip_press

    class Loader:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            return tokenizer

    kvzip_press.AutoTokenizer = Loader
    if file == PLUS:
        settings["kvzip_plus_normalization"] = True
    kind = kvgrad_press.KVgradPress if file == GRADIENT else kvzip_press.KVzipPress
    press = kind(n_sink=SINKS, chunk_size=CHUNK[file], **settings)
    compress = press.compress_post

    def compress_post(model: Any) -> None:
        press.scored = press.score_val[:, 0].float().numpy().copy()
        compress(model)

    press.compress_post = compress_post
    return press


def run(file: Path, model: Any, tokens: Any, tokenizer: Any, kept: int, layerwise: bool) -> tuple[Any, Any]:
    """Return the positions that stay and the scores, both [L, K, T]."""
    import torch
    import transformers

    T = tokens.shape[1]
    ratio = (T - kept + 1e-7) / T
    press = press_of(file, tokenizer, compression_ratio=ratio, layerwise=layerwise)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with torch.no_grad(), press(model):
        model.model(input_ids=tokens, past_key_values=transformers.DynamicCache())
    mask = np.ones_like(press.scored, bool)
    for index, layer in enumerate(model.model.layers):
        _, heads, positions = layer.self_attn.masked_key_indices
        mask[index, heads, positions] = False
        layer.self_attn.masked_key_indices = None
    assert mask.sum() == kept * mask.shape[0] * mask.shape[1]
    return mask, press.scored


def write(file: Path, model: Any, tokens: Any, tokenizer: Any, dtype: str) -> None:
    words = {
        name: np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        for name, text in zip(("first", "following", "suffix"), WORDS, strict=False)
    }
    arrays = {"versions": versions(), "tokens": tokens[0].numpy().astype(np.int32), **words}
    for kept in KEPT[file]:
        for scope in ("model", "layer"):
            mask, scores = run(file, model, tokens, tokenizer, kept, scope == "layer")
            arrays[f"{scope}/{kept}"] = np.packbits(mask, axis=-1)
            arrays["scores"] = scores.astype(dtype)
            print(file.name, scope, kept, flush=True)
    np.savez_compressed(file, **arrays)


def main(arguments: list[str]) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if not arguments:
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa").eval()
        with np.load(FOLDER / "kept.npz") as fixture:
            tokens = torch.tensor(fixture["tokens"])[None].long()
        for file in (TINY, PLUS, GRADIENT):
            write(file, model, tokens, Words(), "float32")
        return
    file = Path(arguments[0])
    model, tokenizer = read_gguf(file, "sdpa")
    tokenizer.chat_template = None
    tokens = torch.tensor([tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:400]])
    write(REAL, model, tokens, tokenizer, "float16")


if __name__ == "__main__":
    main(sys.argv[1:])
