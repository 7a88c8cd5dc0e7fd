"""Several processes that run one command together: how they join, and how they end.

If one of them ends, the others end too, and say so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from typing import NoReturn

from models import hosts

SILENCE_SECONDS = 30  # a process that has not been heard of for so long has ended; the others then end, too
ENDED = 3  # the exit code of those others
LOST = "another process of this run has ended or cannot be reached"
TERMINATED = "this process was ended by SIGTERM; the same commands go on from what was written."
ADVICE = "its own output says why, and the same commands go on from what was written."


def join(flags: argparse.Namespace) -> None:
    """Join the other processes that the flags name, if they name any, and remove the flags.

    The output of all processes but the first is dropped; their errors are not.
    """
    address, processes, number = (vars(flags).pop(name) for name in ("coordinator", "processes", "process_id"))
    if (address, processes, number) == (None, None, None):
        return
    if address == "auto":
        address = None
    elif None in (address, processes, number):
        raise ValueError("--coordinator, --processes and --process-id belong together; give all three, or none.")
    elif not 0 <= number < processes:
        raise ValueError(f"--process-id is {number}; {processes} processes are numbered from 0.")
    elif not address.rpartition(":")[2].isdigit() or ":" not in address:
        raise ValueError(f"--coordinator is {address!r}; write it like 10.0.0.1:1234, or 'auto'.")
    import jax

    _end_on_sigterm()
    try:
        jax.distributed.initialize(
            address, processes, number, heartbeat_timeout_seconds=SILENCE_SECONDS, shutdown_timeout_seconds=60
        )
    except (ValueError, RuntimeError) as error:  # jax.errors.JaxRuntimeError is a RuntimeError
        reason = " ".join(str(error).split())
        said = f"the processes did not find one another ({reason[:200]}); is the first one running, its port open?"
        if jax.distributed.is_initialized():  # a client that is not connected; whatever asks for devices waits for it
            print(f"kvjax: error: {said}", file=sys.stderr)
            leave(2)
        raise ValueError(said) from None
    if not hosts.first():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> NoReturn:
    """End this process at once, so that the others end too: an ordinary exit would wait for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def is_of_the_lost(error: BaseException) -> bool:
    """Return whether an error of JAX's runtime says that another process cannot be reached."""
    return (
        re.search("UNAVAILABLE|DEADLINE_EXCEEDED|gloo|nccl|coordination|connection|peer", str(error), re.I) is not None
    )


def leave_the_lost(name: str, error: BaseException) -> NoReturn:
    """End this process because it has lost the others, with one sentence that has a part of what it saw."""
    seen = " ".join(str(error).split()).partition(". ")[0][:200].rstrip(".")
    print(f"{name}: error: {LOST} ({seen}); {ADVICE}", file=sys.stderr)
    leave(ENDED)


def _end_on_sigterm() -> None:
    """Have SIGTERM end this process with one sentence, whatever its main thread waits for.

    JAX's preemption service would catch the signal and let the process go on.
    """
    import jax

    jax.config.update("jax_enable_preemption_service", False)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # only a signal with a handler of Python's is written to the pipe
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    errors = sys.stderr.fileno()

    def wait() -> None:
        while os.read(reads, 1) != bytes([signal.SIGTERM]):
            pass
        os.write(errors, f"kvjax: error: {TERMINATED}\n".encode())
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
