"""The folder of a training run: whose run it is (run.json), and its log (log.jsonl and TensorBoard's events)."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from tensorboardX import SummaryWriter

from models import hosts
from models.files import check_folder, replacing, write_json

RUN_FILE = "run.json"


def check_run(folder: Path, run: dict[str, Any], files: Sequence[str], resume: bool, *, flag: str = "--out") -> None:
    """Check that a folder is empty or of the same run.

    Args:
        run: what describes the run, for run.json.
        files: the names of the files that the run writes for what it trains.
        resume: whether a run in the folder is to be resumed; else another one may be there.
        flag: the command's flag that names the folder.

    Raises:
        ValueError: the folder is a file, holds another run (the message says what differs), or holds ``files`` that no
            run in it made.
    """
    record = folder / RUN_FILE
    check_folder(folder)
    run = json.loads(json.dumps(run))
    try:
        earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    except (ValueError, UnicodeDecodeError):
        earlier = {}
    if isinstance(earlier, dict):
        earlier.pop("made", None)
    there = [name for name in (*files, "checkpoints", "log.jsonl", "summary.json") if (folder / name).exists()]
    if earlier is None and there:
        raise ValueError(f"{folder} holds {', '.join(there)}, which no run in this folder made; choose another {flag}.")
    # A setting that is not there is one that was added since, and None.
    if earlier is not None and resume and (differing := "; ".join(_differences(earlier, run))):
        raise ValueError(f"{folder} holds another run ({differing}): choose another {flag}, or --resume never.")


def begin_run(folder: Path, run: dict[str, Any], files: Sequence[str], resume: bool, facts: dict[str, Any]) -> None:
    """Record a folder's run; without ``resume``, delete what an earlier run left in it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("run checked")
    if hosts.first():
        if not resume and (folder / RUN_FILE).exists():
            for name in ("checkpoints", "damaged", "events"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("log.jsonl", "summary.json", *files):
                (folder / name).unlink(missing_ok=True)
        write_json(folder / RUN_FILE, {**run, "made": facts})
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("run recorded")


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """List the differences between two trees of dictionaries, each as "name A there, B here"."""
    if isinstance(there, dict | None) and isinstance(here, dict | None):
        before, now = there or {}, here or {}
        return [
            line
            for key in dict.fromkeys([*before, *now])
            for line in _differences(before.get(key), now.get(key), f"{name} {key}".strip())
        ]
    if there == here:
        return []
    return [f"{name} {_brief(there)} there, {_brief(here)} here"]


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:28] + " ... " + text[-28:]


class Log:
    """log.jsonl and TensorBoard's events; both drop the steps after the one that a run resumes from."""

    def __init__(self, folder: Path, step: int, writes: bool):
        self.path, self.writes = folder / "log.jsonl", writes
        if not writes:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        with replacing(self.path) as temporary:  # a kill may have left half a line at the end
            temporary.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step), encoding="utf-8")
        self.events = SummaryWriter(str(folder / "events"), purge_step=step + 1)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writes:
            self.events.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write a line of scalars by name."""
        if not self.writes:
            return
        for name, value in values.items():
            self.events.add_scalar(name, value, step)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values, "time": round(time.time(), 3)}) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
