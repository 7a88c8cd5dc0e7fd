"""A tiny random model with the embedded model's tokenizer, in a folder, a predictor beside it."""

import shutil
from pathlib import Path

import pytest
from flax import nnx

import models
from models.load import read_config

RETRIEVER = Path(models.__file__).parent / "retriever"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = read_config(RETRIEVER).vocab_size
    config = models.Config(vocabulary, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=1024)
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    models.save(folder, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RETRIEVER / name, folder / name)
    butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(1))
    models.save_butler(folder / "butler", butler, model, "tiny")
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """The model, its tokenizer and its predictor."""
    model, tokenizer = models.load(tiny_folder)
    return model, tokenizer, models.load_butler(tiny_folder / "butler", model)


@pytest.fixture
def lonely_folder(tiny_folder, tmp_path):
    """The same model without a predictor."""
    return shutil.copytree(tiny_folder, tmp_path / "lonely", ignore=shutil.ignore_patterns("butler"))
