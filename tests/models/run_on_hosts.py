"""One of several processes that load a model, generate and evaluate together.

    python tests/models/run_on_hosts.py MODEL PROMPTS OUT --coordinator localhost:1234 --processes 2 --process-id 0

MODEL has eight heads. Each process writes the bytes that it read to bytes-I.json in OUT; the first prints what the
commands print.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, this file's own folder stands there

import jax  # noqa: E402
import numpy as np  # noqa: E402

import models  # noqa: E402
from evals.__main__ import main as evaluate  # noqa: E402
from models import commands, mesh  # noqa: E402
from models.checkpoint import Tensor  # noqa: E402
from models.commands import batch, distributed, generate  # noqa: E402
from models.commands.shared_flags import HOSTS, add_shared_flags  # noqa: E402
from papers.__main__ import main as experiment  # noqa: E402
from train import finetune  # noqa: E402

COMMANDS = (
    (
        experiment,
        "fidelity --model {model} --policies h2o@layer(cap=2) --budgets 32 --lengths 128 --samples 2 --facts 2 "
        "--batch 2 --mesh data=2,tensor=4 --json {out}/fidelity.json",
    ),
    (
        experiment,
        "coref --model {model} --select h2o,quest --mode teacher,generate --samples 2 --batch 2 --mesh tensor=8 "
        "--json {out}/coref.json",
    ),
    (
        batch.main,
        "docs/examples/prompts.jsonl --out {out}/answers.jsonl --model {model} --rows 2 --policy h2o "
        "--budget 48 --block 32 --max-new-tokens 5 --temperature 0.5 --mesh tensor=8",
    ),
    (
        finetune.main,
        "--model {model} --data python --out {out}/tuned --seq-len 32 --batch 2 --tokens 128 --eval-rows 2 "
        "--policy tova --budget 16 --block 16 --mesh data=2,tensor=4",
    ),
)


def work(model: Path, prompts: Path, out: Path, answers_only: bool) -> None:
    """Print answers to the prompts, and write what other commands make of the model to ``out``."""
    answers = ["--prompts", prompts, "--max-new-tokens", 6, "--block", 32, "--temperature", 0.5, "--mesh", "tensor=8"]
    assert generate.main([*map(str, [model, *answers])]) == 0
    if answers_only:
        return
    task = ["--tasks", "niah_single_1", "--lengths", 256, "--samples", 4, "--batch", 2]
    setting = ["--policies", "snapkv+caote", "--budgets", 96, "--when", "block", "--mesh", "data=2,tensor=4"]
    assert evaluate([*map(str, ["ruler", "--model", model, *task, *setting, "--out", out / "ruler"])]) == 0
    for main, line in COMMANDS:
        assert main([word.format(model=model, out=out) for word in line.split()]) == 0, line


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Collect the bytes of each part of a tensor that is read meanwhile."""
    sizes: list[int] = []
    read_tensor = mesh._read_tensor

    def counted(source: str, tensor: Tensor, *more: Any) -> None:
        def read(window: Any) -> np.ndarray:
            sizes.append((part := tensor.read(window)).nbytes)
            return part

        read_tensor(source, tensor._replace(read=read), *more)

    with mock.patch.object(mesh, "_read_tensor", counted):
        yield sizes


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "prompts", "out"):
        flags.add_argument(name, type=Path)
    flags.add_argument("--answers-only", action="store_true", help="leave the other commands out")
    add_shared_flags(flags, *HOSTS)
    given = flags.parse_args()
    distributed.join(given)
    with bytes_read() as read:
        models.load(given.model, mesh=models.parse_mesh("tensor=8"))
    (given.out / f"bytes-{jax.process_index()}.json").write_text(json.dumps(sum(read)))
    return commands.run(lambda: work(given.model, given.prompts, given.out, given.answers_only), "run_on_hosts")


if __name__ == "__main__":
    raise SystemExit(main())
