"""Makes tests/models/golden/smollm2/kept.npz: which tokens of a text kvpress keeps in SmolLM2's cache.

Run in make_kvpress.py's environment with gguf installed beside kvpress, from the repository's root:

    python -m tests.models.make_smollm2_kept FILE

FILE is what `python -m models.get smollm2` says it fetched; transformers reads it, dequantised to float32. The text are
the first 400 tokens of evals/haystack.txt. The file gets

    versions, tokens [T]
    NAME/200, NAME/100    which positions stay when 200 and 100 tokens a head are asked for: the bits of a bool
                          [L, K, T], eight a byte along T
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import PRESSES as TINY
from tests.models.make_kvpress import read_gguf, run, versions

GOLDEN = Path(__file__).parent / "golden" / "smollm2" / "kept.npz"
TEXT = Path(__file__).parents[2] / "evals" / "haystack.txt"
T = 400
KEPT = (200, 100)
# Behind 4 sinks, 10 partitions of 36 are scored by their ranks, and 36 tokens stay: whole ranks of each are kept.
SIZES = {"window_size": 64, "lag_size": 36}


def sized(settings: dict[str, Any] | None) -> Any:
    return settings and {name: SIZES.get(name, value) for name, value in settings.items()}


NAMES = "snapkv tova keydiff streaming knorm expected adakv criticalkv curdkv lagkv".split()
PRESSES = {name: (TINY[name][0], *map(sized, TINY[name][1:])) for name in NAMES}


def main(file: Path) -> None:
    import torch

    torch.set_num_threads(2)
    model, tokenizer = read_gguf(file, "eager")
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:T]
    arrays = {"versions": versions(), "tokens": np.array(tokens, np.int32)}
    for name, press in PRESSES.items():
        for number in KEPT:
            mask, _ = run(model, torch.tensor([tokens]), press, number)
            arrays[f"{name}/{number}"] = np.packbits(mask, axis=-1)
            print(name, number, flush=True)
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
