"""Makes tests/models/kvpress/restorekv: RestoreKV's tokens and adapter, and what kvpress makes of them.

Run in make_kvpress.py's environment, with kvpress' main branch (8 August 2026 or later) and peft, from the repository's
root:

    python -m tests.models.make_restorekv

The adapter and the tokens are drawn here, for the tiny Llama in tests/models/kvpress, and saved as their authors do.
The folder gets restored.npz with

    tokens [T], first, following, suffix    the text, and the token ids that ask the model to repeat (make_kvzip.py)
    kept/KEPT       which positions stay, the bits of a bool [L, K, T]; restore tokens and they are KEPT a head
    key, value      of the restore tokens, float32 [L, K, R, D]
"""

import json
from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER
from tests.models.make_kvzip import SINKS, WORDS, Words

OWN = FOLDER / "restorekv"
BASE = "tests/models/kvpress"
FILE, KEPT, RESTORED = OWN / "restored.npz", (40, 64), 8


def press_of(ratio: float) -> Any:
    """The press with what is saved in the folder, which it does not download."""
    from kvpress.presses import kvzip_press, restorekv_press
    from safetensors.torch import load_file

    class Loader:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            return Words()

    class Restoring(restorekv_press.RestoreKVPress):
        def post_init_from_model(self, model: Any) -> None:
            self.restore_embeddings = load_file(OWN / "restore_embeddings.safetensors")["restore_embeddings"]
            if self.adapter_name not in getattr(model, "peft_config", {}):
                model.load_adapter(OWN, adapter_name=self.adapter_name)
            model.disable_adapters()

    kvzip_press.AutoTokenizer = Loader
    return Restoring(n_sink=SINKS, compression_ratio=ratio)


def run(model: Any, tokens: Any, kept: int) -> tuple[Any, Any, Any]:
    """Return the positions of the text that stay, [L, K, T], and the restore tokens' keys and values."""
    import torch
    import transformers

    T, cache = tokens.shape[1], transformers.DynamicCache()
    press = press_of((T - kept + 1e-7) / T)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with torch.no_grad(), press(model):
        model.model(input_ids=tokens, past_key_values=cache)
    L, K = len(model.model.layers), model.config.num_key_value_heads
    mask = np.ones((L, K, T), bool)
    for index, layer in enumerate(model.model.layers):
        _, heads, positions = layer.self_attn.masked_key_indices
        mask[index, heads, positions] = False
        layer.self_attn.masked_key_indices = None
    assert mask.sum() == (kept - RESTORED) * L * K
    key, value = (
        np.stack([getattr(layer, name)[0, :, T:].numpy() for layer in cache.layers]) for name in ("keys", "values")
    )
    return mask, key, value


def main() -> None:
    import peft
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa").eval()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(OWN)
    (OWN / "README.md").unlink(missing_ok=True)
    described = json.loads((OWN / "adapter_config.json").read_text()) | {"base_model_name_or_path": BASE}
    (OWN / "adapter_config.json").write_text(json.dumps(described, indent=1) + "\n")
    drawn = torch.randn(RESTORED, model.config.hidden_size)
    save_file({"restore_embeddings": drawn}, OWN / "restore_embeddings.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa").eval()
    with np.load(FOLDER / "kept.npz") as fixture:
        tokens = torch.tensor(fixture["tokens"])[None].long()
    words = dict(zip(("first", "following", "suffix"), WORDS.values(), strict=False))
    arrays = {name: np.array(ids, np.int32) for name, ids in words.items()} | {"tokens": tokens[0].numpy()}
    for kept in KEPT:
        mask, arrays["key"], arrays["value"] = run(model, tokens, kept)
        arrays[f"kept/{kept}"] = np.packbits(mask, axis=-1)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
