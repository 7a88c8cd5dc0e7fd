"""Kills a training run again and again and compares its end: `python tests/train/kill_training.py --trainer scorer`.

The run is killed at random moments (seeded): while it starts, between steps, and while a checkpoint is being written;
each time the same command goes on. Its end must be that of a run without a break, bit for bit. With --processes 2
--devices 4 that many processes with that many CPU devices each train together and die together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, this file's own folder stands there
MOMENTS = ("save", "step", "start")
TRAINERS = {  # the file that each writes, and the flags of its own
    "butler": ("butler.safetensors", []),
    "scorer": ("scorer.safetensors", []),
    "finetune": ("model.safetensors", ["--policy", "tova", "--budget", "16", "--block", "16"]),
}


def make_model(folder: Path) -> None:
    """A small decoder with random weights, and the tokenizer of the model that ships."""
    from flax import nnx

    import models

    shipped, tokenizer = models.load("retriever")
    config = models.Config(
        shipped.config.vocab_size, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=256,
        bos=shipped.config.bos, eos=shipped.config.eos,
    )  # fmt: skip
    models.save(folder, models.Decoder(config, rngs=nnx.Rngs(0)), tokenizer.backend)


class Run:
    """The processes of one run, and where they write."""

    def __init__(self, options: argparse.Namespace, name: str, processes: int, devices: int):
        model, self.out = options.folder / "model", options.folder / name
        # A program compiled once serves every start: a kill then finds training, not compiling.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(model / "compiled"), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        words = f"-m train.{options.trainer} --data python --seq-len 32 --batch 8 --tokens {options.steps * 8 * 32} "
        words += f"--eval-rows 8 --log-every 1 --lr 0.01 --save-every {options.save_every} --eval-every 0"
        command = [sys.executable, *words.split(), "--mesh", f"data={processes * devices}"]
        command += ["--model", str(model), "--out", str(self.out), *TRAINERS[options.trainer][1]]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        joined = ["--coordinator", address, "--processes", str(processes), "--process-id"] if processes > 1 else []
        self.output = self.out.with_suffix(".txt").open("a+")
        each = dict(cwd=ROOT, env=environment, stdout=self.output, stderr=subprocess.STDOUT)
        self.processes = [
            subprocess.Popen([*command, *joined, *([str(index)] if joined else [])], **each)
            for index in range(processes)
        ]

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait_while(self, condition: Callable[[], bool]) -> None:
        while self.running() and condition():
            time.sleep(0.001)

    def die(self, moment: str, rng: random.Random, start_up: float, span: float) -> bool:
        """Kill the run at a moment; say whether it was still running."""
        begun, before, old = time.monotonic(), self.logged(), self.unfinished_saves()
        if moment == "start":
            end = begun + rng.uniform(0, start_up)  # at the first step, should the machine be faster this time
            self.wait_while(lambda: time.monotonic() < end and self.logged() == before)
        elif moment == "save":
            self.wait_while(lambda: not self.unfinished_saves() - old)
            time.sleep(rng.uniform(0, 0.02))
        else:
            self.wait_while(lambda: self.logged() == before)
            time.sleep(rng.uniform(0, span))
        alive = self.running()
        for process in self.processes:
            process.kill()
            process.wait()
        return alive

    def finish(self) -> Run:
        if any([process.wait() for process in self.processes]):
            self.output.seek(0)
            raise SystemExit(f"training failed:\n{self.output.read()[-4000:]}")
        return self

    def unfinished_saves(self) -> set[str]:
        return {path.name for path in (self.out / "checkpoints").glob("*orbax-checkpoint-tmp*")}

    def logged(self) -> int:
        log = self.out / "log.jsonl"
        return log.stat().st_mtime_ns if log.exists() else 0

    def log(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "log.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.log() if "loss" in line]

    def result(self, file: str) -> tuple[bytes, int, list[float]]:
        """Return the file that was trained, the digest of the whole last state, and all losses."""
        newest = max((self.out / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
        digest = json.loads((newest / "progress/metadata").read_text())["digest"]
        return (self.out / file).read_bytes(), digest, self.losses()


def main(arguments: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--trainer", choices=TRAINERS, default="butler")
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--steps", type=int, default=400)
    flags.add_argument("--save-every", type=int, default=3)
    flags.add_argument("--processes", type=int, default=1)
    flags.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = flags.parse_args(arguments)
    rng = random.Random(options.seed)
    options.folder = options.folder or Path(tempfile.mkdtemp())
    options.folder.mkdir(parents=True, exist_ok=True)
    make_model(options.folder / "model")
    sizes, file = (options.processes, options.devices), TRAINERS[options.trainer][0]

    begun = time.time()
    whole = Run(options, "whole", *sizes).finish()
    times = [line["time"] for line in whole.log()]
    start_up, span = times[0] - begun, (times[-1] - times[0]) / (2 * max(options.kills, 1))
    killed = 0
    while killed < options.kills:
        moment = rng.choice(MOMENTS) if killed else "save"
        run = Run(options, "killed", *sizes)
        if not run.die(moment, rng, start_up, span):
            break
        killed += 1
        print(f"killed ({moment}); checkpoints half written: {len(run.unfinished_saves())}", flush=True)
    found = Run(options, "killed", *sizes).finish().result(file)
    same = found == whole.result(file)
    print(f"{killed} kills; file, state and losses are {'the same bit for bit' if same else 'NOT the same'}")

    close = True
    if options.processes * options.devices > 1:
        alone = Run(options, "single", 1, 1).finish().losses()
        worst = max(abs(one - other) / abs(one) for one, other in zip(alone, whole.losses(), strict=True))
        close = worst < 1e-3
        print(f"one process with one device: losses differ by {worst:.1e} of themselves at most")
    return 0 if same and close and killed == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
