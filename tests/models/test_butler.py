"""TokenButler's predictor: its sizes, its forward in NumPy float64, its cache, its input and its files."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models import dense
from models.butler import Butler, ButlerConfig
from models.config import Rope
from models.parameters import parameter_shapes as model_shapes
from tests.models import reference, tiny

# Of no model, and with angles that differ within a few positions.
CONFIG = ButlerConfig(hidden_size=32, num_layers=4, num_heads=4, hidden=12, dim=6, rope_theta=100.0)
MODEL = tiny.config(num_layers=3, query_key_norm=True)  # two layers are predicted

LLAMA2_7B = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32)
PUBLISHED = {  # with the number of parameters, and their share of all in percent
    "Llama-3.2-1B": (
        dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8),
        12_393_472, 0.993,
    ),
    "Llama-2-7B": (LLAMA2_7B | dict(num_kv_heads=32), 83_113_984, 1.218),
    "Mistral-7B": (LLAMA2_7B | dict(intermediate_size=14336, num_kv_heads=8), 83_113_984, 1.135),
}  # fmt: skip


whole = jax.jit(Butler.__call__)
step = jax.jit(Butler.step)


def a_butler(config: ButlerConfig = CONFIG) -> Butler:
    """With every parameter away from where training starts: norms and biases too."""
    rng = np.random.default_rng(0)

    def parameter(name: str, shape: tuple[int, ...]) -> jax.Array:
        drawn = name.endswith("norm") + rng.normal(size=shape) / math.sqrt(shape[0])
        return jax.device_put(drawn.astype(np.float32))

    return Butler(config, {name: parameter(name, shape) for name, shape in config.shapes.items()})


def an_input(B: int = 2, T: int = 13, E: int = 32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, E)).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return tiny.decoder(MODEL)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_as_the_paper_counts_them(name):
    sizes, expected, percent = PUBLISHED[name]
    config = models.Config(**sizes, tie_embeddings=name == "Llama-3.2-1B")
    count = ButlerConfig.of(config).num_parameters
    assert count == expected
    of_model = sum(math.prod(shape) for shape in model_shapes(config).values())
    assert abs(100 * count / (count + of_model) - percent) < 1e-3  # the paper's share is of both together


def test_other_models_get_a_predictor_of_a_share_of_their_parameters():
    phi = models.Config(32064, 3072, 8192, num_layers=32, num_heads=32, num_kv_heads=32)
    of_model = sum(math.prod(shape) for shape in model_shapes(phi).values())
    config = ButlerConfig.of(phi)
    assert config.dim == 24 and not config.published_layout
    assert abs(config.num_parameters / (0.01 * of_model) - 1) < 0.05
    small = ButlerConfig.of(dataclasses.replace(MODEL, rope=Rope(theta=5.0)))
    assert (small.hidden, small.dim, small.rope_theta) == (4, 2, 5.0)
    assert ButlerConfig.of(models.Config(9, 40, 40, num_layers=2, num_heads=4, num_kv_heads=4)).reduced == 8


def test_xavier_uniform():
    butler = Butler(dataclasses.replace(CONFIG, hidden_size=64, hidden=50), rngs=nnx.Rngs(0))
    for name, fans in dict(reduce=64 + 8, query=16, query_in=114, key_out=50 + 3 * 4 * 6, down=16 + 64).items():
        values, bound = np.asarray(getattr(butler, name)[...]), math.sqrt(6 / fans)
        assert 0.9 * bound < np.abs(values).max() <= bound and abs(values.mean()) < bound / 4
    assert (np.asarray(butler.norm[...]) == 1).all() and not np.asarray(butler.down_bias[...]).any()


def definition(butler: Butler, x: jax.Array) -> list[np.ndarray]:
    """q' and k' [L', B, T, N, D'] of the reference."""
    w = {name: np.asarray(getattr(butler, name)[...], np.float64) for name in butler.config.shapes}
    rows = [reference.predicted(w, butler.config.rope_theta, row) for row in np.asarray(x, np.float64)]
    return [np.moveaxis(np.stack(part), (0, 3), (1, 2)) for part in zip(*rows, strict=True)]


def test_queries_and_keys_are_those_of_the_definition():
    butler, x = a_butler(), an_input()
    ours, theirs = whole(butler, x), definition(butler, x)
    assert ours.query.shape == (3, 2, 13, 4, 6)
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.matrix
def test_chunks_of_queries_change_nothing_nor_do_their_gradients(monkeypatch):
    butler, x = a_butler(), an_input()

    def loss(butler):
        return sum(jnp.sum(jnp.sin(part)) for part in butler(x))

    expected, gradients = jax.jit(jax.value_and_grad(loss))(butler)
    monkeypatch.setattr(dense, "QUERIES_A_CHUNK", 4)
    chunked, chunked_gradients = jax.jit(jax.value_and_grad(lambda butler: loss(butler)))(butler)
    np.testing.assert_allclose(chunked, expected, rtol=1e-5)
    for mine, expected in zip(jax.tree.leaves(chunked_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


def test_a_saved_predictor_comes_back_as_it_was_in_the_dtype_of_its_model(model, tmp_path):
    butler = a_butler(dataclasses.replace(ButlerConfig.of(MODEL), published_layout=True))
    models.save_network(tmp_path / "new", butler, model, "a model")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["butler.json", "butler.safetensors"]
    narrow = models.Decoder(MODEL, {n: np.asarray(array).astype("bfloat16") for n, array in model.arrays().items()})
    for any_dtype in (model, narrow):
        loaded = models.load_network(tmp_path / "new", any_dtype)
        assert loaded.config == butler.config
        for name in butler.config.shapes:
            expected = np.asarray(getattr(butler, name)[...]).astype(any_dtype.embedding[...].dtype)
            np.testing.assert_array_equal(getattr(loaded, name)[...], expected)


@pytest.mark.matrix
def test_a_predictor_may_be_kept_and_compute_in_another_dtype_from_its_weights_to_its_answer(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_network(tmp_path / "wide", butler, model, "a model")
    narrow = models.load_network(tmp_path / "wide", model, dtype="bfloat16")
    models.save_network(tmp_path / "narrow", narrow, model, "it")
    again = models.load_network(tmp_path / "narrow", model)
    for name in butler.config.shapes:
        assert getattr(narrow, name)[...].dtype == "bfloat16"
        expected = np.asarray(getattr(butler, name)[...]).astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(getattr(again, name)[...], expected)
    x, position = an_input(B=1, T=6), np.arange(6)[None]
    (query, cache), (wide, _) = (step(own, own.init_cache(1, 8), x, position) for own in (narrow, butler))
    assert {str(array.dtype) for array in (query, cache.key, cache.value, cache.importance_key)} == {"bfloat16"}
    np.testing.assert_allclose(np.asarray(query, np.float32), wide, atol=0.05 * np.abs(wide).max(), rtol=0)
    with pytest.raises(ValueError, match="dtype 'int8' is not known; expected one of bfloat16, float16, float32"):
        models.load_network(tmp_path / "wide", model, dtype="int8")


def test_a_predictor_of_another_model_is_refused(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_network(tmp_path, butler, model, "a model")
    config = dataclasses.replace(MODEL, num_layers=4, sliding_windows=())
    deeper = reference.decoder(config)
    with pytest.raises(ValueError, match=r"another model, a model: num_layers 3 there and 4 here, sliding_windows"):
        models.load_network(tmp_path, deeper)
    with pytest.raises(ValueError, match=r"another model, a model, with this one's shape but other weights"):
        models.load_network(tmp_path, reference.decoder(MODEL, reference.parameters(MODEL, seed=1)))
    other_end = models.Decoder(dataclasses.replace(MODEL, eos=(7,)), model.arrays())
    assert models.load_network(tmp_path, other_end).config == butler.config
