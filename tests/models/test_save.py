"""What is saved is what transformers saved: the golden folders, loaded and written again, hold the same tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from tests.models import tiny
from tests.models.reference import decoder
from tests.tiers import first

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "name",
    first(6, [
        "llama_bias", "qwen3_moe_mixed", "phi3", "gemma3", "olmo2_bias", "llama_tied",
        "qwen2", "qwen3_sliding", "llama_yarn_mscale", "smollm3_sliding", "granite", "phi4_mini", "mixtral", "gemma2",
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


def test_what_the_architecture_s_config_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    config = tiny.config(logits_scaling=8.0)
    with pytest.raises(ValueError, match="of 'llama' cannot hold the model's logits_scaling"):
        models.save(tmp_path / "out", decoder(config))
    assert not (tmp_path / "out").exists()
