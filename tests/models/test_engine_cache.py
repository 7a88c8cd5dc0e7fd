"""A cache that is kept: questions asked of it are answered as if each had come with its whole document."""

import contextlib
import dataclasses
import functools
import warnings

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax._src.cache import dtypes_of
from kvjax._src.layer_caches import LayerCaches
from models.config import Rope
from models.parameters import split_weights
from models.prompts import kept_of
from tests.models import tiny
from tests.models.tiny import SETTINGS, STATE, answers, decoder, run
from tests.tiers import first, nightly

NEW, ASKED = 9, tiny.lengths_of(tiny.QUESTIONS)
POLICIES = (tiny.UNEVEN, "sage(heads='query')", "streaming+positions", "laprox(window=4)")


def assert_is_from_scratch(out, documents, **settings):
    """Each row's answer and tokens are those of the reference, which was given the whole text."""
    for row, (document, question) in enumerate(zip(documents, tiny.QUESTIONS, strict=True)):
        text = [*document, *question]
        expected = run(text, question=len(question), new_tokens=NEW, **settings)
        assert answers(out)[row] == expected.tokens, question
        tiny.assert_keeps(out.cache, row, expected)


three_times = jax.jit(lambda cache: kvjax.repeat(cache, 3))


@pytest.mark.filterwarnings("ignore:.*made to choose once")
@pytest.mark.parametrize("policy", first(1, first(3, POLICIES, rest=nightly)))
def test_questions_on_one_cache_are_runs_from_scratch(policy):
    settings = dict(policy=policy, **SETTINGS)
    kept = models.prefill(decoder(), tiny.DOCUMENT, **settings).cache
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    many = models.generate(decoder(), tiny.QUESTIONS, cache=three_times(kept), question=ASKED, **asked)
    assert_is_from_scratch(many, [tiny.DOCUMENT[0]] * 3, **settings)


def test_rows_of_a_cache_differ_in_what_they_have_seen():
    settings = dict(policy=STATE, **SETTINGS)
    documents = [row[:n] for row, n in zip(tiny.TOKENS, tiny.LENGTHS, strict=True)]
    kept = models.prefill(decoder(), documents, **settings).cache
    assert kept.next_position.tolist() == tiny.LENGTHS.tolist()
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    out = models.generate(decoder(), tiny.QUESTIONS, cache=kept, question=ASKED, **asked)
    assert_is_from_scratch(out, documents, **settings)


def test_a_cache_may_be_asked_again(run_by_layer):
    settings = dict(policy=tiny.WINDOW, **SETTINGS)
    kept = models.prefill(decoder(), tiny.DOCUMENT, **settings).cache
    before = tiny.bytes_of(kept)
    asked = dict(cache=kept, max_new_tokens=NEW, end=(), question=5, **settings)
    first_time, second = (models.generate(decoder(), tiny.QUESTIONS[:1], **asked) for _ in range(2))
    tokens, last = tiny.streamed(decoder(), tiny.QUESTIONS[:1], **asked)
    assert answers(first_time) == answers(second) == tokens.tolist()
    assert tiny.held(first_time.cache) == tiny.held(last)
    assert tiny.bytes_of(kept) == before
    expected = run([*tiny.DOCUMENT[0], *tiny.QUESTIONS[0]], question=5, new_tokens=NEW, **settings)
    assert answers(second)[0] == expected.tokens
    tiny.assert_keeps(second.cache, 0, expected)


def test_a_turn_begins_its_own_window_though_the_turn_before_filled_its_cache():
    """A cache may have no more slots than the budget, as one that was made smaller after the turn."""
    settings, document, turn = dict(policy=tiny.WINDOW, **SETTINGS), tiny.DOCUMENT[:, :15], tiny.QUESTIONS[0][:3]
    kept = kvjax.compact(models.prefill(decoder(), document, **settings).cache, tiny.BUDGET)
    tiny.assert_keeps(
        models.prefill(decoder(), [turn], cache=kept, **settings).cache,
        0,
        run([*document[0], *turn], turns=[15], **settings),
    )


@pytest.mark.parametrize(
    ("policy", "each_way"),
    first(1, [(STATE, "one program"), ("snapkv(window=4)@adakv", "layers")]),
    indirect=["each_way"],
)
def test_without_a_policy_nothing_more_leaves(policy, each_way):
    settings = dict(policy=policy, **SETTINGS)
    kept = models.prefill(decoder(), tiny.DOCUMENT, **settings).cache
    out = models.generate(decoder(), tiny.QUESTIONS[:1], cache=kept, max_new_tokens=NEW, end=(), block=8)
    expected = run([*tiny.DOCUMENT[0], *tiny.QUESTIONS[0]], question=5, new_tokens=NEW, evict_every=0, **settings)
    assert answers(out)[0] == expected.tokens
    tiny.assert_keeps(out.cache, 0, expected)


@pytest.mark.matrix
def test_a_smaller_budget_is_reached_though_no_context_comes():
    larger = models.prefill(decoder(), tiny.DOCUMENT, policy=STATE, budget=24, block=8).cache
    asked = dict(cache=larger, policy=STATE, question=5, max_new_tokens=3, end=(), **SETTINGS)
    _, cache = tiny.streamed(decoder(), tiny.QUESTIONS[:1], **asked)
    assert cache.num_live.max() == 16 + 5


def seen(policy, count, config=tiny.CONFIG):
    """A cache that has seen so many tokens and holds none: enough to ask what may come next."""
    following = np.array([count], np.int32)
    return tiny.empty(policy, config).map(lambda own: dataclasses.replace(own, next_position=following))


@pytest.mark.matrix
def test_questions_after_questions_stay_within_the_budget(run_by_layer):
    """No answer is as long as the window: the question's last block evicts."""
    settings = dict(policy=tiny.WINDOW, question=3, max_new_tokens=3, end=(), **SETTINGS)
    cache, most = models.prefill(decoder(), tiny.DOCUMENT, policy=tiny.WINDOW, **SETTINGS).cache, []
    for _ in range(5):
        cache = models.generate(decoder(), [[1, 2, 3]], cache=cache, **settings).cache
        most.append(int(cache.num_live.sum()) / cache.num_live.size)
    assert max(most) <= 16 + 3 + 3 - 1
    assert most[1:] == most[1:2] * 4


def test_what_a_run_knows_of_its_cache_is_that_of_each_row_and_of_a_layer_that_sees_all():
    config = tiny.config(num_layers=3, sliding_windows=(20, None, 30))
    empty = tiny.empty("kvzip@uniform", config, batch=2)
    rng = np.random.default_rng(0)
    position = np.where(rng.random(empty.position.shape) < 0.5, np.arange(empty.position.shape[-1]), -1)
    token = rng.integers(0, 64, position.shape)
    score, following = np.zeros(position[0].shape, np.float32), np.array([40, 30])
    states = [own.state._replace(token=token[number], score=score) for number, own in enumerate(empty.layers)]
    layers = zip(empty.layers, position, states, strict=True)
    cache = kvjax.LayerCaches(
        tuple(dataclasses.replace(own, position=at, state=new, next_position=following) for own, at, new in layers)
    )
    kept = kept_of(tiny.decoder(config), jax.tree.map(jax.numpy.asarray, cache), kvjax.kvzip() @ "uniform", 2)
    counts = (position >= 0).sum(-1)  # [L, B, K]
    assert kept.held.tolist() == [[*counts[:, row].ravel()] for row in range(2)]
    assert kept.start.tolist() == [40, 30] and kept.most == counts.max()
    for row in range(2):
        assert kept.pending[row].tolist() == token[1, row, 0][position[1, row, 0] >= 0].tolist()


def test_a_full_cache_that_is_compressed_shrinks():
    full = models.prefill(decoder(), tiny.DOCUMENT, block=8).cache
    small = models.prefill(decoder(), [[1]], cache=full, policy="tova", budget=8, block=8, when="prompt").cache
    assert [list(map(len, layer)) for layer in tiny.held(small)] == [[8, 8]] * 2
    assert small.num_slots <= 16 + 2


@pytest.mark.matrix
def test_progress_counts_what_is_new_in_rows_that_begin_anywhere():
    kept, seen = models.prefill(decoder(), [tiny.DOCUMENT[0].tolist(), [1, 2, 3]], block=8).cache, []
    steps = models.stream(
        decoder(),
        [[1], [2] * 30],
        cache=kept,
        block=8,
        max_new_tokens=1,
        end=(),
        on_block=lambda *at: seen.append(at[:2]),
    )
    assert len(list(steps)) == 1
    assert seen == [(6, 30), (14, 30), (22, 30), (30, 30)]


DYNAMIC = dataclasses.replace(tiny.CONFIG, rope=Rope(type="dynamic", factor=4.0, original_positions=64))
LONGROPE = Rope(type="longrope", original_positions=62, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
LONGROPE = dataclasses.replace(tiny.CONFIG, rope=LONGROPE)


@pytest.mark.parametrize(
    ("config", "before", "new", "sentence"),
    [
        (DYNAMIC, 60, 4, None),
        (DYNAMIC, 60, 5, r"now has 65 tokens, but this model's rotary frequencies depend on .* 64 tokens"),
        (LONGROPE, 60, 1, None),
        (LONGROPE, 63, 2, None),
        (LONGROPE, 60, 3, r"now has 63 tokens, but this model's rotary frequencies depend .* 62 tokens"),
        (LONGROPE, None, 61, r"has 61 tokens and up to 2 may follow, .* beyond 62 tokens: let at most 1"),
    ],
)
def test_a_text_does_not_cross_the_length_where_frequencies_change(config, before, new, sentence):
    cache = None if before is None else seen(STATE, before, config)
    settings = dict(cache=cache, policy=STATE, max_new_tokens=1 if before else 2, **SETTINGS)
    refused = contextlib.nullcontext() if sentence is None else pytest.raises(ValueError, match=sentence)
    with refused:
        models.stream(decoder(config), [[1] * new], **settings)


def test_a_cache_that_a_stream_has_used_up_is_refused():
    steps = models.stream(decoder(), tiny.DOCUMENT, policy=tiny.WINDOW, max_new_tokens=7, end=(), **SETTINGS)
    _, used = next(steps)
    next(steps)
    with pytest.raises(ValueError, match="a later step has deleted this cache"):
        models.generate(decoder(), [[1]], cache=used)


def test_sage_warns_where_more_comes_behind_its_choice():
    settings = dict(cache=seen("sage", 60), policy="sage", when="published", max_new_tokens=2, **SETTINGS)
    with pytest.warns(UserWarning, match="'sage' is made to choose once, but 3 more tokens follow its choice"):
        models.stream(decoder(), [[1, 2, 3]], **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.stream(decoder(), [[1, 2, 3]], question=3, **settings)


@pytest.mark.matrix
def test_a_ratio_is_of_all_that_was_seen():
    kept = models.prefill(decoder(), tiny.DOCUMENT, policy=STATE, budget=0.25, block=8).cache
    more = models.prefill(decoder(), tiny.DOCUMENT[:, :20], cache=kept, policy=STATE, budget=0.25, block=8).cache
    assert (kept.num_live.max(), more.num_live.max()) == (15, 20)


OF_EIGHT = dict(policy=STATE, **SETTINGS)
PROMPT = tiny.TOKENS[:2, :40]
MIXED = "int8/float32"


@functools.cache
def prefilled(dtype: str | tuple[str, str]):
    return models.prefill(decoder(), PROMPT, cache_dtype=dtype, **OF_EIGHT)


def test_keys_and_values_have_dtypes_of_their_own():
    cache = prefilled(("int8", "float32")).cache
    for own in cache.layers:
        assert (own.key.dtype, own.value.dtype) == ("int8", "float32") and own.value_scale is None
    sizes = dict(layers=2, kv_heads=2, head_dim=8, query_heads=4, batch=2, policy=STATE, **SETTINGS)
    assert cache.nbytes == kvjax.memory(**sizes, dtype=("int8", "float32")).total


@pytest.mark.matrix
def test_where_weights_are_traced_the_same_rows_are_kept_as_floats_and_a_derivative_passes():
    def first_logit(model):
        cache, logits = models.prefill(model, PROMPT, cache_dtype=MIXED, **OF_EIGHT)
        return logits.sum(), (cache, logits)

    (_, (cache, logits)), slope = jax.value_and_grad(first_logit, has_aux=True)(decoder())
    assert str(dtypes_of(cache.arrays)) == "float32" and cache.arrays.key_scale is cache.arrays.value_scale is None
    np.testing.assert_allclose(logits, prefilled(MIXED).logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(cache.position, prefilled(MIXED).cache.position)
    found = split_weights(slope.config, slope.arrays())
    of_key, of_value = (np.asarray(found[f"layers.{name}"]) for name in ("key", "value"))
    assert all(np.isfinite(x).all() and (x != 0).any() for x in (of_key, of_value))


def test_a_conversation_keeps_the_dtypes_of_its_cache():
    cache, turn = prefilled(MIXED).cache, PROMPT[:, :4]
    for again in (None, MIXED):
        more = models.prefill(decoder(), turn, cache=cache, cache_dtype=again, **OF_EIGHT).cache
        assert str(dtypes_of(more.arrays)) == MIXED and more.next_position.tolist() == [44, 44]
    why = f"the cache is of {MIXED}, but cache_dtype is 'int8': a cache keeps its dtype, so leave cache_dtype out"
    with pytest.raises(ValueError, match=why):
        models.prefill(decoder(), turn, cache=cache, cache_dtype="int8", **OF_EIGHT)
    with pytest.raises(ValueError, match=f"the weights are traced .* but a cache of {MIXED} passes no derivative on"):
        jax.grad(lambda model: models.prefill(model, turn, cache=cache, **OF_EIGHT).logits.sum())(decoder())


def test_layer_by_layer_the_caches_have_the_dtypes_of_one_program(run_by_layer):
    run_by_layer(False)
    one = prefilled(MIXED)
    run_by_layer(True)
    _, cache = next(models.stream(decoder(), PROMPT, cache_dtype=MIXED, max_new_tokens=4, end=(), **OF_EIGHT))
    assert isinstance(cache, LayerCaches)
    assert cache.nbytes == one.cache.nbytes and tiny.held(cache) == tiny.held(one.cache)
    for layer, of_one in zip(cache.layers, one.cache.layers, strict=True):
        assert layer.value_scale is None and layer.key_scale.shape == layer.position.shape
        assert str(dtypes_of(layer)) == MIXED
        np.testing.assert_allclose(layer.key_scale, of_one.key_scale, rtol=1e-4, atol=1e-7)
