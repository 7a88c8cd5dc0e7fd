"""kvpress' side of `python -m benchmarks peers`; it is run by an environment that has kvpress, and by that alone.

Its argument is a JSON object: folder, prompt (token ids), budget, window, new_tokens, threads, device, dtype. It prints
one line of JSON when the model is loaded, and another for each line that it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["device"] == "cpu":
        keep_to(given["threads"])
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no answer
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
    T = prompt.shape[1]
    # kvpress keeps int(T * (1 - ratio)) tokens; the half keeps rounding away from the next number.
    press = SnapKVPress(compression_ratio=1 - (given["budget"] + 0.5) / T, window_size=given["window"])

    @torch.no_grad()
    def run() -> dict[str, Any]:
        cache, started, worked = DynamicCache(), time.perf_counter(), time.process_time()
        with press(model):
            logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        prefilled, prefill_work = time.perf_counter(), time.process_time()
        for step in range(given["new_tokens"] - 1):
            token = torch.tensor([[tokens[-1]]], device=device)
            position = torch.tensor([[T + step]], device=device)
            logits = model(token, past_key_values=cache, position_ids=position).logits
            tokens.append(int(logits[0, -1].argmax()))
        decoded, decode_work = time.perf_counter(), time.process_time()
        steps = given["new_tokens"] - 1
        return {
            "prefill_seconds": prefilled - started,
            "prefill_work": prefill_work - worked,
            "decode_seconds": (decoded - prefilled) / steps,
            "decode_work": (decode_work - prefill_work) / steps,
            "tokens": tokens,
            "held": cache.layers[0].keys.shape[2] - steps,
            "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident(),
        }

    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    print(json.dumps({"versions": versions, "python": sys.version.split()[0]}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


def keep_to(cores: int) -> None:
    """Runs this process on so many cores at most, where the system can; libraries start as many threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def peak_resident() -> int:
    """Bytes that this process has held at most, all of it: weights, cache, interpreter and libraries."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
