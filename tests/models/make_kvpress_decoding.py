"""Makes decoding.npz in tests/models/kvpress: which tokens kvpress' decoding presses keep of a text fed token by token.

Run in make_kvpress.py's environment, from the repository's root:

    python -m tests.models.make_kvpress_decoding

A press keeps 40 tokens of the first 96, and then, every 8 steps of 24, 40 of the 48 that there are. The file has
``tokens`` [T] and, for each press, the bits of a bool [L, K, T], eight a byte along T: the positions that are left
behind the last step. The model is that of make_kvpress.py. Texts are tried until no kept set changes with scores that
change by one part in ten thousand.
"""

import itertools
from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER, NOISE, T

FILE = FOLDER / "decoding.npz"
PROMPT, EVERY, KEPT = 96, 8, 40
# Others score by a token's place in the cache, where kvpress leaves tokens in the order of their scores; or by queries
# that a step's buffer holds, all rotated to the last one's position.
PRESSES = ("KnormPress", "KeyDiffPress", "TOVAPress", "QFilterPress")


def made(kind: str, ratio: float = 0.0) -> Any:
    import kvpress
    import torch

    press = getattr(kvpress, kind)(compression_ratio=ratio)
    if kind == "QFilterPress":
        press.q_filters = torch.tensor(np.load(FOLDER / "kept.npz")["q_filters"])
        press.post_init_from_model = lambda model: None
    return press


def run(model: Any, tokens: Any, kind: str, noise: Any = None) -> Any:
    """Return the positions that are left, bool [L, K, T]; ``noise`` draws changes of the scores."""
    import kvpress
    import torch
    import transformers

    position: dict[int, Any] = {}  # of the slots of each layer, [K, n]
    seen = {"tokens": PROMPT}

    def follow(press: Any) -> Any:
        """Note where the tokens of the slots are from: slots that stay have the keys that they had."""
        compress, score = press.compress, press.score

        def compressed(module: Any, hidden: Any, keys: Any, *rest: Any) -> Any:
            old = position.get(module.layer_idx, torch.zeros(keys.shape[1], 0, dtype=torch.long))
            new = torch.arange(seen["tokens"] - (keys.shape[2] - old.shape[1]), seen["tokens"])
            old = torch.cat([old, new.expand(len(old), -1)], dim=1)
            left = compress(module, hidden, keys, *rest)
            same = (left[0][0][:, :, None] == keys[0][:, None]).all(-1)
            assert (same.sum(-1) == 1).all(), "two tokens have the same key"
            position[module.layer_idx] = old.gather(1, same.int().argmax(-1))
            return left

        def scored(*arguments: Any, **keywords: Any) -> Any:
            scores = score(*arguments, **keywords)
            if noise is None:
                return scores
            return scores + NOISE * (scores.abs() + 1e-2 * scores.abs().max()) * noise(scores.shape)

        press.compress, press.score = compressed, scored
        return press

    first = follow(made(kind, (PROMPT - KEPT - 0.25) / PROMPT))
    steps = kvpress.DecodingPress(follow(made(kind)), compression_interval=EVERY, target_size=KEPT)
    cache = transformers.DynamicCache()
    with torch.no_grad(), kvpress.PrefillDecodingPress(first, steps)(model):
        model(tokens[:, :PROMPT], past_key_values=cache)
        for at in range(PROMPT, T):
            seen["tokens"] = at + 1
            model(tokens[:, at : at + 1], past_key_values=cache, position_ids=torch.tensor([[at]]))
    layers = [position[layer].numpy() for layer in range(len(position))]
    assert all(heads.shape[1] == KEPT for heads in layers)
    return np.stack([[np.isin(np.arange(T), head) for head in heads] for heads in layers])


def main() -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(0)

    def noise(shape: Any) -> Any:
        return 2 * torch.rand(shape, generator=random) - 1

    for seed in itertools.count():
        tokens = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed))[None, :T]
        kept = {kind: run(model, tokens, kind) for kind in PRESSES}
        if all((run(model, tokens, kind, noise) == kept[kind]).all() for kind in PRESSES for _ in range(4)):
            break
        print(f"text {seed} hangs on a rounding")
    bits = {kind: np.packbits(mask, axis=-1) for kind, mask in kept.items()}
    np.savez_compressed(FILE, tokens=tokens[0].numpy(), **bits)


if __name__ == "__main__":
    main()
