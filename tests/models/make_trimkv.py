"""Makes tests/models/kvpress/trimkv.npz: TRIM-KV's gate, attention and eviction by its authors' code.

Run where torch is installed, from the repository's root, with a checkout of github.com/ngocbh/trimkv at 0456bc4:

    python -m tests.models.make_trimkv CHECKOUT

Three pieces of that code run by themselves: the class RetentionGate, TrimKVCache.compress_layer and
retention_gated_attention_forward. What they are given is drawn here. The file has float32 arrays,

    x, WEIGHT                   the gate's input [1, T, E] and its weights, as a RetentionGate has them
    retention                   what it predicts, [1, K, T]
    query, key, value           [1, N or K, T, D]
    output, number              what attention returns, [1, T, N, D], and the sums of its shares, [1, K, T]
    kept/STEP                   positions that stay of each head after STEP buffers, int32 [K, up to MEMORY]
"""

import ast
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.make_kvpress import FOLDER

FILE = FOLDER / "trimkv.npz"
T, E, HIDDEN, K, N, D = 40, 16, 8, 2, 4, 8
MEMORY, BUFFER = 12, 5
WEIGHTS = {
    "linear1.weight": "input", "linear1.bias": "input_bias", "linear2.weight": "output", "bias": "output_bias",
}  # fmt: skip


def piece(file: Path, *names: str) -> Any:
    """Return a class or a function of a file, or a method, by itself."""
    import torch

    body = ast.parse(file.read_text()).body
    found: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    found["ACT2FN"] = {"silu": torch.nn.functional.silu}
    for name in names:
        node = next(node for node in body if getattr(node, "name", "") == name)
        if isinstance(node, ast.ClassDef) and name != names[-1]:
            body = node.body
            continue
        if isinstance(node, ast.FunctionDef):  # whose types are named by what the file imports
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
        exec(compile(ast.Module([node], []), str(file), "exec"), found)
    return found[names[-1]]


def kept(compress: Any, retention: Any) -> dict[str, np.ndarray]:
    """Return which positions stay while the tokens come in buffers."""
    import torch

    nothing = torch.zeros(1, K, 0)
    held = types.SimpleNamespace(
        key_cache=[nothing[..., None]], value_cache=[nothing[..., None]], retention_weights=[nothing],
        kv_positions=[nothing.long()], seen=0,
    )  # fmt: skip
    held.get_seq_length = lambda _: held.seen
    found = {}
    for number, start in enumerate(range(0, T, BUFFER), 1):
        new = torch.arange(start, start + BUFFER).expand(1, K, -1)
        held.kv_positions[0] = torch.cat([held.kv_positions[0], new], dim=-1)
        held.retention_weights[0] = torch.cat([held.retention_weights[0], retention[..., start : start + BUFFER]], -1)
        held.key_cache[0] = held.value_cache[0] = held.kv_positions[0][..., None].float()
        held.seen = start + BUFFER
        if held.kv_positions[0].shape[-1] > MEMORY:
            compress(held, 0, MEMORY)
        found[f"kept/{number}"] = held.kv_positions[0][0].numpy().astype(np.int32)
    return found


def main(checkout: Path) -> None:
    import torch

    torch.manual_seed(0)
    source = checkout / "src" / "trimkv"
    shape = types.SimpleNamespace(
        hidden_size=E, retention_gate_intermediate_size=HIDDEN, num_key_value_heads=K, hidden_act="silu",
        retention_gate_bias_init=2.0, initializer_range=0.5,
    )  # fmt: skip
    gate = piece(source / "models" / "qwen3" / "modeling_trimkv_qwen3.py", "RetentionGate")(shape)
    attention = source / "attn" / "eager_attn.py"
    attend = piece(attention, "power_stair", "repeat_kv", "retention_gated_attention_forward")
    compress = piece(source / "cache_utils.py", "TrimKVCache", "compress_layer")
    x, query = torch.randn(1, T, E), torch.randn(1, N, T, D)
    key, value = torch.randn(2, 1, K, T, D)
    mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        retention = gate(x).transpose(1, 2)
        module = types.SimpleNamespace(num_key_value_groups=N // K, training=True)
        output, _, number = attend(module, query, key, value, mask, retention, D**-0.5)
        arrays = {"x": x, "retention": retention, "query": query, "key": key, "value": value, "output": output}
        arrays |= {name: gate.state_dict()[name] for name in WEIGHTS} | {"number": number}
    made = {name: tensor.numpy() for name, tensor in arrays.items()} | kept(compress, retention)
    np.savez_compressed(FILE, versions=np.array([f"torch {torch.__version__}"]), **made)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
