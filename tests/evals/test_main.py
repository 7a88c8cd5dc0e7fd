"""The one command: it lists what is installed, and the wheel holds nothing that needs the experiments."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAIN = str(ROOT / "evals/__main__.py")
EXPERIMENTS = {"ablation", "butler"}


def test_the_command_lists_the_experiments_where_they_are(monkeypatch):
    there = runpy.run_path(MAIN, run_name="there")["EVALUATIONS"]
    monkeypatch.setitem(sys.modules, "evals.experiments", None)  # as in the wheel: there is no such folder
    elsewhere = runpy.run_path(MAIN, run_name="elsewhere")["EVALUATIONS"]
    assert set(there) >= EXPERIMENTS
    assert list(elsewhere) == [name for name in there if name not in EXPERIMENTS]


def test_the_wheel_leaves_the_experiments_out_and_does_not_need_them():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["exclude"] == ["/evals/experiments"]
    sources = [path for package in wheel["packages"] for path in sorted((ROOT / package).rglob("*.py"))]
    users = [
        str(path.relative_to(ROOT))
        for path in sources
        if ROOT / "evals/experiments" not in path.parents
        and re.search(r"\bevals\.experiments\b|from evals import .*\bexperiments\b", path.read_text())
    ]
    assert users == ["evals/__main__.py"]
