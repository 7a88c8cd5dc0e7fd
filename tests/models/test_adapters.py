"""LoRA adapters in PEFT's files: what is added, in which order of rows, and what is refused."""

import dataclasses
import json
import re
import shutil

import ml_dtypes  # noqa: F401  for adapters.txt
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import adapters, hub
from models.config import Rope
from models.loading import load, published_sampling
from models.parameters import split_weights
from tests.bad_input.campaign import calls
from tests.models.make_golden import GOLDEN
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


# What PEFT 0.21 writes for a plain adapter, beside the fields that adapters.save writes, too.
PEFT = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None,
    "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
    "velora_config": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", [True, False, "gaussian", "orthogonal"])
def test_all_that_peft_writes_of_a_plain_adapter_is_read(folder, kind):
    edit(folder, **PEFT | {"init_lora_weights": kind})
    np.testing.assert_allclose(
        adapters.read(folder, CONFIG)["layers.query", (1,)].up, 2 * matrices()["query.B"][1], rtol=1e-6
    )


@pytest.mark.parametrize("root", [False, True])
def test_an_adapter_that_peft_converted_is_what_training_changed(folder, root):
    # save_pretrained(path_initial_model_for_weight_conversion=...): [A; A0], [B, -B0], twice the rank, the same scale.
    random, first = np.random.default_rng(1), {}

    def joined(tensors):
        for name, matrix in list(tensors.items()):
            first[name] = random.normal(size=matrix.shape).astype(np.float32)
            both = [matrix, first[name]] if "lora_A" in name else [matrix, -first[name]]
            tensors[name] = np.concatenate(both, axis=0 if "lora_A" in name else 1)

    change(folder, joined)
    edit(folder, r=6, lora_alpha=12 if not root else 6 * 2**0.5, use_rslora=root, init_lora_weights=True)
    found = adapters.read(folder, CONFIG)["layers.query", (1,)]
    trained, start = matrices()["query.B"][1] @ matrices()["query.A"][1], first[NAME.replace("_A", "_B")] @ first[NAME]
    scale = 2 if not root else 6 / 3**0.5
    np.testing.assert_allclose(found.up @ found.down, scale * (trained - start), rtol=1e-4, atol=1e-4)


def test_pickled_weights_beside_an_adapter_are_not_read_and_named(folder):
    (folder / adapters.PICKLED).write_bytes(b"other weights")
    with pytest.warns(UserWarning, match=r"adapter_model\.safetensors is read, .* not adapter_model\.bin beside it"):
        assert len(adapters.read(folder, CONFIG)) == 2


@pytest.mark.parametrize(("damage", "said"), calls("adapters.txt"))
def test_what_is_no_adapter_of_the_model_is_refused(folder, damage, said):
    eval(damage)
    with pytest.raises(ValueError, match=re.escape(said)):
        adapters.read(folder, CONFIG)


def test_a_folder_that_cannot_be_loaded_is_explained(folder, tmp_path_factory):
    with pytest.raises(ValueError, match=r"; expected \(.*\), r \d"):
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


def test_the_base_model_is_that_of_the_revision_or_of_the_same_folder(tmp_path, monkeypatch):
    base, asked = tmp_path / "base", []
    shutil.copytree(GOLDEN / "llama3", base)
    config = load(base)[0].config
    for folder in (tmp_path / "apart", base):
        adapters.save(folder, config, matrices(config), base="some-org/model", scale=1.0)
    edit(tmp_path / "apart", revision="v2")
    monkeypatch.setattr(hub, "find", lambda *given: asked.append(given) or GOLDEN / "llama3")
    outside, inside = (load(folder)[0] for folder in (tmp_path / "apart", base))
    assert asked == [("some-org/model", "v2")]
    np.testing.assert_array_equal(inside.layers[0].qkv[...], outside.layers[0].qkv[...])
    edit(tmp_path / "apart", revision=2)
    with pytest.raises(ValueError, match="has revision = 2; expected a name, or null"):
        load(tmp_path / "apart")


def test_an_adapter_s_own_tokenizer_and_its_base_model_s_sampling_are_read(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(GOLDEN / "llama3", base)
    (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    model = load(base)[0]
    adapters.save(adapter, model.config, matrices(model.config), base=str(base), scale=1.0)
    assert load(adapter)[1] is None
    shutil.copy(GOLDEN / "tokenizer" / "tokenizer.json", adapter)
    assert load(adapter)[1].encode("a") and published_sampling(adapter).temperature == 0.5


def test_an_adapter_of_the_embedded_model_is_that_model_and_its_products(tmp_path):
    base, tokenizer = models.load("retriever")
    pair = matrices(base.config)
    adapters.save(tmp_path, base.config, pair, base="retriever", scale=0.5)
    adapted, same = models.load(tmp_path)
    assert same.encode("river") == tokenizer.encode("river")
    product = 0.5 * np.einsum("lor,lri->lio", pair["query.B"], pair["query.A"])
    before, after = (split_weights(base.config, model.arrays()) for model in (base, adapted))
    before["layers.query"] += product.reshape(before["layers.query"].shape)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, atol=1e-4 if name == "layers.query" else 0, err_msg=name)
