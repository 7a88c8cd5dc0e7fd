"""Makes tests/models/kvpress/last_queries.npz: scores of ReST-KV and of DefensiveKV by their authors' code.

Run in make_kvpress.py's environment, from the repository's root, with files of two repositories:

    python -m tests.models.make_last_queries RESTKV DEFENSIVEKV

RESTKV is restkv/restkv_utils.py of github.com/an-yongqi/rest-kv at a8bb112, DEFENSIVEKV is
kvpress/presses/efficient_defensivekv_press.py of github.com/FFY0/DefensiveKV at 9251b95. What the latter imports beside
torch and transformers stands in for itself here: a base class, and a kernel for GPUs whose place its own plain code
takes. The tiny model and its prompt are those of kept.npz. The file gets, for the window 16, float32 [L, K, T - 16],

    window/KEPT, query/KEPT, wide/KEPT: ReST-KV's scores as its rule "after" and "before" has them, and with pooling
                           that widens with every position, where KEPT tokens a head stay; the mean over each group
    defensive              DefensiveKV's, before its second stage
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.models.make_kvpress import FOLDER, KEPT, fed, versions

FILE = FOLDER / "last_queries.npz"
WINDOW, STEP = 16, 3
RULES = {"window": ("after", 2000), "query": ("before", 2000), "wide": ("after", STEP)}


def imported(file: Path) -> Any:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(model: Any, tokens: Any) -> list[dict[str, Any]]:
    """Return what each layer's attention is given, with its queries, keys and values, rotated."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    given: list[dict[str, Any]] = []

    def listen(module: Any, _: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"]
        query, key, value = (
            project(hidden).view(*hidden.shape[:2], -1, module.head_dim).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
        given.append(dict(module=module, kwargs=kwargs, query=query, key=key, value=value))

    hooks = [layer.self_attn.register_forward_pre_hook(listen, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        fed(model, tokens)
    for hook in hooks:
        hook.remove()
    return given


def restkv(module: Any, layer: dict[str, Any], mode: str, scale: int, kept: int) -> Any:
    """Return one layer's pooled scores, [K, T - WINDOW]."""
    import torch

    groups = layer["query"].shape[1] // layer["key"].shape[1]
    cluster = module.RestKVCluster(
        window_size=WINDOW, max_capacity_prompt=kept, kernel_size=5, pooling="adaptive", use_wo=True, use_ema=True,
        alpha=0.3, metric_mode=mode, scale=scale,
    )  # fmt: skip
    found = []
    topk = torch.Tensor.topk
    key, value = (layer[name].repeat_interleave(groups, dim=1) for name in ("key", "value"))
    with mock.patch.object(torch.Tensor, "topk", lambda x, *a, **b: found.append(x) or topk(x, *a, **b)):
        cluster.update_kv(key, layer["query"], value, None, groups, layer["module"].o_proj.weight)
    (scores,) = found
    return scores[0].view(-1, groups, scores.shape[-1]).mean(1)


def defensive(module: Any, layer: dict[str, Any]) -> Any:
    """Return one layer's scores before the second stage, [K, T - WINDOW]."""
    import torch

    press, found = module.EfficientDefensiveKVPress(), []
    press.window_size, press.compression_ratio = WINDOW, 0.5

    def keep(values: Any, module: Any, scores: Any, bias: float, mean: Any) -> Any:
        found.append(scores[0].clone())
        return press.vwl1norm(values, module, scores, bias, mean)

    press.vwl1norm_triton = keep
    _, K, T, D = layer["key"].shape
    held = types.SimpleNamespace(head_lens=[T] * K, bsz=1, num_key_value_heads=K)
    kwargs = layer["kwargs"] | {"metadata": held}
    flat = (layer[name].reshape(-1, D) for name in ("key", "value"))
    with torch.no_grad():
        press.score(layer["module"], layer["kwargs"]["hidden_states"], *flat, None, kwargs)
    return found[0]


def main(rest: Path, press: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    for name, own in (
        ("kvpress.presses.efficient_ada_scorer_press", "EfficientAdaScorerPress"),
        ("kvpress.presses.efficient_ada_global_scorer_press", "EfficientAdaGlobalScorerPress"),
        ("kvpress.ops", None),
        ("kvpress.ops.vw_norm", "vw_l1norm"),
    ):
        sys.modules[name] = types.ModuleType(name)
        if own is not None:
            setattr(sys.modules[name], own, type(own, (), {"compression_ratio": 0.0}))
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager").eval()
    with np.load(FOLDER / "kept.npz") as fixture:
        tokens = torch.tensor(fixture["tokens"])[None].long()
    layers = inputs(model, tokens)
    arrays = {"versions": versions()}
    arrays["defensive"] = torch.stack([defensive(imported(press), layer) for layer in layers]).numpy()
    module = imported(rest)
    for name, (mode, scale) in RULES.items():
        for kept in KEPT:
            with torch.no_grad():
                scores = [restkv(module, layer, mode, scale, kept) for layer in layers]
            arrays[f"{name}/{kept}"] = torch.stack(scores).numpy()
    np.savez_compressed(FILE, **{name: x if name == "versions" else x.astype(np.float32) for name, x in arrays.items()})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
