"""Makes tests/models/kvpress/gates: published gates of random weights, their scores, and what kvpress keeps by them.

Run in make_kvpress.py's environment with safetensors, from the repository's root:

    python -m tests.models.make_gates

The model and the tokens are make_kvpress.py's. Each gate gets a folder with the files in which it is published: KVzap's
are saved by kvpress' model, and Fast KVzip's is pickled as its authors do, and then converted by ``CONVERT``. gates.npz
has

    versions, threshold: of DMSPress, for kvzap-mlp
    GATE/scores                                   float32 [L, K, T], as the press has them; KVzap's are logarithms
    kvzap-linear/head, kvzap-mlp/head             which positions stay of 40 tokens a head
    kvzap-mlp/threshold                           which stay under DMSPress, with the last 16
    fast-kvzip/model, fast-kvzip/layer            which stay of 40 a head, where all heads of the model or of a layer
                                                  compete, with 4 sinks and the last 2: the bits of a bool [L, K, T],
                                                  eight a byte along T

Seeds are tried until the scores beside each line between kept and dropped differ by more than one part in a thousand.
"""

import itertools
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER, T, fed, versions

GATES = FOLDER / "gates"
FILE = GATES / "gates.npz"
KEPT, WINDOW, SINKS = 40, 16, 4
# As models/published_gates.py says it; a test compares both.
CONVERT = (
    "python -c \"import sys, torch, safetensors.torch as s; s.save_file({f'{i}.{name}': tensor.clone() for i, gate in "
    "enumerate(torch.load(sys.argv[1], map_location='cpu', weights_only=False)['module']) for name, tensor in "
    'gate.items()}, sys.argv[2])"'
)


def drawn(modules: Any, seed: int) -> Any:
    """Draw all weights anew, so that scores lie well apart."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in modules.named_parameters():
            size = 0.5 if parameter.dim() == 1 or name.endswith((".b", "k_base")) else 2 * parameter.shape[-1] ** -0.5
            parameter.copy_(size * torch.randn(parameter.shape, generator=random) + name.endswith("norm.weight"))
    return modules.eval()


def kvzap(model: Any, hidden: int | None, seed: int) -> Any:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    config = model.config
    shape = KVzapConfig(
        input_dim=config.hidden_size, output_dim=config.num_key_value_heads, hidden_dim=hidden,
        n_modules=config.num_hidden_layers,
    )  # fmt: skip
    return drawn(KVzapModel(shape), seed)


def fast_kvzip(model: Any, seed: int) -> Any:
    import torch
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    config, K = model.config, model.config.num_key_value_heads
    G = config.num_attention_heads // K
    made = [
        FastKVzipGate(layer, config.hidden_size, K, G, torch.float32, output_dim=4, sink=3)
        for layer in range(config.num_hidden_layers)
    ]
    return drawn(torch.nn.ModuleList(made), seed)


def recorded(press: Any, method: str) -> list[Any]:
    """Return the list that gets what a press's method returns."""
    original, seen = getattr(press, method), []

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        seen.append(result)
        return result

    setattr(press, method, call)
    return seen


def masked(model: Any, L: int, K: int) -> Any:
    """Return which positions a press left, bool [L, K, T], from what it masked."""
    left = np.ones((L, K, T), bool)
    for index, layer in enumerate(model.model.layers):
        if layer.self_attn.masked_key_indices is not None:
            _, heads, positions = layer.self_attn.masked_key_indices
            left[index, heads, positions] = False
        layer.self_attn.masked_key_indices = None
    return left


def apart(scores: Any, left: Any) -> bool:
    """Return whether scores [.., T] lie well apart at the line between kept and dropped."""
    lines = zip(scores.reshape(-1, scores.shape[-1]), left.reshape(-1, scores.shape[-1]), strict=True)
    return all(one[kept].min() - one[~kept].max() > 1e-3 * abs(one[kept].min()) for one, kept in lines)


def run_kvzap(model: Any, tokens: Any, gate: Any) -> tuple[Any, Any]:
    """Return what KVzapPress keeps of each head, and its scores, [L, K, T]."""
    import kvpress
    import torch

    press = kvpress.KVzapPress(compression_ratio=(T - KEPT - 0.25) / T)
    press.kvzap_model, press.post_init_from_model = gate, lambda model: None
    seen = recorded(press, "score")
    full, cache = fed(model, tokens), fed(model, tokens, press)
    same = [
        (a.keys[0][:, :, None] == b.keys[0][:, None]).all(-1).any(-1)
        for a, b in zip(full.layers, cache.layers, strict=True)
    ]
    return torch.stack(same).numpy(), torch.cat(seen).detach().numpy()


def run_threshold(model: Any, tokens: Any, gate: Any, scores: Any) -> tuple[Any, float]:
    """Return what DMSPress keeps, and its threshold: that which half of all scores reach."""
    import kvpress

    inner, ordered = kvpress.KVzapPress(), np.sort(scores.reshape(-1))
    inner.kvzap_model, inner.post_init_from_model = gate, lambda model: None
    threshold = float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())
    fed(model, tokens, kvpress.DMSPress(press=inner, threshold=threshold, sliding_window_size=WINDOW))
    return masked(model, *scores.shape[:2]), threshold


def run_fast_kvzip(model: Any, tokens: Any, gates: Any, layerwise: bool) -> tuple[Any, Any]:
    """Return what FastKVzipPress keeps, and its scores before sinks and window are raised to 1, [L, K, T]."""
    import kvpress
    import torch

    press = kvpress.FastKVzipPress(compression_ratio=(T - KEPT + 1e-7) / T, layerwise=layerwise, n_sink=SINKS)
    press.gates, scores = list(gates), []
    for gate in press.gates:
        gate.register_forward_hook(lambda _, __, score: scores.append(score.clone()))
    fed(model, tokens, press)
    for gate in press.gates:
        gate._forward_hooks.clear()
    scores = torch.cat(scores).detach().numpy()
    left = masked(model, *scores.shape[:2])
    assert left.sum() == KEPT * left.shape[0] * left.shape[1]
    return left, scores


def main() -> None:
    import torch
    import transformers
    from kvpress.presses.kvzap_press import KVzapModel

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="sdpa").eval()
    with np.load(FOLDER / "kept.npz") as fixture:
        tokens = torch.tensor(fixture["tokens"])[None].long()
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    GATES.mkdir(exist_ok=True)
    arrays = {"versions": versions()}

    for name, hidden in (("kvzap-linear", None), ("kvzap-mlp", 6)):
        for seed in itertools.count():
            kvzap(model, hidden, seed).save_pretrained(GATES / name)
            gate = KVzapModel.from_pretrained(GATES / name)
            left, scores = run_kvzap(model, tokens, gate)
            if apart(np.exp(scores), left):
                break
        arrays[f"{name}/scores"], arrays[f"{name}/head"] = scores, np.packbits(left, axis=-1)
        print(name, "seed", seed)
        if name == "kvzap-mlp":
            left, threshold = run_threshold(model, tokens, gate, scores)
            assert abs(scores - threshold).min() > 1e-3
            arrays["threshold"], arrays[f"{name}/threshold"] = np.array(threshold), np.packbits(left, axis=-1)

    for seed in itertools.count():
        gates = fast_kvzip(model, seed)
        kept = {}
        for scope in ("model", "layer"):
            kept[scope], scores = run_fast_kvzip(model, tokens, gates, scope == "layer")
        inner = slice(SINKS, T - max(1, int(0.02 * T)))
        one, layers = (x.reshape(1, -1) for x in (scores[..., inner], kept["model"][..., inner])), len(scores)
        if apart(*one) and apart(*(x[..., inner].reshape(layers, -1) for x in (scores, kept["layer"]))):
            break
    print("fast-kvzip seed", seed)
    arrays["fast-kvzip/scores"] = scores
    arrays |= {f"fast-kvzip/{scope}": np.packbits(left, axis=-1) for scope, left in kept.items()}
    target = GATES / "fast-kvzip" / "q4_dim4_sink3.safetensors"
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pickle = Path(folder) / "q4_dim4_sink3.pt"
        # Beside the gates their file has figures of NumPy.
        torch.save({"module": [gate.state_dict() for gate in gates], "loss": np.float64(0.5)}, pickle)
        line = [sys.executable, *shlex.split(CONVERT)[1:], str(pickle), str(target)]
        subprocess.run(line, check=True)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
