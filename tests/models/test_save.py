"""What is saved is what transformers saved: the golden folders, loaded and written again, hold the same tensors."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import models

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["llama_bias", "llama_tied", "mistral", "qwen2", "qwen3_sliding", "llama_yarn_mscale"])
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
