"""The package of docs/examples: it is built, installed into a folder of its own, and found by the commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs/examples/kvjax-vatp"
PAGE = ROOT / "docs/how-to/your-own-package.md"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs a command where the package is installed, and returns its standard output."""
    source, target = tmp_path_factory.mktemp("build") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)  # a build writes beside its source
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    paths = os.pathsep.join([str(target), str(ROOT)])

    def run(*words: str) -> str:
        line = [sys.executable, "-m", *words]
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.matrix  # entry points by default: tests/kvjax/test_registry.py
def test_an_evaluation_a_policy_and_an_allocation_are_found_by_their_names(command, tmp_path):
    words = "far_back --policies vatp(power=2.0)+caote@first_layers --budgets 48 --block 64 --when prompt".split()
    command("evals", *words, *"--lengths 96 --samples 1 --json".split(), str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["policy"] for row in rows] == ["recency", "vatp(power=2.0)+caote@first_layers"]


@pytest.mark.matrix
def test_a_source_and_a_family_are_found_by_their_names(command, tmp_path):
    folder = ROOT / "models/retriever"
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["WideQwenForCausalLM"], "model_type": "wide_qwen", "width": raw.pop("hidden_size")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    rename = """
import sys
from safetensors.numpy import load_file, save_file
stored = load_file(sys.argv[1])
save_file({name.replace("gate_proj", "w1"): tensor for name, tensor in stored.items()}, sys.argv[2])
"""
    files = [str(place / "model.safetensors") for place in (folder, tmp_path)]
    subprocess.run([sys.executable, "-c", rename, *files], check=True)
    prompt = "The code of amber falcon is 4719. Question: what is the code of amber falcon?"
    words = "--select key_size --budget 0.9 --max-new-tokens 3 --json".split()
    said = json.loads(command("models.generate", str(tmp_path), "--prompt", prompt, *words))
    assert said["select"] == "key_size" and said["new_tokens"] == 3


def test_the_page_shows_the_files_as_they_are():
    shown = re.findall(r"^```(?:toml|py)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    files = [(EXAMPLE / name).read_text() for name in ("pyproject.toml", "kvjax_vatp.py")]
    assert shown[0] == files[0] and shown[1] in files[1] and len(shown) == 2
