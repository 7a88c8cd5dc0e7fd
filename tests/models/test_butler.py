"""TokenButler's predictor: its sizes, its forward in NumPy float64, its cache, its input and its files."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from kernels_pallas import cache_attention
from models.butler import Butler, ButlerConfig, butler_input, importance, num_parameters, parameter_shapes
from models.butler import module as butler_module
from models.config import Rope, from_hugging_face
from models.decoder import _project, rms_norm, rope_frequencies
from models.parameters import parameter_shapes as model_shapes
from tests.models import reference
from tests.tiers import first

CONFIG = ButlerConfig(hidden_size=32, num_layers=4, num_heads=4, hidden=12, dim=6, rope_theta=100.0)
MODEL = models.Config(64, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, query_key_norm=True)

LLAMA = dict(architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_act="silu")
PUBLISHED = {
    "Llama-3.2-1B": (
        LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
        | dict(num_key_value_heads=8, tie_word_embeddings=True), 12_393_472, 0.993,
    ),
    "Llama-2-7B": (
        LLAMA | dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
        | dict(num_attention_heads=32), 83_113_984, 1.218,
    ),
    "Mistral-7B": (
        LLAMA | dict(architectures=["MistralForCausalLM"], vocab_size=32000, hidden_size=4096)
        | dict(intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
        83_113_984, 1.135,
    ),
}  # fmt: skip


whole = jax.jit(Butler.__call__)
step = jax.jit(Butler.step)


def a_butler(config: ButlerConfig = CONFIG) -> Butler:
    """With every parameter away from where training starts: norms and biases too."""
    rng = np.random.default_rng(0)

    def parameter(name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(name.endswith("norm") + rng.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)

    return Butler(config, {name: parameter(name, shape) for name, shape in parameter_shapes(config).items()})


def an_input(B: int = 2, T: int = 13, E: int = 32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, E)).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return reference.decoder(MODEL, reference.parameters(MODEL))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_as_the_paper_counts_them(name):
    raw, expected, percent = PUBLISHED[name]
    config = from_hugging_face(raw)
    count = num_parameters(ButlerConfig.of(config))
    assert count == expected
    of_model = sum(math.prod(shape) for shape in model_shapes(config).values())
    assert abs(100 * count / (count + of_model) - percent) < 1e-3  # the paper's share is of both together


@pytest.mark.matrix
def test_what_the_public_predictor_never_uses_is_all_that_its_layout_adds():
    plain, published = (dataclasses.replace(CONFIG, published_layout=layout) for layout in (False, True))
    added = num_parameters(published) - num_parameters(plain)
    assert added == 2 * CONFIG.hidden * CONFIG.num_heads * CONFIG.dim + 2 * CONFIG.hidden_size
    state = jax.tree.leaves(nnx.state(a_butler(published), nnx.Param))
    assert sum(leaf.size for leaf in state) == num_parameters(published)
    x = an_input()
    slope = jax.grad(lambda butler: jnp.sum(butler(x).query ** 2) + jnp.sum(butler(x).key ** 2))
    gradients = jax.jit(slope)(a_butler(published))
    unused = {name for name in parameter_shapes(published) if not np.any(getattr(gradients, name)[...])}
    assert unused == {"unused_query", "unused_key", "unused_norm", "unused_norm_bias"}


def test_other_models_get_a_predictor_of_a_share_of_their_parameters():
    phi = models.Config(32064, 3072, 8192, num_layers=32, num_heads=32, num_kv_heads=32)
    of_model = sum(math.prod(shape) for shape in model_shapes(phi).values())
    for share in (0.01, 0.03):
        config = ButlerConfig.of(phi, share=share)
        assert config.dim == 24 and not config.published_layout
        assert abs(num_parameters(config) / (share * of_model) - 1) < 0.05
    small = ButlerConfig.of(dataclasses.replace(MODEL, rope=Rope(theta=5.0)), source="attention_input")
    assert (small.hidden, small.dim, small.source, small.rope_theta) == (4, 2, "attention_input", 5.0)
    assert ButlerConfig.of(models.Config(9, 40, 40, num_layers=2, num_heads=4, num_kv_heads=4)).reduced == 8


def test_xavier_uniform():
    butler = Butler(dataclasses.replace(CONFIG, hidden_size=64, hidden=50), rngs=nnx.Rngs(0))
    for name, fans in {
        "reduce": 64 + 8,
        "query": 16,
        "query_in": 114,
        "key_out": 50 + 3 * 4 * 6,
        "down": 16 + 64,
    }.items():
        values, bound = np.asarray(getattr(butler, name)[...]), math.sqrt(6 / fans)
        assert 0.9 * bound < np.abs(values).max() <= bound and abs(values.mean()) < bound / 4
    assert (butler.norm[...] == 1).all() and not np.any(butler.down_bias[...])


def definition(butler: Butler, x: jax.Array) -> list[np.ndarray]:
    """q' and k' [L', B, T, N, D'] of the reference."""
    w = {name: np.asarray(getattr(butler, name)[...], np.float64) for name in parameter_shapes(butler.config)}
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
    monkeypatch.setattr(butler_module, "QUERIES_A_CHUNK", 4)
    chunked, chunked_gradients = jax.jit(jax.value_and_grad(lambda butler: loss(butler)))(butler)
    np.testing.assert_allclose(chunked, expected, rtol=1e-5)
    for mine, expected in zip(jax.tree.leaves(chunked_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


def test_a_token_is_not_predicted_from_later_ones():
    butler, x = a_butler(), an_input()
    changed = x + (np.arange(13) >= 7).astype(np.float32)[:, None]
    for before, after in zip(*(map(np.asarray, whole(butler, given)) for given in (x, changed)), strict=True):
        np.testing.assert_allclose(after[:, :, :7], before[:, :, :7], rtol=1e-5, atol=1e-5)
        assert np.abs(after[:, :, 7:] - before[:, :, 7:]).min(axis=(0, 3, 4)).max() > 1e-3


@pytest.mark.parametrize("blocks", first(1, [[4, 4, 5], [13], [1] * 13]), ids=str)
def test_blocks_and_steps_give_what_the_whole_sequence_gives(blocks):
    butler, x = a_butler(), an_input()
    query, key = whole(butler, x)
    cache, queries, start = butler.init_cache(batch=2, slots=16), [], 0
    for size in blocks:
        position = np.tile(np.arange(start, start + size, dtype=np.int32), (2, 1))
        new, cache = step(butler, cache, x[:, start : start + size], position)
        queries.append(new)
        start += size
    queries, position = np.concatenate(queries, axis=2), np.tile(np.arange(13), (2, 1))
    seen = np.tri(13, dtype=bool)

    @jax.jit
    def importances(queries, cache):
        ours = [
            importance(queries, cache.importance_key, layer, position=position, key_position=cache.position)
            for layer in (1, 2, 3)
        ]
        return ours, [importance(query, key.swapaxes(2, 3), layer) for layer in (1, 2, 3)]

    for layer, (ours, everywhere) in enumerate(zip(*importances(queries, cache), strict=True)):
        expected = np.einsum("btnd,bsnd->bnts", np.asarray(query)[layer], np.asarray(key)[layer]) / math.sqrt(6)
        ours = np.asarray(ours)
        np.testing.assert_allclose(ours[..., :13][..., seen], expected[..., seen], rtol=1e-4, atol=1e-4)
        assert (ours[..., :13][..., ~seen] == -np.inf).all() and (ours[..., 13:] == -np.inf).all()
        np.testing.assert_allclose(everywhere, expected, rtol=1e-4, atol=1e-5)


def test_ragged_rows_are_predicted_as_they_are_alone():
    butler, x = a_butler(), an_input()
    cache = butler.init_cache(batch=2, slots=13)
    position = np.stack([np.arange(13), np.r_[[-1] * 5, np.arange(8)]])
    queries = []
    for start in (0, 4, 8, 12):
        part = slice(start, start + 4)
        query, cache = step(butler, cache, x[:, part], position[:, part])
        queries.append(query)
    alone = whole(butler, x[1:, 5:])
    alone = type(alone)(*map(np.asarray, alone))
    np.testing.assert_allclose(np.concatenate(queries, 2)[:, 1:, 5:], alone.query, rtol=1e-4, atol=1e-5)
    keys = np.asarray(cache.importance_key)[:, 1:, :, :8]
    np.testing.assert_allclose(keys, alone.key.swapaxes(2, 3), rtol=1e-4, atol=1e-5)
    assert cache.position[1].tolist() == [*range(8), *[-1] * 5]
    padded = whole(butler, x, position)
    np.testing.assert_allclose(np.asarray(padded.query)[:, 1:, 5:], alone.query, rtol=1e-4, atol=1e-5)


def test_keys_are_rotated_once_and_stored_once():
    butler, x = a_butler(), an_input(B=1)
    cache = butler.init_cache(batch=1, slots=13)
    _, early = step(butler, cache, x[:, :6], np.arange(6)[None])
    _, late = step(butler, early, x[:, 6:], np.arange(6, 13)[None])
    for name in ("key", "value", "importance_key"):
        before, after = (np.asarray(getattr(cache, name))[..., :6, :] for cache in (early, late))
        np.testing.assert_array_equal(after, before)
    per_token = sum(leaf.size for leaf in jax.tree.leaves(cache)) / 13
    assert per_token == 2 * CONFIG.reduced + 3 * 4 * 6 + 1


def test_a_donated_cache_is_updated_in_place():
    butler, position = a_butler(), jnp.zeros((1, 1), jnp.int32)
    cache = butler.init_cache(batch=1, slots=4096)
    decode = jax.jit(lambda cache, x: butler.step(cache, x, position), donate_argnums=0)
    memory = decode.lower(cache, jnp.zeros((1, 1, 32))).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < cache.importance_key.nbytes  # what attention over 4096 slots takes


@pytest.mark.matrix
def test_importance_of_a_layer_never_holds_that_of_all_layers():
    L, N, T = 8, 4, 512
    query, key = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((L, 1, T, N, 16), (L, 1, N, T, 16)))

    def best(query, key):
        return jax.lax.map(lambda layer: importance(query, key, layer).max(-1), jnp.arange(1, L + 1))

    temporary = jax.jit(best).lower(query, key).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2.5 * N * T * T * 4 < L * N * T * T * 4 / 3


@pytest.mark.matrix
def test_dropout_only_with_a_key():
    butler, x = a_butler(), an_input()
    first, again, other = (whole(butler, x, dropout_key=jax.random.key(seed)).query for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3 and np.abs(first - whole(butler, x).query).max() > 1e-3


def test_a_model_in_half_precision_is_predicted_in_the_predictors_own_dtype():
    butler, x = a_butler(), jnp.asarray(an_input(), jnp.bfloat16)
    assert whole(butler, x).query.dtype == jnp.float32
    np.testing.assert_array_equal(whole(butler, x).query, whole(butler, x.astype(jnp.float32)).query)


@pytest.mark.parametrize(
    "config",
    first(
        1,
        [
            MODEL,
            dataclasses.replace(
                MODEL, query_key_norm=False, attention_bias=True, output_bias=True, tie_embeddings=True
            ),
            dataclasses.replace(MODEL, sliding_windows=(4, None, None)),
            dataclasses.replace(MODEL, rope=Rope(type="dynamic", factor=2.0, original_positions=8)),
        ],
    ),
    ids=["qwen3", "biases", "sliding", "dynamic"],
)
def test_the_input_is_what_the_models_own_layers_read(config):
    """Read off the queries: those of layer 1 are made of layer 0's output, those of layer 0 of what enters it."""
    model = reference.decoder(config, reference.parameters(config))
    tokens = np.random.default_rng(4).integers(0, 64, (2, 12))
    position, lengths = np.stack([np.arange(12), np.maximum(np.arange(12) - 3, -1)]), np.array([12, 9])

    def attend(carry, layer, window, query, key, value):
        slots = jnp.broadcast_to(position[:, None], (2, key.shape[2], 12))
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        return cache_attention(query, key, value, slots, position, sliding_window=window)[0], carry, query

    @jax.jit
    def both(model):
        """The queries of layers 0 and 1: the model's own, and those made of what is given as their input."""
        expected = model.run(jnp.asarray(tokens), jnp.asarray(position), jnp.asarray(lengths), attend, None)[2]
        frequency, amplitude = rope_frequencies(config.rope, config.head_dim, jnp.asarray(lengths))
        angle = jnp.maximum(position, 0)[..., None] * frequency[:, None]
        cos, sin = (amplitude * wave(angle)[:, :, None] for wave in (jnp.cos, jnp.sin))
        first, second = ({name: array[i] for name, array in model.layers.arrays().items()} for i in (0, 1))
        output = butler_input(model, jnp.asarray(tokens), jnp.asarray(position))
        entering = (
            (first, butler_input(model, jnp.asarray(tokens), source="attention_input")),
            (second, rms_norm(output, second["attention_norm"], config.norm_epsilon)),
        )
        return expected[:2], [kvjax.rotate(_project(config, p, x)[0], cos, sin) for p, x in entering]

    valid = position >= 0
    for expected, query in zip(*both(model), strict=True):
        np.testing.assert_allclose(np.asarray(query)[valid], np.asarray(expected)[valid], rtol=1e-4, atol=1e-5)


def _parameter(model: models.Decoder, name: str):
    part = model
    for attribute in name.split("."):
        part = getattr(part, attribute)
    return part[...]


def test_a_saved_predictor_comes_back_as_it_was_in_the_dtype_of_its_model(model, tmp_path):
    butler = a_butler(dataclasses.replace(ButlerConfig.of(MODEL), published_layout=True))
    models.save_butler(tmp_path / "new", butler, model, "a model")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["butler.json", "butler.safetensors"]
    narrow = models.Decoder(
        MODEL, {name: np.asarray(_parameter(model, name)).astype("bfloat16") for name in model_shapes(MODEL)}
    )
    for any_dtype in (model, narrow):
        loaded = models.load_butler(tmp_path / "new", any_dtype)
        assert loaded.config == butler.config
        for name in parameter_shapes(butler.config):
            expected = np.asarray(getattr(butler, name)[...]).astype(any_dtype.embedding[...].dtype)
            np.testing.assert_array_equal(getattr(loaded, name)[...], expected)


@pytest.mark.matrix
def test_a_predictor_saved_in_half_precision_comes_back(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_butler(tmp_path / "wide", butler, model, "a model")
    models.save_butler(tmp_path / "narrow", models.load_butler(tmp_path / "wide", model, dtype="bfloat16"), model, "it")
    loaded = models.load_butler(tmp_path / "narrow", model)
    for name in parameter_shapes(butler.config):
        expected = getattr(butler, name)[...].astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(getattr(loaded, name)[...], expected)


@pytest.mark.matrix
def test_a_predictor_may_compute_in_another_dtype_from_its_weights_to_its_answer(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_butler(tmp_path, butler, model, "a model")
    narrow = models.load_butler(tmp_path, model, dtype="bfloat16")
    assert {str(getattr(narrow, name)[...].dtype) for name in parameter_shapes(butler.config)} == {"bfloat16"}
    x = jax.random.normal(jax.random.key(0), (1, 6, MODEL.hidden_size))
    query, cache = narrow.step(narrow.init_cache(1, 8), x, jnp.arange(6)[None])
    assert {str(array.dtype) for array in (query, cache.key, cache.value, cache.importance_key)} == {"bfloat16"}
    wide, _ = butler.step(butler.init_cache(1, 8), x, jnp.arange(6)[None])
    np.testing.assert_allclose(query.astype(jnp.float32), wide, atol=0.05 * float(jnp.abs(wide).max()), rtol=0)
    out = models.generate(
        model, jnp.arange(20)[None], select="butler", budget=0.5, butler=narrow, block=16, max_new_tokens=4, end=()
    )
    assert out.tokens.shape == (1, 4)
    with pytest.raises(ValueError, match="dtype 'int8' is not known; expected one of bfloat16, float16, float32"):
        models.load_butler(tmp_path, model, dtype="int8")


def test_a_predictor_of_another_model_is_refused(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_butler(tmp_path, butler, model, "a model")
    config = dataclasses.replace(MODEL, num_layers=4, sliding_windows=())
    deeper = reference.decoder(config, reference.parameters(config))
    with pytest.raises(ValueError, match=r"another model, a model: num_layers 3 there and 4 here, sliding_windows"):
        models.load_butler(tmp_path, deeper)
    with pytest.raises(ValueError, match=r"another model, a model, with this one's shape but other weights"):
        models.load_butler(tmp_path, reference.decoder(MODEL, reference.parameters(MODEL, seed=1)))
    other_end = models.Decoder(
        dataclasses.replace(MODEL, eos=(7,)), {n: _parameter(model, n) for n in model_shapes(MODEL)}
    )
    assert models.load_butler(tmp_path, other_end).config == butler.config


def test_damaged_files_are_one_clear_error(model, tmp_path):
    butler = a_butler(ButlerConfig.of(MODEL))
    models.save_butler(tmp_path, butler, model, "a model")
    weights, config = tmp_path / "butler.safetensors", tmp_path / "butler.json"
    kept = weights.read_bytes(), config.read_text()
    weights.write_bytes(kept[0][:-50])
    with pytest.raises(ValueError, match=r"butler.safetensors is truncated or corrupted .*; copy it again"):
        models.load_butler(tmp_path, model)
    weights.write_bytes(kept[0])
    raw = json.loads(kept[1])
    config.write_text(json.dumps(raw | {"butler": raw["butler"] | {"hidden": 24}}))
    with pytest.raises(ValueError, match=r"does not fit its butler.json in key_in, key_out, query_in, query_out; copy"):
        models.load_butler(tmp_path, model)
    for text in ("{}", '{"butler": {"width": 3}, "model": {}}', '{"butler": 3}'):
        config.write_text(text)
        with pytest.raises(ValueError, match=r"butler.json describes no predictor \(.*\); train or copy it again"):
            models.load_butler(tmp_path, model)
    config.write_text(kept[1][:-9])
    with pytest.raises(ValueError, match="is not valid JSON"):
        models.load_butler(tmp_path, model)
    weights.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no butler.safetensors; give a folder that models.save_butler wrote"
    ):
        models.load_butler(tmp_path, model)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataclasses.replace(CONFIG, num_layers=1), r"num_layers is 1; layer 0 is not predicted"),
        (lambda: dataclasses.replace(CONFIG, dim=5), r"dim is 5; rotary embedding needs an even one"),
        (lambda: dataclasses.replace(CONFIG, hidden=0), r"hidden is 0; it must be at least 1"),
        (lambda: dataclasses.replace(CONFIG, source="layer1"), r"source is 'layer1'; expected 'layer0_output' or"),
        (lambda: dataclasses.replace(CONFIG, dropout=1.0), r"dropout is 1.0; give a share in \[0, 1\)"),
        (lambda: ButlerConfig.of(MODEL, share=1), r"share is 1; give the predictor's share"),
        (lambda: Butler(CONFIG), r"neither parameters nor rngs were given"),
        (lambda: a_butler().init_cache(batch=1, slots=0), r"slots is 0; a cache needs at least 1"),
        (lambda: a_butler()(np.zeros((1, 2, 31))), r"the input \(1, 2, 31\) is not the model's: expected \[B, T, 32\]"),
        (lambda: importance(np.zeros((2, 1, 1, 1, 2)), np.zeros((2, 1, 1, 1, 2)), 0), r"layer is 0; layers 1 to 2 are"),
        (lambda: importance(np.zeros((2, 1, 1, 1, 2)), np.zeros((2, 1, 1, 1, 2)), 3), r"layer is 3; layers 1 to 2 are"),
        (lambda: butler_input(None, None, source="both"), r"unknown source 'both'"),
        (
            lambda: a_butler().step(a_butler().init_cache(1, 4), np.zeros((1, 1, 32), np.float32), np.array([[4]])),
            r"position 4 does not fit the predictor's cache of 4 slots",
        ),
    ],
    ids=range(13),
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
