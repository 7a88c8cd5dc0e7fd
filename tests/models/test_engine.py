"""Prefill, generate and stream against an independent reference, row by row, for every policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import Config
from models.config import Rope
from models.sampling import Sampling, sample
from tests.models import reference

VOCABULARY = 256
CONFIG = Config(VOCABULARY, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512)
LENGTHS = np.array([200, 163, 9])
# No token twice in a row of the batch: no two keys of the first layer have one length.
TOKENS = np.stack([np.random.default_rng(row).permutation(VOCABULARY)[:200] for row in range(3)])
BLOCK, BUDGET = 4, 14


@functools.cache
def weights(config=CONFIG):
    return reference.parameters(config)


@functools.cache
def decoder(config=CONFIG):
    return reference.decoder(config, weights(config))


def kept_tokens(cache):
    """Positions as the reference has them: bool [L, B, K, 256]; no position may stand in two slots."""
    layers = [cache.layer(number).position for number in range(cache.heads_shape[0])]
    kept = np.stack(layers)[..., None] == np.arange(256)
    assert kept.sum(axis=-2).max() == 1
    return kept.any(axis=-2)


def assert_keeps(cache, row, run):
    expected = np.pad(run.kept, ((0, 0), (0, 0), (0, 256 - run.kept.shape[-1])))
    wrong = np.argwhere(kept_tokens(cache)[:, row] != expected)
    assert wrong.size == 0, f"[layer, head, position] {wrong[:8].tolist()} differ; the closest call was {run.gap:.1e}"


# Each score, alone or in a chain, and each way to end one; tests/kvjax has every link, the campaign draws the pairs.
POLICIES = [
    "h2o",
    "tova",
    "snapkv(window=4,kernel=3)",
    "key_norm",
    "random(seed=5)",
    "h2o+caote",
    "h2o(accumulate=False)+caote",
    "tova(heads='group')+caote(norm='inf')",
    "snapkv(window=3,pooling='max')+caote",
    "streaming(sinks=3)+caote",
    "key_norm+normalise+caote",
    "h2o+caote(group='mean')",
    "h2o+caote(norm=1)",
    "tova(heads='group')+fast_caote(norm=1,group='mean')",
    "tova+pool(kernel=3)",
    "h2o+pool(pooling='max')+caote",
    "h2o+protect(recent=0.5)",
    "h2o+caote+protect(recent=0.5)",
    "snapkv(window=4,kernel=3)+fast_caote+protect(sinks=2,recent=0.25)",
]


@pytest.mark.parametrize("name", POLICIES)
def test_fifty_blocks_keep_the_references_tokens_and_give_its_logits(name):
    out = models.prefill(decoder(), TOKENS, LENGTHS, policy=name, budget=BUDGET, block=BLOCK, outputs="all")
    assert out.cache.next_position.tolist() == LENGTHS.tolist()
    for row, length in enumerate(LENGTHS):
        prompt = TOKENS[row, :length]
        run = reference.run(weights(), CONFIG, prompt, policy=reference.policy(name), budget=BUDGET, block=BLOCK)
        assert_keeps(out.cache, row, run)
        np.testing.assert_allclose(out.logits[row, :length], run.logits, atol=1e-4, rtol=0)


QWEN3 = Config(
    VOCABULARY, 24, 40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, architecture="qwen3",
    query_key_norm=True, attention_bias=True, tie_embeddings=True, max_positions=512, pad=255,
)  # fmt: skip
SLIDING = Config(
    VOCABULARY, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, architecture="mistral",
    sliding_windows=(9, None, 30), max_positions=512,
)  # fmt: skip
DYNAMIC = Config(
    VOCABULARY, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512,
    rope=Rope(type="dynamic", factor=2.0, original_positions=64),
)  # fmt: skip
END = tuple(range(0, VOCABULARY, 9))  # so many that the rows stop at different steps
DECODING = {
    "h2o+caote": dict(policy="h2o+caote", budget=14),
    "h2o every 5 steps": dict(policy="h2o", budget=14, evict_every=5),
    "tova of a group never": dict(policy="tova(heads='group')", budget=12, evict_every=0),
    "snapkv once, then by its window": dict(policy="snapkv(window=3,pooling='max')", budget=14, when="prompt"),
    "h2o+caote once, a ratio, every 3 steps": dict(policy="h2o+caote", budget=0.1, when="prompt", evict_every=3),
    "snapkv, at every step": dict(policy="snapkv(window=4)", budget=14, evict_every=1),
    "tova of the layer, a ratio": dict(policy="tova", budget=0.08),
    "random+fast_caote, one by one": dict(policy="random(seed=5)+fast_caote", budget=16, block=1),
    "protected, blocks of 7": dict(policy="h2o+caote+protect(recent=0.5)", budget=14, block=7),
    "snapkv+caote, Qwen3": dict(policy="snapkv(window=4,kernel=3)+caote", budget=14, config=QWEN3),
    "h2o+caote, sliding windows": dict(policy="h2o+caote", budget=14, config=SLIDING),
    "streaming, dynamic rope, once, never": dict(
        policy="streaming(sinks=3)", budget=24, config=DYNAMIC, when="prompt", evict_every=0
    ),
}


def settings_of(case):
    case = dict(case)
    return case.pop("config", CONFIG), {"block": BLOCK, "max_new_tokens": 16, "end": END, **case}


def answers(out):
    return [tokens[:length].tolist() for tokens, length in zip(out.tokens, out.lengths, strict=True)]


@pytest.mark.parametrize("case", DECODING.values(), ids=DECODING)
def test_decoding_gives_the_references_tokens_and_keeps_what_it_keeps(case):
    config, settings = settings_of(case)
    out = models.generate(decoder(config), TOKENS, lengths=LENGTHS, **settings)
    steps = settings.pop("max_new_tokens")
    settings["policy"] = reference.policy(settings["policy"])
    for row, length in enumerate(LENGTHS):
        run = reference.run(weights(config), config, TOKENS[row, :length], new_tokens=steps, **settings)
        assert answers(out)[row] == run.tokens
        assert_keeps(out.cache, row, run)
        assert out.cache.next_position[row] == length + len(run.tokens) - 1
        assert (out.tokens[row, len(run.tokens) :] == (config.pad or 0)).all()
    assert len(set(out.lengths.tolist())) > 1, "the rows should stop at different steps; change END"


@pytest.mark.parametrize("name", ["h2o every 5 steps", "tova of a group never"])
def test_a_streamed_row_alone_gives_its_tokens_and_cache_in_a_batch(name):
    config, settings = settings_of(DECODING[name])
    batch = models.generate(decoder(config), TOKENS, lengths=LENGTHS, **settings)
    kept = kept_tokens(batch.cache)
    for row, length in enumerate(LENGTHS):
        steps = list(models.stream(decoder(config), TOKENS[row : row + 1, :length], **settings))
        assert [int(token[0]) for token, _ in steps] == answers(batch)[row]
        np.testing.assert_array_equal(kept_tokens(steps[-1][1])[:, 0], kept[:, row])


def test_what_stands_behind_a_row_and_in_other_rows_does_not_matter():
    settings = dict(policy="h2o+caote", budget=BUDGET, block=BLOCK, max_new_tokens=16, end=END)
    one = models.generate(decoder(), TOKENS, lengths=LENGTHS, **settings)
    other_tokens = np.where(np.arange(200) < LENGTHS[:, None], TOKENS, 17)
    other_tokens[0] = other_tokens[0, ::-1]
    other_tokens[2] = 5
    two = models.generate(decoder(), other_tokens, lengths=np.array([40, 163, 200]), **settings)
    assert answers(one)[1] == answers(two)[1]
    np.testing.assert_array_equal(*(kept_tokens(out.cache)[:, 1] for out in (one, two)))


@pytest.mark.parametrize(
    "settings",
    [
        dict(policy="snapkv(window=4)", budget=0.5, when="prompt", evict_every=3),
        dict(policy="full", temperature=0.8, top_k=9, top_p=0.9, key=jax.random.key(7)),
    ],
    ids=["once", "full and sampled"],
)
def test_a_streamed_batch_gives_the_tokens_of_generate(settings):
    settings = dict(lengths=LENGTHS, block=BLOCK, max_new_tokens=12, end=END, **settings)
    whole = models.generate(decoder(), TOKENS, **settings)
    steps = np.stack([token for token, _ in models.stream(decoder(), TOKENS, **settings)], axis=1)
    assert steps.shape[1] == whole.lengths.max()
    for row, length in enumerate(whole.lengths):
        assert steps[row, :length].tolist() == whole.tokens[row, :length].tolist()
        assert (steps[row, length:] == -1).all()


# --- nothing evicted: the dense model ---------------------------------------------------------------------------------

DENSE_LENGTHS = np.array([130, 61])


@functools.cache
def dense_logits(config):
    return np.asarray(decoder(config)(jnp.asarray(TOKENS[:2, :130])))


@pytest.mark.parametrize(("block", "policy"), [(1, "h2o+caote"), (32, "h2o+caote"), (7, "full")])
def test_a_budget_that_holds_the_prompt_gives_the_dense_logits(block, policy):
    settings = dict(block=block, policy=policy, budget=None if policy == "full" else 130, outputs="all")
    out = models.prefill(decoder(), TOKENS[:2, :130], DENSE_LENGTHS, **settings)
    for row, length in enumerate(DENSE_LENGTHS):
        np.testing.assert_allclose(out.logits[row, :length], dense_logits(CONFIG)[row, :length], atol=1e-4, rtol=0)
    assert (out.cache.num_live == DENSE_LENGTHS[:, None]).all()


@pytest.mark.parametrize("config", [SLIDING, DYNAMIC, QWEN3], ids=["sliding windows", "dynamic rope", "Qwen3"])
def test_other_architectures_give_the_dense_logits_too(config):
    out = models.prefill(decoder(config), TOKENS[:2, :130], DENSE_LENGTHS, block=32, outputs="all")
    np.testing.assert_allclose(out.logits[0], dense_logits(config)[0], atol=1e-4, rtol=0)
    for row, length in enumerate(DENSE_LENGTHS):  # a row alone: dynamic rope depends on its own length
        run = reference.run(weights(config), config, TOKENS[row, :length])
        np.testing.assert_allclose(out.logits[row, :length], run.logits, atol=1e-4, rtol=0)


def test_the_reference_gives_the_dense_logits():
    run = reference.run(weights(), CONFIG, TOKENS[0, :130])
    np.testing.assert_allclose(dense_logits(CONFIG)[0], run.logits, atol=1e-4, rtol=0)
    masked = reference.masked_logits(weights(), CONFIG, TOKENS[0, :130], run.seen)
    np.testing.assert_allclose(masked, run.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [dict(), dict(policy="snapkv(window=8)+caote", budget=100)], ids=["full", "fits"])
def test_generate_gives_the_tokens_of_a_dense_greedy_loop(settings):
    prompt = TOKENS[0, :70].tolist()
    out = models.generate(decoder(), np.array([prompt]), block=16, max_new_tokens=20, end=(), **settings)
    dense = jax.jit(lambda model, tokens: model(tokens))
    tokens = list(prompt)
    for _ in range(20):
        padded = np.zeros((1, 90), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(dense(decoder(), padded)[0, len(tokens) - 1].argmax()))
    assert out.tokens[0].tolist() == tokens[70:]


# --- shapes of what comes back ---------------------------------------------------------------------------------------


def test_the_last_logits_are_the_last_of_all():
    settings = dict(policy="h2o+caote", budget=BUDGET, block=BLOCK)
    last = models.prefill(decoder(), TOKENS, LENGTHS, **settings)
    every = models.prefill(decoder(), TOKENS, LENGTHS, outputs="all", **settings)
    assert last.logits.shape == (3, VOCABULARY) and last.logits.dtype == jnp.float32
    np.testing.assert_allclose(last.logits, every.logits[np.arange(3), LENGTHS - 1], atol=1e-5, rtol=0)


def test_a_full_cache_can_leave_room_for_later_tokens():
    cache, _ = models.prefill(decoder(), TOKENS, LENGTHS, block=64, reserve=5)
    assert 205 <= cache.num_slots <= 205 * 9 / 8, "few sizes, so that there are few programs"
    assert (cache.num_live == LENGTHS[:, None]).all()


def test_after_one_eviction_at_the_prompts_end_only_the_budget_is_allocated():
    config, settings = settings_of(DECODING["snapkv once, then by its window"])
    out = models.generate(decoder(config), TOKENS, lengths=LENGTHS, **settings)
    assert out.cache.num_slots == 14 + 3


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.bad_input  # annotations name Python's numbers
@pytest.mark.parametrize("make", [np.int64, np.int8, jnp.int32])
def test_counts_of_numpys_and_jaxs_give_what_pythons_give(make):
    def run(n):
        counts = dict(budget=n(16), block=n(8), max_new_tokens=n(4), evict_every=n(2), page_size=n(4), top_k=n(3))
        given = dict(policy="h2o@layer", question=n(3), end=(n(7),), temperature=1.0, key=jax.random.key(0))
        return models.generate(decoder(), TOKENS[:1, :60], **counts, **given)

    np.testing.assert_array_equal(run(make).tokens, run(int).tokens)


@pytest.mark.bad_input
def test_counts_of_a_selection_may_be_numpys():
    def run(budget, sinks):
        return models.generate(
            decoder(), TOKENS[:1, :40], select="oracle", budget=budget, sinks=sinks, max_new_tokens=3
        ).tokens

    np.testing.assert_array_equal(run(jnp.float32(0.5), np.int64(2)), run(0.5, 2))


def test_where_all_keys_have_one_norm_the_newest_stay_whatever_the_blocks():
    config = dataclasses.replace(CONFIG, architecture="qwen3", query_key_norm=True)
    model = reference.decoder(config, weights(config))
    model.layers.key_norm[...] = jnp.ones_like(model.layers.key_norm[...])
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, (1, 70))
    for block in (3, 32, 70):
        position = models.prefill(model, prompt, policy="key_norm", budget=20, block=block).cache.position
        newest = np.broadcast_to(np.arange(50, 70), (*position.shape[:-1], 20))
        np.testing.assert_array_equal(np.sort(position, axis=-1)[..., -20:], newest)
        assert int((position >= 0).sum(-1).max()) == 20


@pytest.mark.parametrize("sampling", [(0.0, 3, 0.5), (1.5, 1, None), (1.5, None, 1e-6), (1e-4, None, None)])
def test_one_candidate_leaves_the_most_likely_token(sampling):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(50, 30)), jnp.float32)
    drawn = sample(logits, jax.random.key(0), Sampling(*sampling))
    np.testing.assert_array_equal(drawn, logits.argmax(axis=-1))


def test_the_same_key_draws_the_same_tokens_and_another_key_others():
    settings = dict(block=64, max_new_tokens=12, end=(), temperature=1.0)
    one, same, other = (
        models.generate(decoder(), TOKENS[:1], key=jax.random.key(seed), **settings).tokens for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


@pytest.mark.parametrize("sampling", [(1.0, None, None), (0.7, 4, None), (1.3, None, 0.6), (1.0, 3, 0.8)])
def test_draws_follow_the_filtered_softmax(sampling):
    temperature, top_k, top_p = sampling
    logits = np.array([2.0, 0.3, 1.1, -0.5, 1.6, 0.9])
    probability = reference.softmax(logits / temperature)
    ranking = np.argsort(-probability)
    if top_k is not None:
        probability[ranking[top_k:]] = 0
        probability /= probability.sum()
    if top_p is not None:  # the fewest tokens that hold the share
        needed = 1 + int(np.searchsorted(np.cumsum(probability[ranking]), top_p))
        probability[ranking[needed:]] = 0
        probability /= probability.sum()
    draws = 20_000
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    drawn = sample(many, jax.random.key(0), Sampling(*sampling))
    counts = np.bincount(drawn, minlength=len(logits))
    assert (counts[probability == 0] == 0).all()
    np.testing.assert_allclose(counts / draws, probability, atol=0.015)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["block", "prompt"])
def test_gradients_through_an_evicting_prefill_are_those_of_the_masked_dense_model(when):
    tokens, settings = TOKENS[0, :60], dict(budget=12, block=BLOCK, when=when)
    name = "snapkv(window=4,kernel=3)+caote" if when == "prompt" else "h2o+caote"

    def mean_nll(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), jnp.asarray(tokens)[1:, None], axis=1).mean()

    def evicting(model):
        return mean_nll(models.prefill(model, tokens[None], policy=name, outputs="all", **settings).logits[0])

    run = reference.run(weights(), CONFIG, tokens, policy=reference.policy(name), **settings)
    assert when == "prompt" or run.seen[0, 0].sum(axis=1).max() == 12 + BLOCK
    masked = jax.jit(jax.value_and_grad(lambda w: mean_nll(reference.masked_logits(w, CONFIG, tokens, run.seen))))
    expected_loss, expected = masked(weights())
    loss, gradient = jax.value_and_grad(evicting)(decoder())
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    for path, expected_leaf in expected.items():
        leaf = gradient
        for part in path.split("."):
            leaf = getattr(leaf, part)
        error = np.abs(leaf[...] - expected_leaf).max() / np.abs(expected_leaf).max()
        assert np.isfinite(leaf[...]).all() and error < 1e-4, f"{path}: {error:.1e}"
