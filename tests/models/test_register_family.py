"""The door for model families: a config.json of another model_type, read by a function from outside."""

from __future__ import annotations

import json

import jax
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.config import from_hugging_face
from models.families import FAMILIES, Family
from tests.kvjax.test_registry import installed
from tests.models import reference
from tests.models.test_load import assert_same


def renamed(folder) -> models.Decoder:
    """A Llama model, as a family would store it that calls one field and one tensor by other names."""
    config = models.Config(32, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1)
    model = reference.decoder(config, jax.device_put(reference.parameters(config)))
    models.save(folder, model)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["WideForCausalLM"], "model_type": "wide", "width": raw.pop("hidden_size")}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("gate_proj", "w1"): tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return model


def wide(raw) -> models.Config:
    return from_hugging_face({**raw, "architectures": ["LlamaForCausalLM"], "hidden_size": raw["width"]})


def test_a_registered_family_loads_and_is_saved_as_its_architecture(tmp_path):
    model = renamed(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"WideForCausalLM is not supported; .* that models\.register_family adds"):
        models.load(tmp_path / "wide")
    models.register_family("wide", wide, {"layers.gate": "model.layers.{}.mlp.w1.weight"})
    loaded, _ = models.load(tmp_path / "wide")
    models.save(tmp_path / "llama", loaded)
    again, _ = models.load(tmp_path / "llama")
    assert_same(loaded, model)
    assert_same(again, model)
    assert loaded.config == again.config == model.config


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (lambda raw: raw["breadth"], {}, r"config\.json: the family 'wide' cannot read it \(KeyError: 'breadth'\)\."),
        (lambda raw: 3, {}, "the family 'wide' returned 3; expected a models.Config of one of the architectures"),
        (wide, {"layers.gates": "w"}, "its family names tensors of layers.gates, which are no parameters"),
        (wide, {}, r"lacks the tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_in_one_sentence(tmp_path, config, tensors, said):
    renamed(tmp_path)
    models.register_family("wide", config, tensors)
    with pytest.raises(ValueError, match=said):
        models.load(tmp_path)


def test_a_built_in_architecture_is_never_another_package_s(tmp_path):
    config = models.Config(32, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1)
    model = reference.decoder(config, jax.device_put(reference.parameters(config)))
    models.save(tmp_path, model)
    models.register_family("llama", lambda raw: None, {"norm": "elsewhere"})
    assert models.load(tmp_path)[0].config == model.config


def test_a_family_is_a_function_or_names_tensors_too():
    FAMILIES.add("plain", wide, source="here")
    FAMILIES.add("named", Family(wide, {"norm": "ln_f.weight"}), source="here")
    assert FAMILIES["plain"] == Family(wide) and FAMILIES["named"].tensors == {"norm": "ln_f.weight"}
    with pytest.raises(ValueError, match=r"'wrong' is 3; expected a function from a config\.json to a models\.Config"):
        FAMILIES.add("wrong", 3, source="here")


def test_a_family_of_two_sources_is_refused_and_both_are_named(tmp_path, monkeypatch):
    def elsewhere(raw):
        return wide(raw)

    elsewhere.__module__ = "another_package.wide"
    models.register_family("twofold", wide)
    models.register_family("twofold", wide)  # as a notebook does when a cell runs twice
    with pytest.raises(ValueError, match=rf"'twofold' is in {__name__} and in another_package\.wide; rename it in one"):
        models.register_family("twofold", elsewhere)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed(tmp_path, "pkg_wide", "def wide(raw): ...", families="twofold = pkg_wide:wide")
    with pytest.raises(ValueError, match=rf"'twofold' is in {__name__} and in pkg_wide 0\.1; rename it in one"):
        from_hugging_face({"model_type": "twofold"})
