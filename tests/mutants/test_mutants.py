"""The faults can be planted, and the command says who finds them; it runs no suite here."""

from __future__ import annotations

import json

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.faults import PACKAGES, ROOT, Fault, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text("utf-8")
    compile(fault.planted(text), fault.file, "exec")
    assert fault.before != fault.after and fault.why.endswith(".")
    if fault.found_by:
        file, test = fault.found_by.split("::")
        assert f"def {test}(" in (ROOT / file).read_text("utf-8")


def test_names_are_unique_and_every_package_has_faults():
    assert len({fault.name for fault in faults()}) == len(faults()) >= 200
    assert {fault.file.split("/")[0] for fault in faults()} == set(PACKAGES)


def test_a_text_that_is_not_there_or_twice_is_refused():
    fault = Fault("twice", "", "kvjax/_src/cache.py", "x", "y")
    for text in ("", "x x"):
        with pytest.raises(ValueError, match=r"its text stands [02] times in kvjax/_src/cache.py, expected once; mend"):
            fault.planted(text)


def test_the_tests_nearest_to_a_file_come_first():
    fault = next(fault for fault in faults() if fault.file.startswith("train/"))
    assert all("train" in path for path in mutants.nearest(fault))
    assert mutants.downstream(fault)[:2] == ["tests/train", "tests/benchmarks"]


@pytest.mark.matrix  # starts pytest four times
def test_a_fault_is_found_or_survives(tmp_path, monkeypatch, capsys):
    """On a project of one file, whose test sees one fault of two."""
    (tmp_path / "kvjax").mkdir()
    (tmp_path / "kvjax/__init__.py").write_text("")  # else the installed package would be imported
    (tmp_path / "kvjax/one.py").write_text("def half(x):\n    return x // 2  # whole\n")
    (tmp_path / "tests/kvjax").mkdir(parents=True)
    (tmp_path / "tests/kvjax/test_one.py").write_text("from kvjax.one import half\n\ndef test(): assert half(5) == 2\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest]\npythonpath = ["."]\nmarkers = ["matrix", "nightly"]\n')
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "nearest", lambda fault: ["tests/kvjax/test_one.py"])
    monkeypatch.setattr(
        mutants.Copy, "listed", staticmethod(lambda: [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")])
    )
    seen = Fault("seen", "", "kvjax/one.py", "x // 2", "x / 2")
    unseen = Fault("unseen", "", "kvjax/one.py", "whole", "a half")
    monkeypatch.setattr(mutants, "faults", lambda: [seen, unseen])
    assert mutants.main(["--json", str(tmp_path / "out.json"), "--jobs", "1"]) == 1
    outcomes = {entry["name"]: entry for entry in json.loads((tmp_path / "out.json").read_text())["faults"]}
    assert outcomes["seen"]["state"] == "found" and outcomes["seen"]["found_by"] == "tests/kvjax/test_one.py::test"
    assert outcomes["unseen"]["state"] == "survived"
    assert "1 found, 1 survived" in capsys.readouterr().out
