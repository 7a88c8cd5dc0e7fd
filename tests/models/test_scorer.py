"""A scorer's policy, zap: each token is scored once, by its hidden state, in the prompt and in decode."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from models import engine
from models.butler import attention_in_chunks
from models.by_layer import LayerSteps
from models.scorer import parameter_shapes
from tests.models import reference
from tests.models.tiny import CONFIG, decoder, positions
from tests.tiers import first

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])


@functools.cache
def scorer(hidden=4):
    config, random = models.ScorerConfig(32, num_layers=2, num_kv_heads=2, hidden=hidden), np.random.default_rng(2)
    shapes = parameter_shapes(config)
    drawn = {name: (0.3 * random.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
    return models.Scorer(config, jax.device_put(drawn))


@functools.cache
def whole():
    """The predicted scores of all tokens of the longer row [L, K, T], from one dense pass."""
    T = TOKENS.shape[1]
    position = np.arange(T)[None]

    def attend(x, layer, window, query, key, value):
        out = attention_in_chunks(query, key.swapaxes(1, 2), value.swapaxes(1, 2), position, window)
        return out, x, scorer()(layer, x)

    nothing = np.zeros((1, T, 32), np.float32)

    @jax.jit
    def scores(model):
        tokens, lengths = jnp.asarray(TOKENS[:1]), jnp.array([T])
        return model.run(tokens, position, lengths, attend, nothing, before_attention=lambda _, layer, x: x)[2]

    return np.exp(np.asarray(scores(decoder()))[:, 0]).swapaxes(1, 2)


def held(cache, row=0):
    """The positions that each head holds, and their scores: dictionaries by layer and head."""
    position = np.stack(positions(cache))[:, row]
    state = np.asarray(jax.tree.leaves(cache.state)[0])[:, row]
    return {
        (layer, head): dict(zip(at[at >= 0].tolist(), own[at >= 0].tolist(), strict=True))
        for layer in range(2)
        for head, (at, own) in enumerate(zip(position[layer], state[layer], strict=True))
    }


@pytest.mark.parametrize("hidden", first(1, [4, 0]))
def test_the_network_is_its_definition(hidden):
    x = np.random.default_rng(3).normal(size=(1, 3, 32)).astype(np.float32)
    own = scorer(hidden)
    y = x.astype(np.float64)
    w = {name: np.asarray(getattr(own, name)[...], np.float64)[1] for name in parameter_shapes(own.config)}
    if hidden:
        y = y @ w["input"] + w["input_bias"]
        y = 0.5 * y * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    y = y @ w["output"] + w["output_bias"]
    np.testing.assert_allclose(jax.jit(lambda x: own(1, x))(x), y, rtol=1e-5, atol=1e-6)


def test_a_full_budget_keeps_each_tokens_own_score():
    cache, _ = models.prefill(decoder(), TOKENS, LENGTHS, policy="zap", budget=64, block=16, scorer=scorer())
    for (layer, head), scores in held(cache).items():
        assert sorted(scores) == list(range(40))
        found = [scores[place] for place in range(40)]
        np.testing.assert_allclose(found, whole()[layer, head], rtol=2**-12)
    assert sorted(held(cache, 1)[0, 0]) == list(range(23))  # the shorter row's padding came first


@pytest.mark.parametrize("block", first(0, [8, 16]))
def test_layer_0_keeps_the_best_of_all_tokens_in_any_blocks(block):
    # Layer 0's hidden states do not depend on what was evicted, so its choice is that of all scores at once.
    cache, _ = models.prefill(decoder(), TOKENS, LENGTHS, policy="zap", budget=10, block=block, scorer=scorer())
    for head in range(2):
        assert sorted(held(cache)[0, head]) == sorted(np.argsort(-whole()[0, head])[:10].tolist())


@pytest.mark.parametrize("policy", first(0, ["zap+protect(recent=2)", "zap+caote@model"]))
def test_the_budget_holds_in_decode_and_all_ways_agree(policy):
    settings = dict(policy=policy, budget=10, block=8, scorer=scorer(), max_new_tokens=6, end=())
    out = models.generate(decoder(), TOKENS, lengths=LENGTHS, **settings)
    assert out.cache.num_live.sum() == 2 * 2 * 2 * 10 and out.cache.next_position.tolist() == [45, 28]
    if "recent" in policy:
        assert {44, 43} <= set(held(out.cache)[1, 1])
    given = engine.check_prompt(decoder(), TOKENS, LENGTHS, None)
    run, prompt = engine.prepare(decoder(), given, engine.Options(policy, 10, 8, "block", 1), None, None, scorer())
    state, _ = engine._fed(LayerSteps(run), prompt, None)
    alone = models.prefill(decoder(), TOKENS, LENGTHS, policy=policy, budget=10, block=8, scorer=scorer()).cache
    if policy.endswith("model"):
        assert state.cache.num_live.tolist() == alone.num_live.tolist()
    else:
        np.testing.assert_array_equal(np.sort(state.cache.position), np.sort(alone.position))


@pytest.mark.matrix
def test_a_cache_is_continued_with_its_scores():
    settings = dict(policy="zap", budget=12, block=8, scorer=scorer())
    first, _ = models.prefill(decoder(), TOKENS[:1, :24], **settings)
    cache, _ = models.prefill(decoder(), TOKENS[:1, 24:], cache=first, **settings)
    assert sorted(held(cache)[0, 0]) == sorted(np.argsort(-whole()[0, 0])[:12].tolist())


@pytest.mark.matrix
def test_policies_side_by_side_get_the_scorer_that_they_read():
    each = models.prefill_each(decoder(), TOKENS, policies=["zap", "h2o"], budget=10, block=16, scorer=scorer())
    assert [cache.num_live.max() for cache, _ in each] == [10, 10]


def test_a_scorer_is_read_as_it_was_written(tmp_path):
    models.save_scorer(tmp_path, scorer(), decoder(), "a small one")
    again = models.load_scorer(tmp_path, decoder())
    for name in ("input", "input_bias", "output", "output_bias"):
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(scorer(), name)[...])
    other = reference.decoder(CONFIG, reference.parameters(CONFIG, seed=5))
    with pytest.raises(ValueError, match="holds a scorer of another model, a small one, with this one's shape"):
        models.load_scorer(tmp_path, other)
    (tmp_path / "scorer.json").write_text("{}")
    with pytest.raises(ValueError, match="describes no scorer"):
        models.load_scorer(tmp_path, decoder())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (dict(policy="zap"), r"the policy 'zap' needs a scorer: pass scorer=models.load_scorer"),
        (dict(policy="h2o", scorer="own"), "a scorer was given, but no policy scores by it"),
        (dict(policy="zap", scorer="other"), r"the scorer is of another model, with E, L, K = \(32, 3, 2\)"),
    ],
)
def test_a_scorer_belongs_to_its_policy_and_model(given, sentence):
    other = models.Scorer(models.ScorerConfig(32, num_layers=3, num_kv_heads=2), rngs=nnx.Rngs(0))
    given = given | {"scorer": {"own": scorer(), "other": other, None: None}[given.get("scorer")]}
    with pytest.raises(ValueError, match=sentence):
        models.prefill(decoder(), TOKENS, budget=10, **given)


def test_zap_says_what_it_lacks():
    rows = np.ones((1, 2, 1, 2), np.float32)

    def attend(context):
        cache = kvjax.KVCache.init(batch=1, kv_heads=1, slots=4, head_dim=2, state=kvjax.zap().init(1, 1, 1, 4, 2))
        return kvjax.attend(cache, rows, rows, rows, policy="zap", budget=2, context=context)

    wrong = kvjax.Context(predicted=kvjax.Prediction(score=np.ones((1, 2, 3), np.float32)))
    for context, said in (
        (kvjax.Context(), "nothing was predicted for the block"),
        (wrong, r"predicted scores \(1, 2, 3\) do not fit: expected \(1, 2, 1\)"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(lambda: attend(context))  # noqa: B023
