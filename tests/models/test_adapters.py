"""LoRA adapters in PEFT's files: what is added, in which order of rows, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import adapters
from models.config import Rope
from models.load import load
from tests.bad_input.campaign import calls
from tests.models.tiny import CONFIG

NAME = adapters.PREFIX + "model.layers.1.self_attn.q_proj.lora_A.weight"


def matrices(config=CONFIG, rank=3):
    random = np.random.default_rng(0)
    inputs, outputs = config.hidden_size, config.num_heads * config.head_dim
    return {
        "query.A": random.normal(size=(config.num_layers, rank, inputs)),
        "query.B": random.normal(size=(config.num_layers, outputs, rank)),
    }


@pytest.fixture
def folder(tmp_path):
    adapters.save(tmp_path, CONFIG, matrices(), base="retriever", scale=2.0)
    return tmp_path


def edit(folder, **fields):
    file = folder / adapters.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change(folder, edited):
    tensors = load_file(folder / adapters.WEIGHTS)
    edited(tensors)
    save_file(tensors, folder / adapters.WEIGHTS)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_what_is_saved_is_read_with_its_scale_in_the_decoder_s_order_of_a_head_s_elements(tmp_path, partial):
    config = dataclasses.replace(CONFIG, rope=Rope(partial_rotary_factor=partial))
    pair = matrices(config)
    adapters.save(tmp_path, config, pair, base="retriever", scale=2.0)
    found = adapters.read(tmp_path, config)
    assert list(found) == [("layers.query", (0,)), ("layers.query", (1,))]
    for (_, place), low_rank in found.items():
        np.testing.assert_allclose(low_rank.up, 2 * pair["query.B"][place], rtol=1e-6)
        np.testing.assert_allclose(low_rank.down, pair["query.A"][place], rtol=1e-6)
    stored = load_file(tmp_path / adapters.WEIGHTS)[NAME.replace("_A", "_B")]
    assert np.allclose(stored, pair["query.B"][1]) == (partial == 1.0)


def test_the_scale_is_alpha_over_the_rank_or_over_its_root(folder):
    edit(folder, lora_alpha=12)
    alone = adapters.read(folder, CONFIG)["layers.query", (1,)].up
    edit(folder, use_rslora=True)
    root = adapters.read(folder, CONFIG)["layers.query", (1,)].up
    np.testing.assert_allclose(alone, 4 * matrices()["query.B"][1], rtol=1e-6)
    np.testing.assert_allclose(root, 12 / 3**0.5 * matrices()["query.B"][1], rtol=1e-6)


@pytest.mark.parametrize(("damage", "said"), calls("adapters.txt"))
def test_what_is_no_adapter_of_the_model_is_refused(folder, damage, said):
    eval(damage)
    with pytest.raises(ValueError, match=re.escape(said)):
        adapters.read(folder, CONFIG)


def test_a_folder_that_cannot_be_loaded_is_explained(folder, tmp_path_factory):
    with pytest.raises(ValueError, match="the model's projection is"):
        load(folder)  # the embedded model has other sizes
    other = tmp_path_factory.mktemp("other")
    adapters.save(other, CONFIG, matrices(), base=str(folder), scale=1.0)
    with pytest.raises(ValueError, match="which is an adapter itself"):
        load(other)
    edit(other, base_model_name_or_path="no/such/folder/anywhere")
    with pytest.raises(FileNotFoundError, match="there is no folder no/such/folder/anywhere"):
        load(other)
    edit(other, base_model_name_or_path=None)
    with pytest.raises(ValueError, match="names no base_model_name_or_path"):
        load(other)
    (folder / adapters.WEIGHTS).write_bytes(b"half")
    with pytest.raises(ValueError, match="is truncated or corrupted"):
        load(folder)


def test_an_adapter_of_the_embedded_model_is_that_model_and_its_products(tmp_path):
    base, tokenizer = models.load("retriever")
    pair = matrices(base.config)
    adapters.save(tmp_path, base.config, pair, base="retriever", scale=0.5)
    adapted, same = models.load(tmp_path)
    assert same.encode("river") == tokenizer.encode("river")
    product = 0.5 * np.einsum("lor,lri->lio", pair["query.B"], pair["query.A"])
    expected = base.layers.query[...] + product.reshape(base.layers.query[...].shape)
    np.testing.assert_allclose(adapted.layers.query[...], expected, atol=1e-4)
    np.testing.assert_array_equal(adapted.layers.key[...], base.layers.key[...])
