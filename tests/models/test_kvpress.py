"""Our policies keep what kvpress keeps of a prompt (files: make_kvpress.py), or differ for a reason given here."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from models.commands import calibrate
from models.rotary import rope_frequencies
from tests.models import tiny
from tests.models.make_kvpress import FOLDER, KEPT, T
from tests.models.make_kvpress_decoding import EVERY, PROMPT
from tests.models.make_kvpress_decoding import FILE as DECODED
from tests.models.make_lukv import FILE as LUKV
from tests.models.tiny import kept_tokens
from tests.tiers import first

BIG = np.finfo(np.float32).max


# kvpress divides the attention that a token received by the number of queries that saw it. H2O and its authors' code
# sum, as our h2o does.
@functools.cache
def fixture():
    with np.load(FOLDER / "kept.npz") as arrays:
        return dict(arrays)


def calibrated(name):
    """The file of an array of the model that kvpress computed."""
    path = Path(tempfile.mkdtemp()) / f"{name}.npy"
    np.save(path, fixture()[name])
    return str(path)


PER_QUERY = kvjax.Policy(
    "per_query",
    kvjax.no_state,
    lambda scores, state, o: (scores / (o.next_position[:, None, None] - o.position)[:, :, None], state),
    nonnegative=True,
)
ANY_BUDGET = {
    "observed": kvjax.chain(kvjax.h2o(), PER_QUERY, kvjax.protect(recent=0)),
    "tova": "tova+protect(recent=1)",  # TOVA itself can drop the last token, kvpress never does
    "snapkv": "snapkv(window=16,kernel=5)",
    "knorm": "key_norm",
    "keydiff": "keydiff",
    "streaming": "streaming",
    "q_filters": f"q_filters(file={calibrated('q_filters')!r})",
    "curdkv": "curdkv",
    "curdkv_mean": "curdkv(leverage='mean')",
    "curdkv_key": "curdkv(leverage='key',local_window=None)",
    "lagkv": "lagkv(lag=12)",
    "lagkv_cross": "lagkv(lag=12,cross_scoring=True)",
    "chunkkv": "snapkv(window=16,kernel=5)+chunks(size=8,heads='layer')",
    "finch": "finch(window=8)",
    "expected": "expected_attention",
    "expected_mean": "expected_attention(covariance=False,value_norm=False)",
    "adakv": "snapkv(window=16,kernel=5)@adakv(cap=None)",
    "adakv_a0.8": "snapkv(window=16,kernel=5)@adakv(safeguard=0.8,cap=None)",
    "criticalkv": "snapkv(window=16,kernel=5)+critical",
}
# kvpress' pyramid runs down to budget / beta, window included, or is flat where that is less than the window. Ours is
# PyramidKV's own: the window comes on top, and what runs down to a beta-th is the rest of the budget. The betas here
# are those that end at kvpress' last layer: (budget - window) / (last - window), and 1 where it is flat.
PYRAMIDS = {
    ("pyramidkv", 40): "snapkv(window=16,kernel=5)@pyramid(beta=1)",  # 40 40 40
    ("pyramidkv", 64): "snapkv(window=16,kernel=5)@pyramid(beta=6)",  # 104 64 24
    ("pyramidkv_w8_b4", 40): "snapkv(window=8,kernel=5)@pyramid(beta=16)",  # 70 40 10
    ("pyramidkv_w8_b4", 64): "snapkv(window=8,kernel=5)@pyramid(beta=7)",  # 112 64 16
}
# What streams in kvpress, and the number of tokens that the others keep (all), sums up to 64 per head.
STREAMED = {
    ("duo", 64): f"key_norm@duo(file={calibrated('head_scores')!r},sinks=4,recent=4,cap=None)",
    ("simlayer", 64): "key_norm@simlayer(threshold=0.19,sinks=4,recent=32,cap=None)",
}
# simlayer measures what one block alone does not show.
CASES = {(press, budget): policy for press, policy in ANY_BUDGET.items() for budget in KEPT} | PYRAMIDS | STREAMED
CURDKV, LAGKV = ("curdkv", "curdkv_mean", "curdkv_key"), ("lagkv", "lagkv_cross")
ATTENDED = ("observed", "tova", "snapkv", "finch", "expected", "expected_mean", "criticalkv")
SCORED = (*ATTENDED, "knorm", "keydiff", "q_filters", *CURDKV, *LAGKV)
BY_DEFAULT = ("snapkv", "expected", "curdkv", "lagkv", "criticalkv", "adakv_a0.8")  # a score of each kind
NOTHING_FORCED = ("observed", "knorm", "keydiff", "q_filters")
ROUNDED = ("knorm", "criticalkv", *CURDKV)


@functools.cache
def model():
    return models.load(FOLDER)[0]


@functools.cache
def observed(policy):
    """The scores [L, rows, K, T] of the prompt as one block, and the full cache; a row for each budget."""
    config, rows, budgets = model().config, len(KEPT), jnp.array(KEPT)
    L, K, D = config.num_layers, config.num_kv_heads, config.head_dim
    projection = models.output_projection(model(), policy)
    position = jnp.broadcast_to(jnp.arange(T), (rows, T))

    @jax.jit
    def run(model, tokens):
        frequency, _ = rope_frequencies(config.rope, D)

        def attend(cache, layer, sliding_window, query, key, value):
            of_layer = None if projection is None else projection[layer]
            out, cache, seen = kvjax.observe(
                cache, query, key, value, position, policy=policy, budget=budgets,
                context=kvjax.Context(layer=layer, frequency=frequency, projection=of_layer),
            )  # fmt: skip
            return out, cache, seen.scores

        state = policy.state(rows, K, config.num_heads // K, T, D)
        layer = kvjax.KVCache.init(batch=rows, kv_heads=K, slots=T, head_dim=D, state=state)
        cache = kvjax.LayerCaches((layer,) * L)
        _, cache, scores = model.run(tokens, position, jnp.full(rows, T), attend, cache)
        return scores, cache

    scores, cache = run(model(), jnp.broadcast_to(fixture()["tokens"], (rows, T)))
    np.testing.assert_array_equal(cache.position, np.broadcast_to(np.arange(T), (L, rows, K, T)))  # slot is position
    return scores, cache


@functools.partial(jax.jit, static_argnames="allocation")
def evicted(cache, scores, allocation):
    return kvjax.evict(cache, scores, jnp.array(KEPT), allocation=allocation).live


def scores_of(policy, budget):
    return np.asarray(observed(made(policy))[0])[:, KEPT.index(budget)]


def kept_by(policy, budget):
    """Which positions stay, bool [L, K, T]."""
    allocation = made(policy).allocation
    scorer = policy if allocation.even else policy.split("@")[0]  # policies of one score share its run
    scores, cache = observed(made(scorer))
    return np.asarray(evicted(cache, scores, allocation))[:, KEPT.index(budget)]


def by_tier(cases):
    """Cases with the mark of their tier."""
    return [pytest.param(*case, marks=() if case[0] in BY_DEFAULT else pytest.mark.matrix) for case in cases]


def made(policy):
    return kvjax.parse(policy) if isinstance(policy, str) else policy


# What the scores below decide alone is not compared again.
@pytest.mark.parametrize(("press", "budget"), by_tier(case for case in CASES if case[0] not in (*SCORED, "simlayer")))
def test_one_block_keeps_what_kvpress_keeps(press, budget):
    kept = kept_by(CASES[press, budget], budget)
    np.testing.assert_array_equal(kept, fixture()[f"{press}/{budget}/kept"])


# simlayer measures in a run; beyond it and one press more, the table of tests/campaign has the blocks.
@pytest.mark.matrix
@pytest.mark.parametrize(("press", "budget"), [("simlayer", 64), ("chunkkv", 40)])
def test_prefill_in_two_blocks_keeps_what_kvpress_keeps(press, budget):
    tokens = fixture()["tokens"][None]
    cache, _ = models.prefill(model(), tokens, policy=CASES[press, budget], budget=budget, block=64, when="prompt")
    kept = kept_tokens(cache, T)[:, 0]
    np.testing.assert_array_equal(kept, fixture()[f"{press}/{budget}/kept"])


@pytest.mark.parametrize(("press", "budget"), by_tier((press, budget) for press in SCORED for budget in KEPT))
def test_scores_are_those_of_kvpress(press, budget):
    # What stays in any case has the layer's highest score plus one there and +inf here; what is safe has BIG in both.
    scores = np.minimum(scores_of(CASES[press, budget], budget), BIG)
    expected = fixture().get(f"{press}/scores", fixture().get(f"{press}/{budget}/scores"))
    if press in LAGKV:  # of what stays in any case, more than ours protects: it has 1 there
        scores = np.minimum(scores, 1)
    elif press not in NOTHING_FORCED:
        expected = np.where(expected == expected.max(axis=(1, 2), keepdims=True), BIG, expected)
    absolute = 3e-6 if press in ("keydiff", "q_filters") else 0  # cosines and products near 0
    relative = 2**-12 if press in ROUNDED else 2e-5  # ours are rounded
    np.testing.assert_allclose(scores, expected, rtol=relative, atol=absolute)


def merged():
    """Layer 1's values [K, 40, D], in the order of positions, after SnapKV has evicted and the others were merged."""
    scores, cache = observed(made(CASES["snapkv", 40]))
    entered = np.full(len(KEPT), 40, np.int32)
    evidence = kvjax.Evidence(scores, entered, merging=kvjax.merge().merging)
    after, row = jax.jit(kvjax.evict)(cache, evidence, np.array(KEPT)), KEPT.index(40)
    live, value = (np.asarray(part)[row] for part in (after.layers[1].live, after.layers[1].value))
    return np.stack([value[k, live[k]] for k in range(len(live))])  # slot is position


def test_filters_scores_of_heads_and_merged_values_are_those_of_kvpress():
    tokens = fixture()["tokens"]
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(models.q_filters(model(), tokens[None, 1:]), fixture()["q_filters"])
    close(models.head_scores(model(), tokens.reshape(2, -1), length=50), fixture()["head_scores"])
    close(merged(), fixture()["merged"])


def budgeted(kept):
    """Return which positions stay by LU-KV's curve, bool [L, K, T], here and in kvpress."""
    with np.load(LUKV) as arrays:
        curve, expected = arrays["curve"], np.unpackbits(arrays[str(kept)], axis=-1, count=T)
    path = Path(tempfile.mkdtemp()) / "curve.npy"
    np.save(path, curve)
    return kept_by(f"snapkv(window=16,kernel=5)@lukv(file={str(path)!r},cap=None)", kept), expected.astype(bool)


@pytest.mark.parametrize("kept", first(1, KEPT))
def test_a_curve_divides_the_budget_as_in_kvpress(kept):
    np.testing.assert_array_equal(*budgeted(kept))


# Of DecodingPress over these, every 8 steps; see make_kvpress_decoding.py for why not over others.
DECODING = {"KnormPress": "knorm", "KeyDiffPress": "keydiff", "TOVAPress": "tova", "QFilterPress": "q_filters"}


def decoded(press):
    """Return which positions stay behind the last step, bool [L, K, T], here and in kvpress."""
    with np.load(DECODED) as found:
        tokens, kept = found["tokens"][None], np.unpackbits(found[press], axis=-1).astype(bool)
    moments = dict(budget=KEPT[0], when="prompt", evict_every=EVERY, block=PROMPT)
    cache, _ = models.teacher_forced(model(), tokens, prompt=PROMPT, policy=ANY_BUDGET[DECODING[press]], **moments)
    return kept_tokens(cache, T)[:, 0], kept


@pytest.mark.parametrize("press", first(2, DECODING))
def test_steps_keep_what_kvpress_keeps_in_decode(press):
    np.testing.assert_array_equal(*decoded(press))


@functools.cache
def shared(block):
    """Layer 1's values [K, 40, D], in the order of positions, after TOVA has evicted and CaM shared the others."""
    tokens, policy = fixture()["tokens"][None], "tova+protect(recent=1)+cam"
    cache, _ = models.prefill(model(), tokens, policy=policy, budget=KEPT[0], block=block, when="prompt")
    value, position = (np.asarray(part)[0] for part in (cache.layers[1].value, cache.layers[1].position))
    return np.stack([v[np.argsort(p)[-KEPT[0] :]] for v, p in zip(value, position, strict=True)])  # free slots are -1


@pytest.mark.matrix
def test_values_are_shared_as_in_kvpress_where_its_draws_are_their_mean():
    np.testing.assert_allclose(shared(T), fixture()["shared"], atol=1e-5 * abs(fixture()["shared"]).max())


def test_norms_of_projected_values_are_those_of_kvpress():
    _, cache = observed(made(CASES["criticalkv", 40]))
    norms = np.stack([own.state.others[1][1] for own in cache.layers])  # beside the window
    np.testing.assert_allclose(norms[:, 0], fixture()["output_norms"], rtol=2**-12)


@pytest.mark.bad_input
@pytest.mark.parametrize("tokens", [[1, 2, 3], [[0.5, 1.0]], np.zeros((1, 0), int)], ids=str)
def test_texts_of_another_shape_are_refused(tokens):
    model = tiny.decoder()
    with pytest.raises(ValueError, match=r"tokens are \w+ of shape .*; expected integers \[B, T\]"):
        models.q_filters(model, tokens)


def test_equal_queries_lie_at_their_centre_wherever_they_stand():
    model = tiny.decoder()
    one, many = (models.query_centres(model, np.full((1, length), 7))[0] for length in (1, 9))
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one[..., 8:], np.hypot(one[..., :4], one[..., 4:8]), rtol=1e-5)


def test_the_command_writes_what_the_functions_return(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "The river was calm, and a small boat lay at the shore. " * 30
    (tmp_path / "book.txt").write_text(text)
    arguments = (
        "retriever --text book.txt --q-filters filters.npy --centres centres.npy --heads heads.npy --rows 2 --length 64"
    )
    assert calibrate.main([*arguments.split(), "--compilation-cache", "off"]) == 0
    assert "filters.npy: (6, " in capsys.readouterr().out
    model, tokenizer = models.load("retriever")
    tokens = np.asarray(tokenizer.encode(text))[:128].reshape(2, 64)
    np.testing.assert_array_equal(np.load("filters.npy"), models.q_filters(model, tokens))
    np.testing.assert_array_equal(np.load("centres.npy"), models.query_centres(model, tokens))
    np.testing.assert_array_equal(np.load("heads.npy"), models.head_scores(model, tokens))
