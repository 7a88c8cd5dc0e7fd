"""Check what makes the results again: commands that exist, in order, and only those whose results are missing."""

import importlib
import json

import pytest

from models import commands
from papers import remake

MODULES = sorted({table["run"].split()[0] for table in remake.read().values() if "run" in table})


@pytest.mark.parametrize("module", MODULES)
def test_every_command_line_is_one_that_its_module_takes(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "run", lambda *_: 0)
    for name, table in remake.read().items():
        _, found, *line = remake.arguments(name, table)
        if found == module:
            place = f"{module}.__main__" if module in ("benchmarks", "evals", "papers") else module
            assert importlib.import_module(place).main(line) == 0, name


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(remake, "ROOT", tmp_path)
    tables = {"data": {"program": "1"}, "net": {"run": "train", "data": "data"}, "old": {"program": "2"}}
    tables |= {"results/a.json": {"run": "evals", "networks": "net"}, "results/b.json": {"run": "x", "benchmark": True}}
    assert list(remake.missing(tables, benchmarks=False)) == ["data", "net", "results/a.json"]
    (tmp_path / "results").mkdir()
    for commit, left in (("abc and changes", ["data", "net", "results/a.json"]), ("abc", [])):
        (tmp_path / "results/a.json").write_text(json.dumps({"fingerprints": {}, "command": "x", "commit": commit}))
        assert list(remake.missing(tables, benchmarks=False)) == left
    assert list(remake.missing(tables, benchmarks=True)) == ["results/b.json"]
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "run.json").write_text("{}")
    assert not remake.is_there(tmp_path / "net")  # a run that was killed
    (tmp_path / "net" / "summary.json").write_text("{}")
    assert remake.is_there(tmp_path / "net")
