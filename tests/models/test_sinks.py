"""A model with sinks, gpt-oss, through all that attends: its logits, what policies see, and what cannot have sinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax._src.quantise import Dtypes
from models import decoder, engine
from models.gradients import loss_gradient
from tests.evals.test_selections import simulate
from tests.kvjax.definitions import block_weights
from tests.models.make_golden import GOLDEN
from tests.tiers import matrix

golden = functools.cache(lambda: np.load(GOLDEN / "gpt_oss" / "golden.npz"))
close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0)


@functools.cache
def model(**options):
    return models.load(GOLDEN / "gpt_oss", **options)[0]


@matrix
@pytest.mark.parametrize(
    ("policy", "options"),
    [("h2o@model", {}), ("h2o", dict(mesh="data=1,tensor=2")), ("h2o+positions(kind='compact')@model", {})],
)
def test_logits_over_pages_on_a_mesh_and_with_turned_keys_are_those_of_transformers(policy, options):
    own = models.load(GOLDEN / "gpt_oss", mesh=models.parse_mesh(options["mesh"]))[0] if options else model()
    tokens = golden()["tokens_0"]
    found = models.hidden_states(own, tokens, policy=policy, budget=tokens.shape[1], block=20).hidden
    close(engine.logits_of(own, found), golden()["logits_0"])


@matrix
def test_selections_have_sinks():
    tokens = golden()["tokens_0"]
    close(simulate(model(), tokens, "oracle", 0.0), golden()["logits_0"])
    settings = dict(block=16, max_new_tokens=8, end=())
    chosen = models.generate(model(), tokens, select="oracle", budget=1.0, **settings)
    np.testing.assert_array_equal(chosen.tokens, models.generate(model(), tokens, **settings).tokens)


@matrix
def test_what_a_predictor_reads_has_sinks():
    own, tokens = model(), golden()["tokens_0"]
    position, lengths = jnp.arange(tokens.shape[1])[None], jnp.array([tokens.shape[1]])

    @jax.jit
    def first_layer(own, tokens):
        x, waves = decoder.entered(own.config, own.embedding[...], tokens, position, lengths)
        return one_layer(own, 0, x, waves, position)

    close(jax.jit(models.butler_input)(own, tokens), first_layer(own, tokens))


def one_layer(own, number, x, waves, position, shift=None):
    """Runs a layer with dense attention."""
    config, weights = own.config, own.layers[number].arrays()

    def attend(*block):
        window = config.sliding_windows[number]
        out = decoder.attend_densely(config, position, window, *block, weights["sink_logits"])
        return out, None, None

    rope = decoder.rope_of_layer(config, number, waves)
    return decoder.summed(decoder.run_layer(config, weights, x, rope, attend, shift)[0])


@matrix
def test_the_gradient_while_a_text_is_repeated_is_that_of_dense_attention():
    """Behind 6 tokens, which all windows see whole, the copies of 3 of them."""
    own, text = model(), golden()["tokens_0"][:, :6]
    copies, position = text[:, 2:5], jnp.arange(9)[None]

    def loss(shifts):
        x, waves = decoder.entered(
            own.config, own.embedding[...], np.concatenate([text, copies], axis=1), position, jnp.array([6])
        )
        for number, shift in enumerate(shifts):
            x = one_layer(own, number, x, waves, position, jnp.pad(shift, ((0, 0), (6, 0), (0, 0))))
        return jnp.sum(x[:, 6:] ** 2)

    expected = jax.jit(jax.grad(loss))([jnp.zeros((1, 3, 16))] * 2)
    cache, _ = models.prefill(own, text, block=6)
    wanted = kvjax.Reconstruction(statistics=frozenset({"weights"}), loss="hidden")
    given = map(np.array, (copies, [[6, 7, 8]], [[2, 5, 6]], [6]))
    found = jax.jit(loss_gradient, static_argnums=(1, 7))(own, wanted, cache, *given, Dtypes("float32", "float32"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))


T, N, K, D = 6, 4, 2, 4
SINKS = np.array([0.5, -1, 3, 0], np.float32)


@functools.cache
def block():
    """Queries, keys and values of a block, and its weights beside sinks [N, T, T]."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, T, heads, D)).astype(np.float32) for heads in (N, K, K))
    at = np.arange(T)[None]
    weights = block_weights(query, key.swapaxes(1, 2), np.repeat(at[None], K, axis=1), at, sink_logits=SINKS)[0]
    return query, key, value, weights


def scores_of(policy, **more):
    query, key, value, _ = block()
    policy = kvjax.parse(policy)
    context = kvjax.Context(sink_logits=SINKS, **more)
    empty = kvjax.empty_cache(policy, budget=T, block=T, kv_heads=K, query_heads=N, head_dim=D)

    def scored(cache):
        return kvjax.observe(cache, query, key, value, policy=policy, budget=T, context=context)

    _, cache, said = jax.jit(scored)(empty)
    order = np.argsort(np.where(cache.position < 0, T, cache.position)[0], axis=1)[:, :T]
    return np.take_along_axis(np.asarray(said.scores)[0], order, axis=1)


def test_a_tokens_score_is_the_weight_that_attention_gave_it():
    of_groups = block()[3][:, -1].reshape(K, N // K, T).mean(axis=1)
    np.testing.assert_allclose(scores_of("tova(heads='group')"), of_groups, rtol=1e-5)


@pytest.mark.parametrize("policy", ["tova(heads='group')+caote", "snapkv(window=1,kernel=1)+caote"])
def test_caote_is_how_the_output_beside_a_sink_changes(policy):
    """By attention of the last query without each token; a group's heads count together."""
    query, key, value, _ = block()
    at, each = np.arange(T)[None], np.zeros((N, T, D))
    keys, places = key.swapaxes(1, 2), np.repeat(at[None], K, axis=1)
    for gone in range(-1, T):
        left = np.where(places == gone, -1, places)
        weights = block_weights(query, keys, left, at, sink_logits=SINKS)[0][:, -1]
        out = np.stack([weights[n] @ value[0, :, n // (N // K)] for n in range(N)])
        if gone < 0:
            whole = out
        else:
            each[:, gone] = whole - out
    expected = np.sqrt((each**2).sum(axis=-1).reshape(K, N // K, T).sum(axis=1))
    found = scores_of(policy)
    finite = np.isfinite(found)  # a window's own tokens stay
    assert finite.sum() > K * (T - 2)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-4)


def test_fitting_biases_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^'match' does not fit layers with a sliding window, a soft cap or sinks"):
        scores_of("h2o+match")


def test_sinks_of_another_number_of_heads_are_refused():
    from kernels_pallas import cache_attention

    query, key, value, _ = block()
    keys, at = key.swapaxes(1, 2), np.arange(T)[None]
    with pytest.raises(ValueError, match=r"sink_logits are \(2,\); expected \(4,\), one logit per query head"):
        cache_attention(query, keys, value.swapaxes(1, 2), np.repeat(at[None], K, 1), at, sink_logits=SINKS[:2])
