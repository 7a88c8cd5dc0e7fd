"""kvpress' side of `python -m benchmarks peers`; it runs only in an environment that has kvpress.

Its argument is a JSON object: folder, prompt (token ids), budget (null for transformers without kvpress), window,
new_tokens, threads, device, dtype. It prints one line of JSON when the model is loaded, and one for each line that it
reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

from benchmarks.peer_timing import keep_to, peak_resident, serve, timing


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["device"] == "cpu":
        keep_to(given["threads"])
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print, but only answers go to standard output
        import torch  # type: ignore
        from kvpress import SnapKVPress  # type: ignore
        from transformers import AutoModelForCausalLM, DynamicCache  # type: ignore
        from transformers.utils import logging  # type: ignore

        logging.disable_progress_bar()
        torch.set_num_threads(given["threads"])
        device = torch.device("cuda" if given["device"] == "gpu" else "cpu")
        model = AutoModelForCausalLM.from_pretrained(
            given["folder"], dtype=getattr(torch, given["dtype"]), attn_implementation="sdpa"
        )
        model = model.to(device).eval()
    prompt = torch.tensor([given["prompt"]], device=device)
    T, steps = prompt.shape[1], given["new_tokens"] - 1

    def pressed() -> Any:
        if given["budget"] is None:
            return contextlib.nullcontext()
        # kvpress keeps int(T * (1 - ratio)) tokens; the added half protects the number against rounding.
        ratio = 1 - (given["budget"] + 0.5) / T
        return SnapKVPress(compression_ratio=ratio, window_size=given["window"])(model)

    @torch.no_grad()
    def run() -> dict[str, Any]:
        cache = DynamicCache()
        positions = iter(range(T, T + steps))

        def begin() -> int:
            with pressed():
                logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())

        def step(token: int) -> int:
            position = torch.tensor([[next(positions)]], device=device)
            tokens = torch.tensor([[token]], device=device)
            return int(model(tokens, past_key_values=cache, position_ids=position).logits[0, -1].argmax())

        found = timing(begin, step, steps)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident()
        return {**found, "held": cache.layers[0].keys.shape[2] - steps, "peak_bytes": peak}

    serve(run, {name: version(name) for name in ("kvpress", "transformers", "torch")}, answers)


if __name__ == "__main__":
    main()
