"""llama.cpp's side of `python -m benchmarks peers`; it runs only in an environment that has llama-cpp-python.

Its argument is a JSON object: gguf (the model's file), wide (null for its weights as they are stored, or a file to
write them to as float32), prompt (token ids), new_tokens, threads. It prints lines as benchmarks/peer_kvpress.py does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peer_timing import keep_to, peak_resident, serve, timing


def main() -> None:
    given = json.loads(sys.argv[1])
    keep_to(given["threads"])
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        import llama_cpp  # type: ignore
        import numpy as np

        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, None)
        file = Path(given["wide"] or given["gguf"])
        if not file.exists():
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype, options.allow_requantize, options.nthread = 0, True, given["threads"]  # 0: all float32
            if llama_cpp.llama_model_quantize(given["gguf"].encode(), str(file).encode(), options):
                raise SystemExit(f"llama.cpp cannot write the weights of {given['gguf']} as float32.")
        prompt, steps = given["prompt"], given["new_tokens"] - 1
        model = llama_cpp.Llama(
            str(file), n_ctx=len(prompt) + steps, n_threads=given["threads"], n_threads_batch=given["threads"],
            verbose=False,
        )  # fmt: skip

    def best(tokens: list[int]) -> int:
        model.eval(tokens)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())

    def run() -> dict[str, Any]:
        model.reset()
        found = timing(lambda: best(prompt), lambda token: best([token]), steps)
        return {**found, "held": model.n_tokens - steps, "peak_bytes": peak_resident()}

    serve(run, {"llama-cpp-python": version("llama-cpp-python")}, answers)


if __name__ == "__main__":
    main()
