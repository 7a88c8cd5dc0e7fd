"""Functions that run in a process of their own, with bounded memory and time: for what strangers have written.

Arguments and results cross as JSON. The process starts with the first call, in a tenth of a second, and serves the next
ones. It runs this file, which therefore imports no package of ours, and a file with the function, which imports little.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Limited:
    """A function of a file that imports none of our packages, in a process that ends where it takes too much.

    Args:
        file: the file that defines the function.
        function: its name.
        seconds: the most processor time that one call may take.
        gib: the most memory that the process may take, in GiB. macOS does not enforce it.

    Raises:
        ValueError: by a call: the function raised an error, whose message it has, or took more than it may.
        RuntimeError: the file cannot be imported.

    Example:
        >>> from models.chat_templates import __file__ as file
        >>> from models.limited import Limited
        >>> render = Limited(file, "render", seconds=1, gib=1)
        >>> render(template="{{ 'x' * 3 }}", values={})
        'xxx'
        >>> render(template="{{ 'x'.ljust(10 ** 12) }}", values={})
        Traceback (most recent call last):
        ValueError: it took more than 1 GiB of memory
    """

    def __init__(self, file: str | Path, function: str, *, seconds: int, gib: int):
        self._file, self._function, self._seconds, self._gib = file, function, seconds, gib
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        atexit.register(self.close)

    def __call__(self, **arguments: Any) -> Any:
        request = json.dumps(arguments, default=dict)  # a dict is the JSON of any mapping
        with self._lock:
            process = self._started()
            try:
                reply = self._exchange(process, request)
            except BaseException:  # an interrupt: the next call must not get this one's reply
                self.close()
                raise
            if not reply:
                status = process.wait()
                self.close()
                if status == -signal.SIGPROF:
                    raise ValueError(f"it took more than {self._seconds} s of processor time")
                raise ValueError(f"its process ended with status {status}")
        result, error = json.loads(reply)
        if error is not None:
            raise ValueError(error)
        return result

    def close(self) -> None:
        """End the process, if there is one; the next call starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        """Return the process; a fork of this one, which shares its pipes, starts its own."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-P", __file__, str(self._file), self._function, self._seconds, self._gib]
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for us
            )
            if not self._exchange(process, ""):
                raise RuntimeError(f"the process that runs {self._file} did not start; its own words are above.")
            self._process, self._owner = process, os.getpid()
        return self._process

    @staticmethod
    def _exchange(process: subprocess.Popen[str], request: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its reply is empty, then
            process.stdin.write(request + "\n")
            process.stdin.flush()
        return process.stdout.readline()


def _serve(file: str, name: str, seconds: int, gib: int) -> None:
    """Answer requests until there are no more: a line with [result, null] or [null, error] for each."""
    import resource  # Windows has none

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever started us may ignore or block it, which is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # what the function prints is no reply
        function = runpy.run_path(file)[name]
        sys.stdin.readline()  # asks whether the file could be imported
        reply = b""
        while True:
            replies.write(reply + b"\n")
            replies.flush()
            if not (line := sys.stdin.readline()):
                return
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, even within one operation
            try:
                reply = json.dumps([function(**json.loads(line)), None]).encode()
            except MemoryError:
                reply = json.dumps([None, f"it took more than {gib} GiB of memory"]).encode()
            except Exception as error:
                reply = json.dumps([None, " ".join(str(error).split())]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
