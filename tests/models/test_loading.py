"""Folders in Hugging Face layout become models; what is wrong with one is said in a sentence."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import models
from models import published
from models.checkpoint import Tensor, in_order, part_from
from models.config import Config
from models.config_json import from_hugging_face
from models.families import FAMILIES
from models.loading import load, published_sampling
from models.mesh import parse_mesh
from models.parameters import join_weights, parameter_shapes, split_weights
from models.sampling import Sampling
from tests.models.make_golden import GOLDEN
from tests.models.tiny import decoder

TOKENS = np.arange(12)[None]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A small Qwen3 with every kind of parameter, whole and right, to be spoilt."""
    return shutil.copytree(GOLDEN / "qwen3_sliding", tmp_path / "model")


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder):
    """Splits the one file in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def parameters(model):
    return split_weights(model.config, {name: np.asarray(array) for name, array in model.arrays().items()})


def assert_same(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_parameters_are_stacked_and_transposed(folder):
    tensors = load_file(folder / "model.safetensors")
    model, _ = load(folder)
    query = np.asarray(parameters(model)["layers.query"])  # [L, E, N, D]
    np.testing.assert_array_equal(query[1, :, 2, 5], tensors[QUERY][2 * 12 + 5])
    output = np.asarray(model.layers[1].output[...])  # [N D, E]
    stored = tensors["model.layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(output[3 * 12 + 4], stored[:, 3 * 12 + 4])


def test_fused_projections_are_split_and_rotated_elements_are_paired():
    tensors = load_file(GOLDEN / "phi4_mini" / "model.safetensors")
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]  # 2 query heads, a key and a value head of 16
    gate_up = tensors["model.layers.1.mlp.gate_up_proj.weight"]
    order = [*range(6), 12, 13, *range(6, 12), 14, 15]  # 12 of 16 elements are rotated
    mesh = parse_mesh("data=1,tensor=1")
    for model in (load(GOLDEN / "phi4_mini")[0], load(GOLDEN / "phi4_mini", mesh=mesh)[0]):
        layers = {name: np.asarray(array)[1] for name, array in parameters(model).items() if "layers." in name}
        np.testing.assert_array_equal(layers["layers.query"][:, 1].T, fused[16:32][order])
        np.testing.assert_array_equal(layers["layers.key"][:, 0].T, fused[32:48][order])
        np.testing.assert_array_equal(layers["layers.value"][:, 0].T, fused[48:])
        np.testing.assert_array_equal(layers["layers.gate"].T, gate_up[:32])
        np.testing.assert_array_equal(layers["layers.up"].T, gate_up[32:])


def test_a_feed_forward_of_two_devices_is_read_from_a_fused_tensor():
    model, _ = load(GOLDEN / "phi3", mesh=parse_mesh("data=1,tensor=2"))
    assert_same(model, load(GOLDEN / "phi3")[0])


def test_a_fused_tensor_that_does_not_fit_is_named(tmp_path):
    folder = shutil.copytree(GOLDEN / "phi3", tmp_path / "model")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][1:]}))
    refused(folder, ValueError, rf"{name} has shape \(63, 32\); its config requires \(64, 32\)")
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, ValueError, f"lacks the tensor {name}, which a model of this family has")


def test_sharded_checkpoint_is_the_same_model(folder):
    whole, _ = load(folder)
    shard(folder)
    assert_same(load(folder)[0], whole)


def test_one_file_comes_before_an_index_and_the_index_is_named(folder):
    whole, kept = load(folder)[0], folder.parent / "kept.safetensors"
    shutil.copy(folder / "model.safetensors", kept)
    edit_tensors(folder, lambda tensors: tensors.update({name: tensor + 1 for name, tensor in tensors.items()}))
    shard(folder)
    shutil.copy(kept, folder / "model.safetensors")
    for stale in ([], sorted(folder.glob("model-*.safetensors"))):
        for file in stale:
            file.unlink()
        with pytest.warns(UserWarning, match=r"and not model\.safetensors\.index\.json beside it; delete what is out"):
            assert_same(load(folder)[0], whole)


def test_the_file_that_the_config_names_is_read(folder):
    whole, _ = load(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors").write_bytes(b"stale")
    edit_config(folder, transformers_weights="other.safetensors")
    assert_same(load(folder)[0], whole)


def test_a_tensor_of_a_shard_that_the_index_leaves_out_is_read(folder):
    whole, _ = load(folder)
    index = shard(folder)
    del index["weight_map"][QUERY]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load(folder)[0], whole)


def test_tensors_larger_than_a_chunk_and_a_tile_are_read_whole(folder, monkeypatch):
    whole, _ = load(folder)
    module = sys.modules["models.mesh"]
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "TILE", 5)
    assert_same(load(folder)[0], whole)


def test_a_part_of_a_fused_tensor_is_read_from_where_it_begins():
    """Read in parts itself, as on a mesh; here also with the elements of its two heads in another order."""
    whole = np.arange(40.0).reshape(10, 4)
    fused = Tensor(Path("x"), whole.shape, "F32", lambda window: whole[window])
    part = part_from(fused, 3, (6, 4))
    assert part.shape == (6, 4)
    np.testing.assert_array_equal(part.read((slice(2, 5), slice(1, 3))), whole[3:9][2:5, 1:3])
    turned = in_order(part, np.array([2, 0, 1]))
    np.testing.assert_array_equal(turned.read((slice(1, 4), slice(0, 4))), whole[3:9][[2, 0, 1, 5, 3, 4]][1:4])


def test_a_number_that_is_not_finite_is_found_in_any_chunk(monkeypatch):
    monkeypatch.setattr(models.mesh, "CHUNK_BYTES", 8)
    for number in (np.nan, -np.inf):
        for place in range(5):
            array = np.full(5, -1.0, np.float16)
            assert models.mesh._finite(array)
            array[place] = number
            assert not models.mesh._finite(array)


def test_old_rotary_frequencies_are_ignored(folder):
    whole, _ = load(folder)
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({key: np.ones(6, np.float32)}))
    assert_same(load(folder)[0], whole)


def test_an_output_matrix_that_equals_the_embedding_is_not_kept_twice(folder):
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING]}))
    assert load(folder)[0].head is None


def test_an_output_matrix_that_differs_from_the_embedding_is_kept_though_the_config_ties_it(folder):
    whole, _ = load(folder)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + np.eye(64, 32, -63, np.float32)}))
    edit_config(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="ties the output matrix to the embedding, but .* holds a different lm_head"):
        model, _ = load(folder)
    changed = np.array(whole.embedding[...])
    changed[63, 0] += 1  # in the last row alone
    np.testing.assert_array_equal(model.head[...], changed.T)


@pytest.mark.parametrize("change", [lambda folder: None, shard], ids=["one file", "shards"])
def test_an_output_matrix_alone_is_the_embedding_of_a_tied_model(folder, change):
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.pop(HEAD))
    tied, _ = load(folder)
    edit_tensors(folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    change(folder)
    model, _ = load(folder)
    assert model.head is None
    assert_same(model, tied)


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model.", "language_model."])
@pytest.mark.parametrize("name", ["qwen3_sliding", "llama_tied", "phi3"])
def test_tensors_are_found_as_those_of_a_base_model_and_of_one_that_sees(prefix, name, tmp_path):
    folder = shutil.copytree(GOLDEN / name, tmp_path / "model")

    def renamed(tensor):
        if tensor == HEAD:  # it lies inside the language model, or outside
            return prefix.removesuffix("model.") + HEAD
        return prefix + tensor.removeprefix("model.")

    tensors = load_file(folder / "model.safetensors")
    save_file({renamed(tensor): array for tensor, array in tensors.items()}, folder / "model.safetensors")
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    edit_config(folder, architectures=[architecture if prefix else architecture.replace("ForCausalLM", "Model")])
    assert_same(load(folder)[0], load(GOLDEN / name)[0])


def test_what_sees_beside_a_language_model_is_left_out_and_nothing_else(tmp_path):
    folder = shutil.copytree(GOLDEN / "gemma3_vision", tmp_path / "model")
    assert any(name.startswith("vision_tower.") for name in load_file(folder / "model.safetensors"))
    model, _ = load(folder)
    models.save(tmp_path / "saved", model)  # the language model alone
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    assert_same(load(tmp_path / "saved")[0], model)
    extra = {"language_model.model.layers.0.extra": np.ones(2, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    refused(
        folder, ValueError, r"holds the tensor language_model\.model\.layers\.0\.extra, which its config\.json does"
    )
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0" in name])
    refused(folder, ValueError, r"lacks the tensor language_model\.model\.layers\.0\.input_layernorm\.weight, which")


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "float64"])
def test_without_a_dtype_the_checkpoints_is_kept_and_with_one_weights_are_cast(folder, stored):
    edit_tensors(folder, lambda tensors: tensors.update({n: a.astype(stored) for n, a in tensors.items()}))
    kept = {array.dtype.name for array in parameters(load(folder)[0]).values()}
    assert kept == {"float32" if stored == "float64" else stored}
    theirs = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for asked in ("float32", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        np.testing.assert_array_equal(np.asarray(load(folder, dtype=asked)[0].embedding[...]), theirs.astype(asked))


def test_mixed_checkpoint_takes_the_dtype_of_most_weights(folder):
    def halve(tensors):
        tensors.update({n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items() if not n.endswith("norm.weight")})

    edit_tensors(folder, halve)
    assert {array.dtype.name for array in parameters(load(folder)[0]).values()} == {"bfloat16"}


def test_end_tokens_of_generation_config_win(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load(folder)[0].config.eos == (5, 6)


SAMPLED = {"do_sample": True}


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        ({"temperature": 0.5, "min_p": 0.1, "top_k": 3}, Sampling()),
        ({"repetition_penalty": 1.1, "min_p": 0.1}, Sampling(repetition_penalty=1.1)),
        (SAMPLED | Sampling(0.6, 20, 0.9, 0.05, 1.05)._asdict(), Sampling(0.6, 20, 0.9, 0.05, 1.05)),
        (SAMPLED | {"top_k": 0, "min_p": 0.0, "top_p": None, "repetition_penalty": 1}, Sampling(1.0)),
        ({"typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "bad_words_ids": [], "num_beams": 1,
          "forced_eos_token_id": None, "max_length": 20, "transformers_version": "5.24.0"}, Sampling()),
    ],
)  # fmt: skip
def test_the_published_sampling_is_that_of_generation_config(folder, said, sampling):
    (folder / "generation_config.json").write_text(json.dumps(said))
    assert published_sampling(folder) == sampling


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"do_sample": "false"}, "has do_sample = 'false'; expected true or false"),
        (
            {"repetition_penalty": -1.0},
            r"repetition_penalty is -1\.0; give a factor above 0, .* To choose",
        ),
    ],
)
def test_a_published_sampling_that_cannot_be_is_refused(folder, said, sentence):
    (folder / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=sentence):
        published_sampling(folder)


def test_what_generation_config_sets_and_is_not_applied_is_named(folder):
    said = {
        "typical_p": 0.9, "no_repeat_ngram_size": 1, "suppress_tokens": [0], "bad_words_ids": [[3]],
        "forced_eos_token_id": 0, "a_field_of_tomorrow": 1,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(said | {"repetition_penalty": 1.2}))
    with pytest.warns(UserWarning, match=f"sets {', '.join(said)}, which is not applied"):
        assert published_sampling(folder) == Sampling(repetition_penalty=1.2)


PEAK = """
import sys
import jax
import jax.numpy as jnp
from flax import nnx
from models.loading import load

def status(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key + ":")).split()[1])

load(sys.argv[1])  # whatever a first load allocates once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark starts anew
before = status("VmRSS")
model, _ = load(sys.argv[2], dtype=sys.argv[3])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
print((status("VmHWM") - before) / size)
"""


@pytest.mark.matrix
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_is_at_most_1_3_times_the_weights(tmp_path):
    # So large that the weights are what a process takes.
    config = Config(16_000, 512, 1536, num_layers=12, num_heads=8, num_kv_heads=2)
    ones = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in parameter_shapes(config).items()}
    models.save(tmp_path, models.Decoder(config, join_weights(config, ones)))
    command = [sys.executable, "-c", PEAK, str(GOLDEN / "llama2"), str(tmp_path), "bfloat16"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert float(output) <= 1.3


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices (conftest.py forces eight on a CPU)")
    return parse_mesh("data=2,tensor=2")


def test_sharded_model_has_the_same_weights_and_logits_and_each_device_its_share(folder, mesh):
    model, _ = load(folder, mesh=mesh)
    assert_same(model, load(folder)[0])
    assert {part.data.shape for part in model.layers[0].qkv[...].addressable_shards} == {(32, 1, 4, 12)}
    explicit = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    assert_same(load(folder, mesh=explicit)[0], model)  # taken as automatic
    run = jax.jit(lambda model, tokens: model(tokens))
    one, several = (np.asarray(run(own, TOKENS)) for own in (load(folder)[0], model))
    np.testing.assert_allclose(several, one, atol=1e-5)


def test_vocabulary_that_the_mesh_does_not_divide_is_replicated(folder, mesh):
    edit_config(folder, vocab_size=63)
    edit_tensors(folder, lambda tensors: tensors.update({n: a[:63] for n, a in tensors.items() if a.shape[0] == 64}))
    assert load(folder, mesh=mesh)[0].embedding[...].sharding.spec == PartitionSpec()


def test_mesh_must_divide_the_feed_forward(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama2", tmp_path / "model")
    edit_config(folder, intermediate_size=30)
    refused(folder, ValueError, "tensor=4 does not divide the model's 30 feed-", mesh=parse_mesh("tensor=4"))


@pytest.mark.parametrize(
    ("text", "shape"),
    [(" tensor = 2,data=2", dict(data=2, tensor=2)), ("tensor=2,expert=2", dict(data=1, expert=2, tensor=2))],
)
def test_mesh_text(text, shape, mesh):
    assert dict(parse_mesh(text).shape) == shape


def refused(folder, kind, message, **arguments):
    with pytest.raises(kind, match=message) as caught:
        load(folder, **arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_instead_of_its_folder_is_refused(folder):
    (folder / "model.pt").write_bytes(b"")
    refused(folder / "model.pt", ValueError, "model.pt holds pickled weights")
    refused(folder / "model.safetensors", ValueError, "is a file; give the folder that holds it")


def test_hub_name_is_downloaded_without_pickles_or_duplicates(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    calls = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: calls.append((name, options)) or str(folder))
    load("some-org/Some-Model-1B", revision="v2")
    name, options = calls[-1]  # the first looks for what is there
    assert (name, options["revision"]) == ("some-org/Some-Model-1B", "v2")
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]


def test_hub_that_cannot_be_reached_or_is_not_installed_is_one_sentence(monkeypatch):
    def fail(name, **options):
        raise ConnectionError("no route to host.\nTry again. And again.")

    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", fail)
    failed = r"Hugging Face hub failed .*\(ConnectionError: no route to host\); check"
    refused("some-org/model", FileNotFoundError, failed)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("some-org/model", FileNotFoundError, "pip install huggingface_hub")


def test_local_folder_goes_before_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    assert load(f"{folder.parent.name}/{folder.name}")[0].config.num_layers == 2


@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
def test_a_loaded_model_compiles_a_streams_steps_once(mesh, compiled_steps):
    model, _ = load(GOLDEN / "llama3", mesh=None if mesh is None else parse_mesh(mesh))
    steps = models.stream(model, np.zeros((2, 40), np.int32), policy="h2o", budget=9, block=7, max_new_tokens=5, end=())
    assert len(list(steps)) == 5
    assert compiled_steps() == 2, "one for blocks, one for tokens"


def test_weights_that_a_narrow_dtype_cannot_hold_are_refused(folder):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5

    edit_tensors(folder, change)
    refused(folder, ValueError, r"model.layers.1.mlp.up_proj.weight holds NaN .* as float16; .* wider", dtype="float16")
    assert models.load(folder, dtype="bfloat16")[0].config.num_layers > 1


def renamed(folder) -> models.Decoder:
    """A Llama model, as a family would store it that calls one field and one tensor by other names."""
    model = decoder()
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
        (wide, {"layers.gates": "w"}, "its family names layers.gates, which are no parameters"),
        (wide, {}, r"lacks the tensor model\.layers\.0\.mlp\.gate_proj\.weight"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_in_one_sentence(tmp_path, config, tensors, said):
    renamed(tmp_path)
    models.register_family("wide", config, tensors)
    with pytest.raises(ValueError, match=said):
        models.load(tmp_path)


def test_a_built_in_family_is_registered_as_another_package_s_and_its_name_is_taken(tmp_path):
    with pytest.raises(
        ValueError, match=r"'llama' is in models\.built_in and in tests\.models\.test_loading; rename it"
    ):
        models.register_family("llama", wide)
    phi3 = FAMILIES["phi3"]

    def config(raw):
        return dataclasses.replace(phi3.config(raw), architecture="wide")

    models.register_family("wide", config, fused=phi3.fused, architecture="WideForCausalLM")
    folder = shutil.copytree(GOLDEN / "phi3", tmp_path / "wide")
    own = {"architectures": ["WideForCausalLM"], "model_type": "wide"}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | own))
    model, _ = models.load(folder)
    models.save(tmp_path / "saved", model)
    assert json.loads((tmp_path / "saved" / "config.json").read_text()).items() >= own.items()
    assert_same(models.load(tmp_path / "saved")[0], model)


def test_what_ships_for_a_model_is_found_in_a_package_of_its_own(tmp_path, monkeypatch):
    assert published.shipped("smollm2/gate") == Path(published.__file__).parent / "smollm2" / "gate"
    monkeypatch.setattr(published, "__file__", str(tmp_path / "models" / "published.py"))
    with pytest.raises(FileNotFoundError, match="kvjax-smollm2, which is not installed; run pip"):
        published.shipped("smollm2/gate")
    (tmp_path / "kvjax_smollm2" / "gate").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert published.shipped("smollm2/gate") == tmp_path / "kvjax_smollm2" / "gate"
