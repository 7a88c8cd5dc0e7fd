"""Packages of common names: whose are they?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import install

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
    assert last.endswith("rename or remove the other one, or start Python in another folder.")


def test_a_missing_package_is_named():
    with pytest.raises(
        ImportError, match=r"the package 'models_of_nobody' was found at no file, expected kvjax's own at"
    ):
        install.check_packages("models", "models_of_nobody")
