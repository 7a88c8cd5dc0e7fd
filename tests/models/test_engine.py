"""Prefill, generate and stream against an independent reference, row by row; tests/campaign draws the pairs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from kvjax._src.window import Window
from models import steps
from models.engine import logits_of
from models.parameters import split_weights
from tests.models import reference, tiny
from tests.models.tiny import SETTINGS, STATE, TOKENS, answers, decoder, held, run
from tests.tiers import first, nightly

END = tuple(range(0, tiny.VOCABULARY, 9))  # so many that the rows stop at different steps


def test_fifty_blocks_keep_the_references_tokens_and_give_its_logits():
    settings = dict(policy="h2o+caote", budget=14, block=4)
    out = models.hidden_states(decoder(), tiny.LONG, lengths=tiny.LONG_LENGTHS, **settings)
    logits = np.asarray(logits_of(decoder(), out.hidden))
    assert out.cache.next_position.tolist() == tiny.LONG_LENGTHS.tolist()
    for row, length in enumerate(tiny.LONG_LENGTHS):
        expected = run(tiny.LONG[row, :length], **settings)
        tiny.assert_keeps(out.cache, row, expected)
        np.testing.assert_allclose(logits[row, :length], expected.logits, atol=1e-4, rtol=0)


def test_rows_that_are_padded_beyond_the_models_positions_are_read():
    model = models.Decoder(dataclasses.replace(decoder().config, max_positions=64), decoder().arrays())
    rows = TOKENS[:2, :40]
    wide = np.pad(rows, ((0, 0), (0, 200)))
    one, other = (
        models.generate(model, tokens, lengths=[40, 31], block=16, max_new_tokens=4) for tokens in (rows, wide)
    )
    assert one.tokens.tolist() == other.tokens.tolist()
    with pytest.raises(ValueError, match="the prompt and its answer take 68 positions, but the model has 64"):
        models.generate(model, wide, lengths=[64, 31], max_new_tokens=4)


def test_each_step_draws_anew_and_a_stream_draws_what_generate_does(run_by_layer):
    """So hot that all tokens are alike, twelve draws are twelve different ones or nearly so."""
    hot = dict(temperature=1e6, top_k=200, top_p=0.9, end=(3, 4), max_new_tokens=12, lengths=tiny.LENGTHS)
    settings = dict(policy=STATE, **SETTINGS, **hot)
    run_by_layer(False)
    one, same, other = (
        models.generate(decoder(), tiny.TOKENS, key=jax.random.key(seed), **settings) for seed in (7, 7, 2)
    )
    assert answers(one) == answers(same) != answers(other)
    assert all(len(set(row)) > 8 for row in answers(one))
    run_by_layer(True)
    steps, _ = tiny.streamed(decoder(), tiny.TOKENS, key=jax.random.key(7), **settings)
    assert steps.shape[1] == one.lengths.max()
    for row, length in enumerate(one.lengths):
        assert steps[row, :length].tolist() == answers(one)[row]
        assert (steps[row, length:] == -1).all()


PENALISED = dict(repetition_penalty=1.7, block=8, max_new_tokens=8, end=())


def test_a_repetition_penalty_counts_each_row_s_prompt_and_answer():
    out = models.generate(decoder(), tiny.TOKENS, lengths=tiny.LENGTHS, **PENALISED)
    repeated = 0
    for row, length in enumerate(tiny.LENGTHS):
        text = [*tiny.TOKENS[row, :length].tolist(), *answers(out)[row]]
        for end, logits in enumerate(run(text[:-1]).logits[length - 1 :], length):
            repeated += int(np.argmax(logits)) in text[:end]
            seen = np.unique(text[:end])
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
            assert text[end] == np.argmax(logits)
    assert repeated, "without a penalty a token would come again"


def test_a_repetition_penalty_counts_what_a_cache_has_seen_and_compiles_one_token_s_step(compiled_steps):
    expected = answers(models.generate(decoder(), tiny.TOKENS, lengths=tiny.LENGTHS, **PENALISED))[0]
    begun, rest = tiny.TOKENS[:1, :20], tiny.TOKENS[:1, 20:]
    cache, _ = models.prefill(decoder(), begun, block=8, reserve=48)
    seen, before = np.isin(np.arange(tiny.VOCABULARY), begun)[None], compiled_steps()
    tokens, _ = tiny.streamed(decoder(), rest, cache=cache, key=models.Draws(seen=seen), **PENALISED)
    assert tokens[0].tolist() == expected and compiled_steps() == before + 1
    with pytest.raises(ValueError, match="reads what the cache has seen; give key="):
        models.stream(decoder(), rest, cache=cache, **PENALISED)
    for wrong, said in ((seen[0], r"bool \(256,\)"), (seen * 1, r"int64 \(1, 256\)")):
        with pytest.raises(ValueError, match=rf"seen is {said}; expected bool \(1, 256\): for each prompt, which"):
            models.stream(decoder(), rest, cache=cache, key=models.Draws(seen=wrong), **PENALISED)


@pytest.mark.matrix
def test_gradients_through_an_evicting_prefill_are_those_of_the_masked_dense_model():
    tokens = tiny.TOKENS[0]

    @jax.jit
    def mean_nll(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), tokens[1:, None], axis=1).mean()

    def evicting(model):
        hidden = models.hidden_states(model, tokens[None], policy=STATE, **SETTINGS).hidden
        return mean_nll(logits_of(model, hidden)[0])

    seen = run(tokens, policy=STATE, **SETTINGS).seen
    assert seen[0, 0].sum(axis=1).max() == tiny.BUDGET + SETTINGS["block"]
    masked = jax.jit(jax.value_and_grad(lambda w: mean_nll(reference.masked_logits(w, tiny.CONFIG, tokens, seen))))
    expected_loss, expected = masked(tiny.weights())
    loss, gradient = jax.value_and_grad(evicting)(decoder())
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    gradients = split_weights(tiny.CONFIG, gradient.arrays())
    for path, expected_leaf in expected.items():
        found, expected_leaf = np.asarray(gradients[path]), np.asarray(expected_leaf)
        error = np.abs(found - expected_leaf).max() / np.abs(expected_leaf).max()
        assert np.isfinite(found).all() and error < 1e-4, f"{path}: {error:.1e}"


ASKED = np.array([5, 0, 2])
BY_LAYERS = {
    "turned keys, left windows": dict(policy="tova+positions(kind='compact')", config=tiny.SLIDING),
    "a predictor's": dict(policy="butler+caote", question=ASKED),
    "once, a question": dict(policy=tiny.WINDOW, when="prompt", evict_every=3, question=ASKED),
    "through the output, of all heads": dict(policy="laprox(window=4)", evict_every=0, question=ASKED),
}


@pytest.mark.parametrize("case", first(1, first(2, BY_LAYERS.values(), rest=nightly)), ids=BY_LAYERS)
def test_a_stream_by_layers_gives_the_references_tokens_and_keeps_what_it_keeps(case, run_by_layer):
    settings = SETTINGS | dict(question=np.zeros(3, int)) | case
    config, predictor, told = settings.pop("config", tiny.CONFIG), {}, {}
    if settings["policy"] == "butler+caote":
        butler = reference.butler(config)
        arrays = {name: np.asarray(array, np.float64) for name, array in nnx.to_pure_dict(nnx.state(butler)).items()}
        predictor, told = dict(networks=butler), dict(butler=(arrays, butler.config.rope_theta))
    steps, cache = tiny.streamed(
        decoder(config), tiny.TOKENS, lengths=tiny.LENGTHS, max_new_tokens=8, end=END, **settings, **predictor
    )
    for row, (length, question) in enumerate(zip(tiny.LENGTHS, settings.pop("question"), strict=True)):
        expected = run(
            tiny.TOKENS[row, :length], config, question=question, new_tokens=steps.shape[1], end=END, **settings, **told
        )
        assert [token for token in steps[row].tolist() if token >= 0] == expected.tokens
        tiny.assert_keeps(cache, row, expected)


def test_a_prompt_beyond_256_slots_is_read_to_its_end_by_layers(run_by_layer):
    """Blocks of a prompt read as many slots as may be filled, in steps of 256 or more."""
    tokens = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (1, 264))
    found = models.prefill(decoder(), tokens, block=88).logits
    np.testing.assert_allclose(found[0], run(tokens[0]).logits[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("fed", "slots", "filled"),
    [(1, 2000, 500), (500, 2000, 500), (501, 2000, 1000), (1501, 2000, None), (256, 300, 256), (257, 300, None)],
)
def test_blocks_read_quarters_of_the_slots_or_256(fed, slots, filled):
    assert steps.filled_slots(fed, slots) == filled


def test_where_layers_exchange_slots_an_eviction_begins_every_window_anew(run_by_layer):
    settings = dict(policy="snapkv(window=4)@pyramid", when="prompt", max_new_tokens=1, end=(), **SETTINGS)
    ((_, cache),) = models.stream(decoder(), tiny.DOCUMENT, **settings)
    parts = jax.tree.leaves(cache.state, is_leaf=lambda part: isinstance(part, Window))
    (queries,) = (part.queries.value for part in parts if isinstance(part, Window))
    assert (np.asarray(queries) == 0).all() and len(queries) == tiny.CONFIG.num_layers


def test_one_program_and_layers_one_by_one_make_the_same_caches(run_by_layer):
    def cache_of_a_stream():
        settings = dict(lengths=tiny.LENGTHS, policy=STATE, max_new_tokens=8, end=END, **SETTINGS)
        return next(models.stream(decoder(), tiny.TOKENS, **settings))[1]

    layers = cache_of_a_stream()
    run_by_layer(False)
    together = cache_of_a_stream()
    for name in ("layers", "position", "live", "num_live", "next_position"):
        both = (getattr(cache, name) for cache in (layers, together))
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *both)
    for name in ("positions", "layer_slots", "heads_shape", "nbytes"):
        assert getattr(layers, name) == getattr(together, name)


@pytest.mark.matrix
def test_inside_of_other_peoples_vmap_it_is_one_program(run_by_layer):
    settings = dict(policy=STATE, max_new_tokens=3, temperature=1.0, end=(), **SETTINGS)
    drawn = functools.partial(models.generate, decoder(), tiny.TOKENS[:1], **settings)
    keys = jax.random.split(jax.random.key(0), 2)
    alone = [drawn(key=key).tokens.tolist() for key in keys]
    assert jax.vmap(lambda key: drawn(key=key).tokens)(keys).tolist() == alone


@pytest.mark.matrix
def test_a_threshold_begins_a_new_window_whatever_the_budget():
    """A budget of all slots keeps no token below the threshold, so the prompt's window has had its say."""
    name = "snapkv(window=4)@threshold(least=0.05)"
    settings = dict(budget=100, when="prompt", evict_every=2, block=tiny.BLOCK)
    prompt = tiny.TOKENS[:1, :21]
    tokens, cache = tiny.streamed(decoder(), prompt, policy=name, max_new_tokens=8, end=(), **settings)
    expected = run(prompt[0], policy=name, new_tokens=8, **settings)
    assert tokens[0].tolist() == expected.tokens
    tiny.assert_keeps(cache, 0, expected)


@pytest.mark.parametrize("policy", first(1, ["h2o+caote", "kvzip(sinks=2)@uniform", "rkv(window=4)@adakv"]))
def test_what_one_program_has_made_is_made_again_by_layers(policy, run_by_layer):
    settings = dict(policy=policy, evict_every=4, **SETTINGS)
    prompt = TOKENS[:2, :20]
    run_by_layer(False)
    out = models.generate(decoder(), prompt, max_new_tokens=22, end=(), **settings)
    made = np.asarray(out.tokens)
    text, lengths = np.concatenate([prompt, made[:, :-1]], axis=1), np.array([41, 33])
    run_by_layer(True)
    cache, hidden = models.teacher_forced(decoder(), text, lengths=lengths, prompt=20, **settings)
    said = np.asarray(decoder().logits(hidden)).argmax(-1)
    np.testing.assert_array_equal(said[0], made[0])
    np.testing.assert_array_equal(said[1, : 33 - 20 + 1], made[1, : 33 - 20 + 1])
    np.testing.assert_array_equal(cache.next_position, lengths)
    assert held(cache, 0) == held(out.cache, 0)
