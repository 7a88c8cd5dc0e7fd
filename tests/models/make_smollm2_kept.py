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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import CRITICAL, CUR, EXPECTED, LAG, Press, run

GOLDEN = Path(__file__).parent / "golden" / "smollm2" / "kept.npz"
TEXT = Path(__file__).parents[2] / "evals" / "haystack.txt"
T = 400
KEPT = (200, 100)
SNAPKV = {"window_size": 64, "kernel_size": 5}
PRESSES: dict[str, Press] = {
    "snapkv": ("SnapKVPress", SNAPKV, None),
    "tova": ("TOVAPress", {}, None),
    "keydiff": ("KeyDiffPress", {}, None),
    "streaming": ("StreamingLLMPress", {"n_sink": 4}, None),
    "knorm": ("KnormPress", {}, None),
    "expected": ("ExpectedAttentionPress", EXPECTED, None),
    "adakv": ("AdaKVPress", {"alpha_safeguard": 0.2}, SNAPKV),
    "criticalkv": ("CriticalKVPress", CRITICAL, SNAPKV),
    "curdkv": ("CURPress", CUR, None),
    # Behind 4 sinks, 10 partitions of 36 are scored by their ranks, and 36 tokens stay: whole ranks of each are kept.
    "lagkv": ("LagKVPress", LAG | {"lag_size": 36}, None),
}


def main(file: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = tokenizer.encode(TEXT.read_text(), add_special_tokens=False)[:T]
    versions = [f"{name} {version(name).split('+')[0]}" for name in ("kvpress", "transformers", "torch")]
    arrays = {"versions": np.array(versions), "tokens": np.array(tokens, np.int32)}
    for name, press in PRESSES.items():
        for number in KEPT:
            mask, _ = run(model, torch.tensor([tokens]), press, number)
            arrays[f"{name}/{number}"] = np.packbits(mask, axis=-1)
            print(name, number, flush=True)
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
