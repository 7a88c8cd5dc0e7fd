"""Published gates are read as kvpress reads them: its scores, and what it keeps by them (files: make_gates.py)."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.published_gates import CONVERT
from tests.models import make_gates
from tests.models.make_gates import FILE, GATES, KEPT
from tests.models.make_kvpress import T
from tests.models.test_kvpress import fixture as of_prompt
from tests.models.test_kvpress import model
from tests.models.test_kvzip import in_order, slots_of
from tests.models.tiny import decoder, kept_tokens
from tests.tiers import first

RAISED = "zap+protect(sinks=4,recent=2)"  # kvpress takes 2% of the prompt as recent
POLICIES = {
    ("kvzap-mlp", "head"): "zap@uniform",
    ("fast-kvzip", "all"): "zap@uniform",
    ("fast-kvzip", "model"): RAISED,
    ("kvzap-linear", "head"): "zap@uniform",
    ("kvzap-mlp", "threshold"): "zap+protect(recent=16)@threshold(least={})",
    ("fast-kvzip", "layer"): f"{RAISED}@layer(cap=None)",
    ("kvzap-linear", "all"): "zap@uniform",
    ("kvzap-mlp", "all"): "zap@uniform",
}


@functools.cache
def fixture():
    with np.load(FILE) as arrays:
        return dict(arrays)


def kept_by(gate, scope):
    """Return what stays, and what kvpress keeps, bool [L, K, T], and the scores of what stays."""
    policy = POLICIES[gate, scope].format(np.exp(fixture().get("threshold", 0)))
    cache, _ = models.prefill(
        model(), of_prompt()["tokens"][None], policy=policy, budget=KEPT if scope in ("head", "model", "layer") else T,
        block=T, when="prompt", networks=models.load_network(GATES / gate, model()),
    )  # fmt: skip
    kept = kept_tokens(cache, T)[:, 0]
    expected = np.ones_like(kept)
    if scope != "all":
        expected = np.unpackbits(fixture()[f"{gate}/{scope}"], axis=-1).astype(bool)
    scores = in_order(cache, slots_of(cache, lambda own: jax.tree.leaves(own.state)[0]), T, np.nan)[:, 0]
    return kept, expected, scores


@pytest.mark.parametrize(("gate", "scope"), first(2, POLICIES))
def test_what_stays_is_what_kvpress_keeps_by_the_same_scores(gate, scope):
    """Scores are those of the tokens that stay; of "all" nothing leaves."""
    kept, expected, scores = kept_by(gate, scope)
    np.testing.assert_array_equal(kept, expected)
    expected = fixture()[f"{gate}/scores"]
    expected = np.exp(expected) if gate.startswith("kvzap") else expected
    np.testing.assert_allclose(scores[kept], expected[kept], rtol=2**-11)  # ours are rounded


@pytest.mark.parametrize("gate", ["kvzap-linear", "kvzap-mlp", "fast-kvzip"])
def test_a_gate_of_another_model_is_refused_in_one_sentence(gate):
    with pytest.raises(
        ValueError, match=r"safetensors is a gate of another model, or damaged: it has .* of shape"
    ) as said:
        models.load_network(GATES / gate, decoder())
    assert "hidden_size, num_layers, num_heads, num_kv_heads = [32, 2, 4, 2]" in str(said.value)


def changed(gate, folder, change):
    (file,) = shutil.copytree(GATES / gate, folder).glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_a_gate_in_16_bits_keeps_them(tmp_path):
    def narrowed(tensors):
        tensors |= {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}

    own = models.load_network(changed("fast-kvzip", tmp_path / "gate", narrowed), model())
    assert {own.query[...].dtype, own.sinks[...].dtype} == {np.dtype(jnp.bfloat16)}


DAMAGES = {
    "a layer less": (
        lambda tensors: tensors.pop("2.b"),
        r"it has no 2\.b, and one of this model, .* has 2\.b of shape",
    ),
    "a tensor more": (lambda tensors: tensors.update({"3.b": tensors["2.b"]}), r"it has 3\.b of shape .* has no 3\.b;"),
    "no width": (
        lambda tensors: tensors.update({"0.q_norm.weight": np.ones((), np.float32)}),
        "another model, or damaged",
    ),
    "no number": (
        lambda tensors: tensors.update({"1.b": np.nan * tensors["1.b"]}),
        "holds NaN or infinite numbers in bias",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_gate_is_refused(tmp_path, damage):
    change, said = DAMAGES[damage]
    with pytest.raises(ValueError, match=said):
        models.load_network(changed("fast-kvzip", tmp_path / "gate", change), model())


def test_a_gate_that_is_cut_off_is_refused(tmp_path):
    file = shutil.copytree(GATES / "kvzap-mlp", tmp_path / "gate") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is truncated or corrupted"):
        models.load_network(tmp_path / "gate", model())


def test_a_pickle_is_not_read_but_its_conversion_is_named(tmp_path):
    (tmp_path / "q4_dim16_sink16.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="can run code when read") as said:
        models.load_network(tmp_path, model())
    assert f"{CONVERT} {tmp_path}/q4_dim16_sink16.pt {tmp_path}/q4_dim16_sink16.safetensors" in str(said.value)
    assert CONVERT == make_gates.CONVERT  # with it the fixture was made


def test_a_model_is_no_gate():
    with pytest.raises(FileNotFoundError, match="holds no network"):
        models.load_network(GATES.parent, model())


def test_several_gates_have_folders_of_their_own(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(GATES / "kvzap-mlp" / "model.safetensors", tmp_path / name)
    with pytest.raises(ValueError, match=r"several files of weights: a.safetensors, b.safetensors; give each gate"):
        models.load_network(tmp_path, model())
