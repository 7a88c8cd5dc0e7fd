"""Prefill, generate and stream against an independent reference, row by row; tests/campaign draws the pairs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models import reference
from tests.models.tiny import (
    BLOCK,
    BUDGET,
    CONFIG,
    LENGTHS,
    LONG,
    LONG_LENGTHS,
    SETTINGS,
    STATE,
    TOKENS,
    VOCABULARY,
    WINDOW,
    answers,
    assert_keeps,
    decoder,
    kept_tokens,
    run,
    streamed,
    tiered,
    weights,
)
from tests.tiers import first

# Chains that the campaign's table does not have in this form; tests/kvjax has every link.
POLICIES = [
    "h2o+caote",
    "snapkv(window=3,pooling='max')+caote",
    "h2o(accumulate=False)+caote",
    "key_norm+normalise+caote",
    "h2o+caote(group='mean')",
    "tova(heads='group')+fast_caote(norm=1,group='mean')",
    "h2o+pool(pooling='max')+caote",
    "snapkv(window=4,kernel=3)+fast_caote+protect(sinks=2,recent=0.25)",
]


@pytest.mark.parametrize("name", first(1, POLICIES))
def test_fifty_blocks_keep_the_references_tokens_and_give_its_logits(name):
    settings = dict(policy=name, budget=14, block=4)
    out = models.prefill(decoder(), LONG, LONG_LENGTHS, outputs="all", **settings)
    assert out.cache.next_position.tolist() == LONG_LENGTHS.tolist()
    for row, length in enumerate(LONG_LENGTHS):
        expected = run(LONG[row, :length], **settings)
        assert_keeps(out.cache, row, expected)
        np.testing.assert_allclose(np.asarray(out.logits)[row, :length], expected.logits, atol=1e-4, rtol=0)


END = tuple(range(0, VOCABULARY, 9))  # so many that the rows stop at different steps
DECODING = {
    "h2o+caote": dict(policy=STATE),
    "snapkv once, then by its window": dict(policy="snapkv(window=3,pooling='max')", when="prompt"),
    "h2o every 5 steps": dict(policy="h2o", evict_every=5),
    "tova of a group never": dict(policy="tova(heads='group')", budget=12, evict_every=0),
    "random+fast_caote, one by one": dict(policy="random(seed=5)+fast_caote", block=1),
    "protected, blocks of 7": dict(policy="h2o+caote+protect(recent=0.5)", budget=14, block=7),
}


def settings_of(case):
    return {**SETTINGS, "max_new_tokens": 16, "end": END, **case}


@pytest.mark.parametrize("case", first(2, DECODING.values()), ids=DECODING)
def test_decoding_gives_the_references_tokens_and_keeps_what_it_keeps(case):
    settings = settings_of(case)
    out = models.generate(decoder(), TOKENS, lengths=LENGTHS, **settings)
    steps = settings.pop("max_new_tokens")
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], new_tokens=steps, **settings)
        assert answers(out)[row] == expected.tokens
        assert_keeps(out.cache, row, expected)
        assert out.cache.next_position[row] == length + len(expected.tokens) - 1
        assert (np.asarray(out.tokens)[row, len(expected.tokens) :] == 0).all()
    assert len(set(out.lengths.tolist())) > 1, "the rows should stop at different steps; change END"
    if settings["policy"].startswith("snapkv") and settings.get("when") == "prompt":
        assert out.cache.num_slots == BUDGET + 3, "only the budget is allocated"


@pytest.mark.parametrize("name", first(1, ["h2o+caote", "tova of a group never"]))
def test_a_streamed_row_alone_gives_the_references_tokens(name):
    settings = settings_of(DECODING[name])
    steps = settings.pop("max_new_tokens")
    for row, length in enumerate(LENGTHS):
        tokens, cache = streamed(decoder(), TOKENS[row : row + 1, :length], max_new_tokens=steps, **settings)
        expected = run(TOKENS[row, :length], new_tokens=steps, **settings)
        assert tokens[0].tolist() == expected.tokens
        assert_keeps(cache, 0, expected)


def test_what_stands_behind_a_row_and_in_other_rows_does_not_matter():
    settings = dict(policy=STATE, max_new_tokens=16, end=END, **SETTINGS)
    one = models.generate(decoder(), TOKENS, lengths=LENGTHS, **settings)
    other_tokens = np.where(np.arange(60) < LENGTHS[:, None], TOKENS, 17)
    other_tokens[0] = other_tokens[0, ::-1]
    other_tokens[2] = 5
    two = models.generate(decoder(), other_tokens, lengths=np.array([40, 37, 60]), **settings)
    assert answers(one)[1] == answers(two)[1]
    np.testing.assert_array_equal(*(kept_tokens(out.cache)[:, 1] for out in (one, two)))


SAMPLED = dict(policy="full", temperature=0.8, top_k=9, top_p=0.9, block=BLOCK)


@pytest.mark.parametrize("settings", first(1, [
    SAMPLED | dict(key=jax.random.key(7)),
    dict(policy="snapkv(window=4)", budget=0.5, when="prompt", evict_every=3, block=BLOCK),
]), ids=["full and sampled", "once"])  # fmt: skip
def test_a_streamed_batch_gives_the_tokens_of_generate(settings):
    settings = dict(lengths=LENGTHS, max_new_tokens=12, end=END, **settings)
    whole = models.generate(decoder(), TOKENS, **settings)
    steps, _ = streamed(decoder(), TOKENS, **settings)
    assert steps.shape[1] == whole.lengths.max()
    for row, length in enumerate(whole.lengths):
        assert steps[row, :length].tolist() == answers(whole)[row]
        assert (steps[row, length:] == -1).all()


def test_the_same_key_draws_the_same_tokens_and_another_key_others():
    settings = SAMPLED | dict(lengths=LENGTHS, max_new_tokens=12, end=END)
    one, same, other = (
        models.generate(decoder(), TOKENS, key=jax.random.key(seed), **settings).tokens.tolist() for seed in (7, 7, 2)
    )
    assert one == same != other


# --- nothing evicted: the dense model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "policy"), tiered(1, 1, [(BLOCK, "full"), (1, STATE), (32, STATE), (7, "full")])
)  # fmt: skip
def test_a_budget_that_holds_the_prompt_gives_the_dense_logits(block, policy):
    settings = dict(block=block, policy=policy, budget=None if policy == "full" else 60, outputs="all")
    out = models.prefill(decoder(), TOKENS, LENGTHS, reserve=5, **settings)
    for row, length in enumerate(LENGTHS):
        dense = run(TOKENS[row, :length])
        np.testing.assert_allclose(np.asarray(out.logits)[row, :length], dense.logits, atol=1e-4, rtol=0)
    assert (out.cache.num_live == LENGTHS[:, None]).all()
    if policy == "full":
        assert 65 <= out.cache.num_slots <= 65 * 9 / 8, "room for later tokens; few sizes, so that programs are few"


def test_the_reference_gives_the_dense_logits():
    dense = run(LONG[0, :130])
    logits = jax.jit(lambda model, tokens: model(tokens))(decoder(), LONG[:1, :130])
    np.testing.assert_allclose(logits[0], dense.logits, atol=1e-4, rtol=0)
    masked = jax.jit(lambda weights: reference.masked_logits(weights, CONFIG, LONG[0, :130], dense.seen))(weights())
    np.testing.assert_allclose(masked, dense.logits, atol=1e-4, rtol=0)


# --- what comes back, and how one may ask ----------------------------------------------------------------------------


def test_the_last_logits_are_the_last_of_all():
    last = models.prefill(decoder(), TOKENS, LENGTHS, policy=STATE, **SETTINGS)
    assert last.logits.shape == (3, VOCABULARY) and last.logits.dtype == jnp.float32
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], policy=STATE, **SETTINGS).logits[-1]
        np.testing.assert_allclose(np.asarray(last.logits)[row], expected, atol=1e-4, rtol=0)


@pytest.mark.bad_input  # annotations name Python's numbers
@pytest.mark.parametrize(
    ("make", "policy"), tiered(0, 1, [(np.int64, "h2o@layer"), (np.int8, "h2o@layer"), (jnp.int32, "h2o@layer")])
)
def test_counts_of_numpys_and_jaxs_give_what_pythons_give(make, policy):
    def given(n):
        counts = dict(budget=n(16), block=n(8), max_new_tokens=n(4), evict_every=n(2), page_size=n(4), top_k=n(3))
        more = dict(policy=policy, question=n(3), end=(n(7),), temperature=1.0, key=jax.random.key(0))
        return models.generate(decoder(), TOKENS[:1], **counts, **more)

    np.testing.assert_array_equal(given(make).tokens, given(int).tokens)


@pytest.mark.matrix
@pytest.mark.bad_input
def test_counts_of_a_selection_may_be_numpys():
    def given(budget, sinks):
        settings = dict(select="oracle", budget=budget, sinks=sinks, max_new_tokens=3)
        return models.generate(decoder(), TOKENS[:1, :40], **settings).tokens

    np.testing.assert_array_equal(given(jnp.float32(0.5), np.int64(2)), given(0.5, 2))


@pytest.mark.parametrize("block", tiered(0, 1, [32, 3, 70]))
def test_where_all_keys_have_one_norm_the_newest_stay_whatever_the_blocks(block):
    config = dataclasses.replace(CONFIG, architecture="qwen3", query_key_norm=True)
    plain = weights(config)
    model = reference.decoder(config, plain | {"layers.key_norm": np.ones_like(plain["layers.key_norm"])})
    cache, _ = models.prefill(model, LONG[:1, :70], policy="key_norm", budget=20, block=block)
    position = np.sort(np.asarray(cache.position), axis=-1)
    np.testing.assert_array_equal(position[..., -20:], np.broadcast_to(np.arange(50, 70), (*position.shape[:-1], 20)))
    assert (position >= 0).sum(-1).max() == 20


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when", "name"), first(1, [("block", STATE), ("prompt", WINDOW)]))
def test_gradients_through_an_evicting_prefill_are_those_of_the_masked_dense_model(when, name):
    tokens = TOKENS[0]

    def mean_nll(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), jnp.asarray(tokens)[1:, None], axis=1).mean()

    def evicting(model):
        out = models.prefill(model, tokens[None], policy=name, outputs="all", when=when, **SETTINGS)
        return mean_nll(out.logits[0])

    seen = run(tokens, policy=name, when=when, **SETTINGS).seen
    assert when == "prompt" or seen[0, 0].sum(axis=1).max() == BUDGET + BLOCK
    masked = jax.jit(jax.value_and_grad(lambda w: mean_nll(reference.masked_logits(w, CONFIG, tokens, seen))))
    expected_loss, expected = masked(weights())
    loss, gradient = jax.value_and_grad(evicting)(decoder())
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    for path, expected_leaf in expected.items():
        leaf = gradient
        for part in path.split("."):
            leaf = getattr(leaf, part)
        found, expected_leaf = np.asarray(leaf[...]), np.asarray(expected_leaf)
        error = np.abs(found - expected_leaf).max() / np.abs(expected_leaf).max()
        assert np.isfinite(found).all() and error < 1e-4, f"{path}: {error:.1e}"


@pytest.mark.parametrize("function", ["generate", "stream"])
def test_each_step_draws_anew(function):
    """So hot that all tokens are alike, twelve draws are twelve different ones or nearly so."""
    settings = SETTINGS | dict(policy=STATE, max_new_tokens=12, end=(), temperature=1e6, key=jax.random.key(0))
    if function == "generate":
        tokens = models.generate(decoder(), TOKENS, lengths=LENGTHS, **settings).tokens
    else:
        tokens, _ = streamed(decoder(), TOKENS, lengths=LENGTHS, **settings)
    assert all(len(set(row)) > 8 for row in np.asarray(tokens).tolist())
