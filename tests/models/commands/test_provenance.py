"""What JSON says of how it was made: the command, the commit and its mark, the project's own version, fingerprints."""

import json
import subprocess

import jax
import jax.numpy as jnp
import pytest
import tokenizers

import kvjax
import models
from models import commands, fingerprints
from models.commands import provenance
from models.tokenizer import Tokenizer
from tests.models import reference
from tests.models.tiny import CONFIG


def a_model(seed=0):
    return reference.decoder(CONFIG, reference.parameters(CONFIG, seed))


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "kvjax").mkdir()
    (tmp_path / "kvjax" / "a.py").write_text("1\n")
    (tmp_path / "notes.md").write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "One")
    yield tmp_path
    provenance.commit.cache_clear()


def test_a_commit_is_marked_where_code_was_changed(checkout):
    clean = provenance.commit(checkout)
    assert len(clean) == 10
    provenance.commit.cache_clear()
    (checkout / "notes.md").write_text("2\n")
    assert provenance.commit(checkout) == clean, "pages and results are not code"
    provenance.commit.cache_clear()
    (checkout / "kvjax" / "b.py").write_text("new\n")
    assert provenance.commit(checkout) == f"{clean} and changes"
    assert provenance.commit(checkout / "kvjax") is None, "somebody else's checkout says nothing of ours"
    git(checkout, "commit", "--allow-empty", "-m", "Two")
    assert provenance.commit(checkout) == f"{clean} and changes", "it is that of the beginning"


def test_the_projects_version_needs_no_installed_distribution(monkeypatch):
    def version(name):
        if name == "kvjax":
            raise provenance.importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(provenance.importlib.metadata, "version", version)
    assert provenance.environment()["versions"]["kvjax"] == kvjax.__version__


def test_a_file_says_how_it_was_made(tmp_path):
    parser = commands.Parser(prog="python -m tool")
    parser.add_argument("--json")
    parser.add_argument("--seed", type=int)
    path = str(tmp_path / "a b.json")
    provenance.write(parser.parse_args(["--json", path, "--seed", "3"]), {"results": [1]}, {"weights": "w"})
    found = json.loads((tmp_path / "a b.json").read_text())
    assert found["command"] == f"python -m tool --json '{path}' --seed 3"
    assert found["seed"] == 3 and found["seconds"] >= 0 and found["fingerprints"] == {"weights": "w"}
    assert {"jax", "jaxlib", "kvjax"} <= set(found["versions"]) and found["device"] and "commit" in found
    assert found["results"] == [1]


def test_what_changes_numbers_and_is_in_no_file_is_told(monkeypatch):
    """Settings of JAX, variables of compilers, and the day, if the chat template writes it into each prompt."""
    tokenizer = models.load("retriever")[1]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert provenance.of_process(tokenizer) == {}
    with jax.default_matmul_precision("bfloat16"):
        assert provenance.of_process(tokenizer) == {"settings": '{"jax_default_matmul_precision": "bfloat16"}'}
        told = provenance.environment()
    assert told["settings"].items() >= {"jax_default_matmul_precision": "bfloat16", "NVIDIA_TF32_OVERRIDE": "1"}.items()
    assert {"tokenizers", "jinja2"} <= set(told["versions"])
    dated = Tokenizer(tokenizer.backend, None, "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    assert len(provenance.of_process(dated)["date"]) == 10


def test_weights_are_told_apart_and_their_dtype_is_not():
    first, second = fingerprints.fingerprints(a_model()), fingerprints.fingerprints(a_model(1))
    assert first["weights"] != second["weights"] and first["config"] == second["config"]
    assert fingerprints.fingerprints(a_model()) == first
    half = a_model()
    half.embedding[...] = half.embedding[...].astype(jnp.bfloat16)
    assert fingerprints.fingerprints(half)["weights"] == first["weights"]


def test_each_parameter_counts():
    model = a_model()
    fingerprint = fingerprints.fingerprints(model)["weights"]
    weights = reference.parameters(CONFIG)
    assert fingerprints.fingerprints(reference.decoder(CONFIG, weights))["weights"] == fingerprint
    for name, array in weights.items():
        other = reference.decoder(CONFIG, weights | {name: array * 1.01 + 0.01})
        assert fingerprints.fingerprints(other)["weights"] != fingerprint, name


def test_a_tokenizer_counts_with_its_template_and_special_tokens():
    def found(vocabulary, *rest):
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
        return fingerprints.fingerprints(a_model(), models.Tokenizer(backend, *rest))["tokenizer"]

    given = [({"a": 0, "b": 1},), ({"a": 1, "b": 0},), ({"a": 0, "b": 1}, {"bos_token": "b"})]
    given += [({"a": 0, "b": 1}, {"bos_token": "b"}, "{{ messages }}", values) for values in ({}, {"thinking": False})]
    assert len({found(*arguments) for arguments in given}) == 5
