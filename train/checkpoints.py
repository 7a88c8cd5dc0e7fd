"""Checkpoints of a training run: Orbax's manager, made safe for runs that are killed.

A checkpoint holds a state (a NamedTuple of arrays), the run's progress, and a digest of every bit of the state.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from models import hosts


class Progress(NamedTuple):
    """The progress of a run: the steps done, the data's position after them, and the seconds that they took."""

    step: int
    position: dict[str, Any] | None
    seconds: float


class Checkpoints:
    """Orbax's manager, made safe for killed runs: checkpoints have digests, and the newest whole one is restored."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]):
        self.folder, self.say = (folder / "checkpoints").absolute(), say
        unfinished = self.folder.glob("*orbax-checkpoint-tmp*")
        self.cut_short = sorted({path.name.partition(".")[0] for path in unfinished})
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def restore[S: NamedTuple](self, state: S, start: Progress) -> tuple[S, Progress]:
        """Return the newest whole checkpoint, or the given start; damaged ones are moved aside, never deleted."""
        for number in self.cut_short:
            self.say(f"the checkpoint of step {number} was cut short while it was written; it is ignored")
        make: Any = type(state)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                items = dict(state=ocp.args.StandardRestore(target), progress=ocp.args.JsonRestore())
                restored = self.manager.restore(step, args=ocp.args.Composite(**items))
                found, progress = make(**restored["state"]), restored["progress"]
                if progress.pop("digest") != digest(found):
                    raise ValueError("its digest differs")
                self.say(f"resuming from the checkpoint of step {step}")
                return found, Progress(**progress)
            except Exception as error:  # Orbax, TensorStore and the disk have no common base
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                aside = self.folder.parent / "damaged" / f"{step}-{time.time_ns()}"
                self.say(f"the checkpoint of step {step} is damaged ({reason}); moved to {aside}")
                if hosts.first():
                    aside.parent.mkdir(exist_ok=True)
                    os.replace(self.folder / str(step), aside)
                if jax.process_count() > 1:
                    multihost_utils.sync_global_devices("moved aside")
                self.manager.reload()
        if self.cut_short or (self.folder.parent / "damaged").exists():
            self.say("no checkpoint is whole; starting again")
        return state, start

    def save(self, state: NamedTuple, progress: Progress) -> None:
        """Start to write a checkpoint, once the previous one is written."""
        try:
            self.manager.save(
                progress.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),
                    progress=ocp.args.JsonSave(progress._asdict() | {"digest": digest(state)}),
                ),
            )
        except Exception as error:
            raise self._unwritten(error) from None

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._unwritten(error) from None

    def close(self) -> None:
        """Wait until the last checkpoint is on disk, and end."""
        self.wait()
        self.manager.close()

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint on disk, None without one."""
        self.manager.reload()
        return max(self.manager.all_steps(), default=None)

    def _unwritten(self, error: Exception) -> OSError:
        reason = " ".join(str(error).split())[:160]
        kept = self.newest()
        last = "none was written before" if kept is None else f"that of step {kept} is kept"
        return OSError(
            f"a checkpoint could not be written to {self.folder} ({type(error).__name__}: {reason}); {last}. Make room "
            "and run the same command again to resume."
        )


def digest(state: Any) -> int:
    """Return a checksum of every bit of a state."""
    total = 0
    for leaf in jax.tree.leaves(state):
        total = zlib.crc32(np.ascontiguousarray(hosts.fetched(leaf)).view(np.uint8).data, total)
    return total
