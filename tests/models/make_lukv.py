"""Makes tests/models/kvpress/lukv.npz: what LUKVPress keeps of the tiny model's prompt by a made-up budget curve.

Run in make_kvpress.py's environment, from the repository's root: python -m tests.models.make_lukv

The file gets ``curve`` [99, L, K], of whose rows 40 and 64 of 120 tokens take two, whole tokens of each head; and
KEPT, the bits of a bool [L, K, T], eight a byte along T: which positions stay of SnapKV's scores.
"""

from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER, KEPT, SHARPNESS, T, versions

FILE, WINDOW = FOLDER / "lukv.npz", 16


def made_curve() -> np.ndarray:
    """Return the share of each head's tokens that leaves, for 1% to 99% of all of them."""
    rng, shape = np.random.default_rng(0), np.shape(SHARPNESS)
    curve = np.repeat(np.arange(1, 100) / 100, np.prod(shape)).reshape(99, *shape)
    for kept in KEPT:
        counts = rng.integers(WINDOW + 1, T, shape)
        while counts.sum() != kept * counts.size:
            counts = rng.integers(WINDOW + 1, T, shape)
        curve[round(100 * (T - kept) / T) - 1] = 1 - counts / T
    return curve.astype(np.float32)


def kept_by(model: Any, tokens: Any, curve: np.ndarray, kept: int) -> np.ndarray:
    """Return which positions stay, bool [L, K, T]."""
    import kvpress
    import torch

    press = kvpress.LUKVPress(kvpress.SnapKVPress(window_size=WINDOW), (T - kept) / T, sink=0, window=WINDOW)
    press._budget_curves = curve
    with torch.no_grad(), press(model):
        model(tokens)
    mask = np.ones((*curve.shape[1:], T), bool)
    for index, layer in enumerate(model.model.layers):
        _, heads, positions = layer.self_attn.masked_key_indices
        mask[index, heads, positions] = False
        layer.self_attn.masked_key_indices = None
    assert mask.sum() == kept * np.prod(curve.shape[1:])
    return mask


def main() -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa").eval()
    with np.load(FOLDER / "kept.npz") as fixture:
        tokens = torch.tensor(fixture["tokens"])[None].long()
    curve = made_curve()
    masks = {str(kept): np.packbits(kept_by(model, tokens, curve, kept), axis=-1) for kept in KEPT}
    np.savez_compressed(FILE, versions=versions(), curve=curve, **masks)


if __name__ == "__main__":
    main()
