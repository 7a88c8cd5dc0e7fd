"""A tiny random model with the embedded model's tokenizer, in a folder, a predictor beside it."""

import json
import shutil
from pathlib import Path

import pytest

import models
from evals.__main__ import main
from models.folders import read_config
from tests.models import reference

RETRIEVER = Path(models.__file__).parent / "retriever"


TEXT = "The quick brown fox jumps over the lazy dog, and nobody has ever asked the dog what it thinks of that. " * 8


@pytest.fixture
def text_file(tmp_path, request):
    path = tmp_path / "text.txt"
    path.write_text(getattr(request.module, "TEXT", TEXT))
    return path


def runner(main, tmp_path, capsys):
    def run(*flags):
        out, plot = tmp_path / "out.json", tmp_path / "out.png"
        assert main([*flags, "--json", str(out), "--plot", str(plot)]) == 0
        assert plot.read_bytes().startswith(b"\x89PNG")
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def run_eval(tmp_path, capsys):
    """Runs an evaluation, and gives what its JSON has and what it printed; there is a picture, too."""
    return runner(main, tmp_path, capsys)


@pytest.fixture(scope="session")
def retriever():
    return models.load("retriever")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random model of the shipped tokenizer's vocabulary, with positions for the tasks' prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = read_config(RETRIEVER).vocab_size
    config = models.Config(vocabulary, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=1024)
    model = reference.decoder(config)
    models.save(folder, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RETRIEVER / name, folder / name)
    models.save_network(folder / "butler", reference.butler(config), model, "tiny")
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """The model, its tokenizer and its predictor."""
    model, tokenizer = models.load(tiny_folder)
    return model, tokenizer, models.load_network(tiny_folder / "butler", model)
