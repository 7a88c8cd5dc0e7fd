"""Kills a training run again and again and compares its end: `python tests/train/kill_training.py --trainer scorer`.

A small model, its predictor or its scorer is trained once without a break. Then the same run is killed with SIGKILL at
random moments (seeded): while it starts, between steps, and while a checkpoint is being written; each time the same
command goes on. The final parameters, and the optimiser's state with them, must be the uninterrupted run's bit for bit.
With --processes 2 --devices 4 that many processes with that many CPU devices each train together and die together;
their losses are also compared with those of one process with one device.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, this file's own folder stands there
MOMENTS = ("save", "step", "start")
TRAINERS = {  # the file that each writes, and the flags of its own
    "butler": ("butler.safetensors", ["--eval-every", "0"]),
    "scorer": ("scorer.safetensors", ["--eval-every", "0"]),
    "finetune": ("model.safetensors", ["--policy", "tova", "--budget", "16", "--block", "16", "--eval-every", "0"]),
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

    def __init__(self, trainer: str, model: Path, out: Path, steps: int, save_every: int, processes: int, devices: int):
        self.trainer, self.out = trainer, out
        # A program compiled once serves every start: a kill then finds training, not compiling.
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(model / "compiled"), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [sys.executable, "-m", f"train.{trainer}", "--model", str(model), "--data", "python"]
        command += ["--out", str(out), *TRAINERS[trainer][1]]
        command += ["--seq-len", "32", "--batch", "8", "--tokens", str(steps * 8 * 32), "--save-every", str(save_every)]
        command += ["--eval-rows", "8", "--log-every", "1", "--lr", "0.01"]
        command += ["--mesh", f"data={processes * devices}"]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        self.output = out.with_suffix(".txt").open("a+")
        self.processes = []
        for index in range(processes):
            joined = ["--coordinator", address, "--processes", str(processes), "--process-id", str(index)]
            alone = command + (joined if processes > 1 else [])
            options = dict(cwd=ROOT, env=environment, stdout=self.output, stderr=subprocess.STDOUT)
            self.processes.append(subprocess.Popen(alone, **options))

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def finish(self) -> None:
        codes = [process.wait() for process in self.processes]
        if any(codes):
            self.output.seek(0)
            raise SystemExit(f"training ended with {codes}:\n{self.output.read()[-4000:]}")

    def unfinished_saves(self) -> set[str]:
        return {path.name for path in (self.out / "checkpoints").glob("*orbax-checkpoint-tmp*")}

    def logged(self) -> int:
        log = self.out / "log.jsonl"
        return log.stat().st_mtime_ns if log.exists() else 0


def die(run: Run, moment: str, rng: random.Random, start_up: float, span: float) -> bool:
    """Kills a run at a moment; whether it was still running."""
    begun, before = time.monotonic(), run.logged()
    if moment == "start":
        end = begun + rng.uniform(0, start_up)  # at the first step, should the machine be faster this time
        while run.running() and time.monotonic() < end and run.logged() == before:
            time.sleep(0.005)
    elif moment == "save":
        rest = rng.uniform(0, 0.02)
        old = run.unfinished_saves()
        while run.running() and not run.unfinished_saves() - old:
            time.sleep(0.0005)
        time.sleep(rest)
    else:
        while run.running() and run.logged() == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, span))
    alive = run.running() and time.monotonic() > begun
    run.kill()
    return alive


def result(trainer: str, out: Path) -> tuple[bytes, int]:
    """The file that was trained, and the digest of the whole last state."""
    newest = max((out / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return (out / TRAINERS[trainer][0]).read_bytes(), json.loads((newest / "progress/metadata").read_text())["digest"]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


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
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")

    def start(name: str, processes: int = options.processes, devices: int = options.devices) -> Run:
        sizes = (options.steps, options.save_every, processes, devices)
        return Run(options.trainer, folder / "model", folder / name, *sizes)

    begun = time.time()
    start("whole").finish()
    times = [json.loads(line)["time"] for line in (folder / "whole" / "log.jsonl").read_text().splitlines()]
    start_up, span = times[0] - begun, (times[-1] - times[0]) / (2 * max(options.kills, 1))
    print(f"uninterrupted: first step after {start_up:.1f} s, {len(losses(folder / 'whole'))} steps", flush=True)

    killed = dict.fromkeys(MOMENTS, 0)
    during_save = 0
    while sum(killed.values()) < options.kills:
        moment = MOMENTS[0] if sum(killed.values()) == 0 else rng.choice(MOMENTS)
        run = start("killed")
        if not die(run, moment, rng, start_up, span):
            break
        killed[moment] += 1
        during_save += bool(run.unfinished_saves())
        done = losses(run.out) if (run.out / "log.jsonl").exists() else []
        print(f"killed ({moment}), {len(done)} steps logged", flush=True)
    start("killed").finish()
    ends = [(result(options.trainer, folder / name), losses(folder / name)) for name in ("whole", "killed")]
    same = ends[0] == ends[1]
    kinds = ", ".join(f"{count} at {moment}" for moment, count in killed.items())
    print(f"{sum(killed.values())} kills ({kinds}), {during_save} of them left a checkpoint half written")
    print(f"parameters, optimiser state and losses are {'the same bit for bit' if same else 'NOT the same'}")

    close = True
    if options.processes * options.devices > 1:
        start("single", 1, 1).finish()
        one, many = losses(folder / "single"), losses(folder / "whole")
        worst = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
        close = worst < 1e-3
        print(f"one process with one device: losses differ by {worst:.1e} of themselves at most")
    return 0 if same and close and sum(killed.values()) == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
