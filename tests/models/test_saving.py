"""What is saved is what transformers saved: the golden folders, loaded and written again, hold the same tensors."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.config import Rope
from models.folders import read_config
from tests.models import tiny
from tests.models.reference import decoder
from tests.models.test_loading import assert_same
from tests.tiers import first

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "name",
    first(6, [
        "llama_bias", "qwen3_moe_mixed", "phi3", "gemma3", "olmo2_bias", "llama_tied",
        "qwen2", "qwen3_sliding", "llama_yarn_mscale", "smollm3_sliding", "granite", "phi4_mini", "mixtral", "gemma2",
        "gemma", "olmo3", "ministral", "ministral3", "exaone4", "seed_oss",
        "gpt_oss", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_bias", "glm4_moe_lite",
        "qwen3_next", "qwen3_next_bias", "qwen3_5_text", "granite4", "granite4_h", "granite4_h_moe",
    ]),
)  # fmt: skip
def test_a_loaded_model_is_saved_as_it_was(name, tmp_path):
    model, _ = models.load(GOLDEN / name)
    models.save(tmp_path, model)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, tmp_path))
    assert sorted(ours) == sorted(theirs)
    for tensor in ours:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor])
    assert models.load(tmp_path)[0].config == model.config
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, tmp_path))
    del theirs["dtype"]
    assert ours.items() >= theirs.items() and ours["torch_dtype"] == "float32"


def test_a_folder_that_cannot_be_written_keeps_what_it_had(tmp_path):
    model, _ = models.load(GOLDEN / "llama3")
    models.save(tmp_path, model)
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="it is a folder; name a file"):
        models.save(tmp_path, model)
    assert (tmp_path / "config.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def sharded(folder: Path) -> Path:
    """A folder with another model's weights in two shards, its end tokens and its template."""
    tensors = {name: tensor + 1 for name, tensor in load_file(GOLDEN / "llama3" / "model.safetensors").items()}
    parts = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    shards = [f"model-0000{part + 1}-of-00002.safetensors" for part in (0, 1)]
    folder.mkdir()
    for part, shard in zip(parts, shards, strict=True):
        save_file(part, folder / shard)
    index = {name: shard for part, shard in zip(parts, shards, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (folder / "chat_template.jinja").write_text("another's")
    shutil.copy(GOLDEN / "llama3" / "config.json", folder)
    return folder


def test_what_is_saved_over_another_model_is_what_loads(tmp_path):
    model, _ = models.load(GOLDEN / "llama3")
    tokenizer = models.Tokenizer.from_folder(GOLDEN / "tokenizer").backend
    folder = sharded(tmp_path / "model")
    assert models.load(folder)[0].config.eos == (5, 6)
    for name in ("adapter_config.json", "adapter_model.safetensors", "added_tokens.json"):  # of the former model
        (folder / name).write_text("{}")
    models.save(folder, model, tokenizer)
    loaded, told = models.load(folder)
    assert loaded.config == model.config
    np.testing.assert_array_equal(loaded.embedding[...], model.embedding[...])
    assert told.chat_template is None
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names


def test_what_load_gives_is_what_save_takes(tmp_path):
    model, _ = models.load(GOLDEN / "llama3")
    backend = models.Tokenizer.from_folder(GOLDEN / "tokenizer").backend
    first = backend.id_to_token(7)
    models.save(tmp_path / "one", model, models.Tokenizer(backend, {"bos_token": first}, "{{ messages[0] }}"))
    models.save(tmp_path / "two", *models.load(tmp_path / "one"))
    for folder in ("one", "two"):
        loaded = models.load(tmp_path / folder)[1]
        assert (loaded.special_tokens["bos_token"], loaded.bos) == (first, 7)
        assert loaded.chat_template == "{{ messages[0] }}" and loaded.encode("a b") == backend.encode("a b").ids


@pytest.mark.parametrize("failing", [0, 3])
def test_a_save_that_breaks_off_leaves_the_other_model(failing, tmp_path, monkeypatch):
    model, _ = models.load(GOLDEN / "llama3")
    tokenizer = models.Tokenizer.from_folder(GOLDEN / "tokenizer").backend
    folder = sharded(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write, calls = Path.write_bytes, []

    def refuse(path, content):
        calls.append(path)
        if len(calls) > failing:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        models.save(folder, model, tokenizer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


SLIDING = read_config(GOLDEN / "qwen3_sliding")


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        (tiny.config(logits_scaling=8.0, attention_bias=True), "attention_bias, logits_scaling"),
        (tiny.config(rope=Rope(partial_rotary_factor=0.5)), "rope"),
        (tiny.config(architecture="phi3", sliding_windows=(9, None)), "sliding_windows"),
        (dataclasses.replace(SLIDING, source=None), "query_key_norm, sliding_windows"),
        (dataclasses.replace(SLIDING, norm_epsilon=0.5), "query_key_norm, sliding_windows"),
    ],
)
def test_what_a_llama_cannot_hold_is_refused_before_anything_is_written(config, lost, tmp_path):
    with pytest.raises(ValueError, match=f"is written as a Llama, which cannot hold its {lost}; read the config from"):
        models.save(tmp_path / "out", decoder(config))
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_family_that_a_llama_can_hold_is_written_as_one(tmp_path):
    rope = Rope(type="llama3", factor=8.0, original_positions=64)
    model = decoder(tiny.config(architecture="phi3", tie_embeddings=True, rope=rope))
    models.save(tmp_path, model)
    loaded, _ = models.load(tmp_path)
    assert loaded.config == dataclasses.replace(model.config, architecture="llama")
    assert_same(loaded, model)


def test_a_model_that_was_changed_since_it_was_read_is_saved_as_it_is(tmp_path):
    model, _ = models.load(GOLDEN / "llama3")
    config = dataclasses.replace(model.config, eos=(3, 4), max_positions=32)
    models.save(tmp_path, models.Decoder(config, model.arrays()))
    assert models.load(tmp_path)[0].config == config != model.config


def test_what_names_another_file_of_weights_is_not_kept(tmp_path):
    shutil.copytree(GOLDEN / "llama3", tmp_path / "named")
    (tmp_path / "named" / "model.safetensors").rename(tmp_path / "named" / "other.safetensors")
    raw = json.loads((tmp_path / "named" / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (tmp_path / "named" / "config.json").write_text(json.dumps(raw))
    model, _ = models.load(tmp_path / "named")
    models.save(tmp_path / "saved", model)
    assert_same(models.load(tmp_path / "saved")[0], model)
