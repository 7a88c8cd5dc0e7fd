"""Kills `python -m models.batch` again and again: `python tests/models/kill_batch.py --kills 20`.

The same command is started until it ends by itself, and killed with SIGKILL at random moments (seeded) before. Then
each prompt must have exactly one answer, the one of a run that was not killed, and the next file begins, until there
were as many kills as asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["--rows", "3", "--policy", "snapkv+caote", "--budget", "64", "--max-new-tokens", "40"]


def answers(file: Path) -> list[dict]:
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda answer: answer["line"])


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--prompts", type=int, default=60)
    flags.add_argument("--seed", type=int, default=0)
    given = flags.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [{"prompt": f"The code of lamp {i} is {1000 + i}. " * rng.randint(1, 9)} for i in range(given.prompts)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "KVJAX_COMPILATION_CACHE": str(folder / "compiled")}

        def start(out: str) -> subprocess.Popen:
            command = [sys.executable, "-m", "models.batch", str(folder / "prompts.jsonl"), "--out", str(folder / out)]
            return subprocess.Popen([*command, *SETTINGS], env=environment, stdout=subprocess.DEVNULL)

        begun = time.monotonic()
        assert start("whole.jsonl").wait() == 0
        seconds, number, found = time.monotonic() - begun, 0, []
        while True:
            cut = folder / f"cut{number}.jsonl"
            run = start(cut.name)
            try:
                code = run.wait(rng.uniform(0.2, 0.7) * seconds if len(found) < given.kills else None)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                run.wait()
                found.append(cut.read_bytes().count(b"\n") if cut.exists() else 0)
                continue
            if code or answers(cut) != answers(folder / "whole.jsonl"):
                print(f"OTHER ANSWERS in file {number}, after {len(found)} kills")
                return 1
            number += 1
            if len(found) >= given.kills:
                break
        print(f"{len(found)} kills of {number} files, with {found} answers in the file: the same answers")
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
