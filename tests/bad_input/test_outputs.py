"""Disks that are full, folders that refuse, Ctrl-C while a file is written: what was good stays as it was."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import models
from evals import perplexity, results
from models import commands, files
from tests.bad_input.campaign import state_of
from tests.bad_input.test_functions import model

pytestmark = pytest.mark.bad_input

RECORD = {"task": "vt", "sample": 0, "score": 1.0}


def add_record(folder: Path) -> None:
    with results.Results(folder / "run", "ruler", {}, "python -m evals ruler") as store:
        store.add([RECORD | {"sample": number, "answer": "x" * 9000} for number in range(3)])


WRITERS: dict[str, Callable[[Path], Any]] = {
    "write_json": lambda folder: files.write_json(folder / "figures.json", {"figure": "x" * 9000}),
    "models.save": lambda folder: models.save(folder / "model", model()),
    "a picture": lambda folder: picture(folder / "picture.png"),
    "results": add_record,
}


def picture(path: Path) -> None:
    rows = [
        {"select": "full", "sparsity": 0.0, "perplexity": 2.0, "low": None, "high": None, "increase": 0.0,
         "increase_low": None, "increase_high": None}
    ]  # fmt: skip
    perplexity.perplexity_lines(rows, [], path, title="title")


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond ``room`` bytes: the system refuses the write, as it does on a disk that is full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def prepare(write: Callable[[Path], Any], folder: Path, earlier: bool) -> dict[str, Any]:
    model()  # what it compiles is not written onto the full disk
    if earlier:
        write(folder)
    return state_of(folder)


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing there", "a good file there"])
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "results"])
@pytest.mark.parametrize("room", [0, 600])
def test_a_full_disk_destroys_nothing(name, room, earlier, tmp_path, capsys):
    write = WRITERS[name]
    before = prepare(write, tmp_path, earlier)
    with full_disk(room):
        code = commands.run(lambda: write(tmp_path), "command")
    _, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("command: error: ") and err.count("\n") == 1, err
    after = state_of(tmp_path)
    # Of several files some may be done; none is half, and none of the others is gone.
    assert {name: state for name, state in after.items() if name in before and state[0] == 0} == {}
    assert set(before) <= set(after)
    assert not [name for name in after if Path(name).name.startswith(".")], "temporary files are left"


def test_a_full_disk_leaves_results_that_go_on(tmp_path, capsys):
    with results.Results(tmp_path / "run", "ruler", {}, "python -m evals ruler") as store:
        store.add([RECORD | {"sample": 7}])
    with full_disk(4000):
        assert commands.run(lambda: add_record(tmp_path), "evals ruler") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [record["sample"] for record in results.read_records(tmp_path / "run")] == [7]
    add_record(tmp_path)
    assert [record["sample"] for record in results.read_records(tmp_path / "run")] == [7, 0, 1, 2]


def refusing(error: BaseException) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    return refuse


MOMENTS: dict[str, tuple[Any, str]] = {
    "when the temporary file is made": (tempfile, "mkstemp"),
    "when it takes its place": (os, "replace"),
    "when text is written": (pathlib.Path, "write_text"),
    "when bytes are written": (pathlib.Path, "write_bytes"),
}
FAILURES: dict[str, tuple[BaseException, int]] = {
    "permission denied": (PermissionError(13, "Permission denied", "figures.json"), 2),
    "a read-only disk": (OSError(30, "Read-only file system", "figures.json"), 2),
    "no space left": (OSError(28, "No space left on device"), 2),
    "an error of the disk": (OSError(5, "Input/output error"), 2),
    "Ctrl-C": (KeyboardInterrupt(), 130),
}


@pytest.mark.parametrize(("error", "code"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("name", ["write_json", "models.save"])
def test_what_fails_while_writing_destroys_nothing(name, moment, error, code, tmp_path, capsys, monkeypatch):
    write = WRITERS[name]
    before = prepare(write, tmp_path, True)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(*moment, refusing(error))
        ended = commands.run(lambda: write(tmp_path), "command")
    _, err = capsys.readouterr()
    # A writer that never comes to that moment has done its work.
    assert ended in (0, code)
    if ended:
        assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
        assert ("interrupted" in err) == (code == 130)
        assert state_of(tmp_path) == before


def test_memory_that_runs_out_ends_in_one_sentence(capsys):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.\nmore")
    assert commands.run(refusing(error), "command") == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and "memory" in err
