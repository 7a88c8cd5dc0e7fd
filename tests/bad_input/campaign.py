"""What every case of the campaign is held against: one clear sentence out of our own code, and nothing destroyed."""

import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels_pallas", "kvjax", "models", "evals", "train", "benchmarks", "papers")


def cases(file: str) -> Iterator[tuple[str, str, str]]:
    """The head of each section of a table, each of its cases, and what is said of it: "" where that is not known."""
    parts = re.split(r"^(.*):$", (Path(__file__).parent / file).read_text("utf-8"), flags=re.MULTILINE)[1:]
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        for line in body.strip().split("\n"):
            for own in [line] if " -> " in line else line.split(" | "):
                case, _, said = own.partition(" -> ")
                yield head, case.strip(), said


def calls(file: str) -> list[Any]:
    """Parameters of a test: each case in its head's place for it, to be evaluated, and what is said of it."""
    whole = [(head.replace("{}", case), said) for head, case, said in cases(file)]
    return [pytest.param(call, said, id=ascii(call)[1:61]) for call, said in whole]


def refused(call: Callable[[], Any]) -> Exception:
    """The error with which a function refuses its input; it is raised by us, not by what we call."""
    with pytest.raises((ValueError, TypeError, OSError, NotImplementedError)) as caught:
        call()
    check_sentence(caught.value)
    return caught.value


def check_sentence(error: BaseException) -> None:
    """One line of several words, raised in one of our packages; the system's own words are good for a file."""
    text = str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(Path(last.filename).is_relative_to(ROOT / package) for package in PACKAGES)
    meant = ours and str(last.line).startswith("raise")  # not what an operation of Python's said by chance
    of_a_file = isinstance(error, OSError) and error.errno is not None
    assert meant or of_a_file, f"{last.filename}:{last.lineno}: {last.line}: {type(error).__name__}: {text}"
    assert "\n" not in text, text
    assert len(text.split()) >= 4, text
    assert "Traceback" not in text, text


def state_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The files below a folder with what tells that one was written or replaced."""
    found = {}
    for place, _, names in os.walk(folder):  # not pathlib's: it runs twice in a test
        for path in (os.path.join(place, name) for name in names):
            if not os.path.islink(path):
                stat = os.stat(path)
                found[os.path.relpath(path, folder)] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


class Terminal:
    """Runs commands as a shell would, and looks at how they end.

    Args:
        capsys: pytest's.
        raised: where the fixture keeps the errors that commands ended with.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], raised: list[BaseException]):
        self.capsys, self.raised = capsys, raised

    def refuses(self, command: Callable[[list[str]], int], arguments: list[str], code: int = 2) -> str:
        """The one line on standard error with which a command ends."""
        self.capsys.readouterr()
        try:
            ended = command(arguments)
        except SystemExit as exit_:
            ended = exit_.code
        _, err = self.capsys.readouterr()
        assert ended == code, f"exit code {ended}: {err[-2000:]}"
        # No progress bar, since nothing was begun; in brackets a chat says how it goes on.
        lines = [line for line in err.splitlines() if line.strip() and not line.startswith("[")]
        assert len(lines) == 1, err[-2000:]
        for error in self.raised:
            check_sentence(error)
        return lines[0]
