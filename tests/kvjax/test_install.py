"""Packages of common names: whose are they?"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvjax._src import install

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("package", "other"), [("evals", "models"), ("train", "evals")])
def test_another_package_of_that_name_is_named_with_its_file(package, other, tmp_path):
    (tmp_path / other).mkdir()
    (tmp_path / other / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: the package {other!r} was found at {tmp_path.resolve() / other}")
    assert last.endswith("; rename it.")


def test_a_missing_package_is_named():
    with pytest.raises(ImportError, match=r"the package 'models_of_nobody' was found at no file, not at"):
        install.check_packages("models", "models_of_nobody")


def test_extras_are_installed_from_the_checkout_or_from_the_index(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert install.line("plot", "gguf") == "pip install -e '.[plot,gguf]'"
    monkeypatch.chdir(tmp_path)
    assert install.line("plot") == f"pip install -e '{ROOT}[plot]'"
    monkeypatch.setattr(install, "ROOT", tmp_path)  # as in site-packages
    assert install.line("plot", "gguf") == "pip install 'kvjax[plot,gguf]'"


def test_the_packages_of_the_extras_are_those_of_the_project():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in install.PACKAGES.items():
        known = {re.split(r"[>=]", line)[0].replace("-", "_") for line in named[extra]}
        assert {"orbax_checkpoint" if name == "orbax" else name for name in packages} <= known
