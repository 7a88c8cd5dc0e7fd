"""Turn by turn in one cache: as if the conversation had come at once; and what cannot go on is refused."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from models.config import Rope
from models.layer_caches import LayerCaches
from tests.models.tiny import (
    CONFIG,
    DOCUMENT,
    LENGTHS,
    QUESTIONS,
    SETTINGS,
    STATE,
    TOKENS,
    UNEVEN,
    WINDOW,
    answers,
    assert_keeps,
    bytes_of,
    decoder,
    empty,
    held,
    lengths_of,
    on_mesh,
    run,
    streamed,
    tiered,
)
from tests.tiers import first


@pytest.fixture(scope="module")
def kept():
    """The document's cache under the policy with state."""
    return models.prefill(decoder(), DOCUMENT, policy=STATE, **SETTINGS).cache


# A way or two for each layout: test_engine_paths compares the ways under each kind of policy.
@pytest.mark.parametrize(
    ("policy", "each_way"), first(1, [(WINDOW, "layers"), (UNEVEN, "one program")]), indirect=["each_way"]
)
def test_what_a_stream_yields_is_gone_on_from(policy, each_way):
    """Turn by turn, the last token of an answer first: as if each turn had been generated."""
    settings = dict(policy=policy, max_new_tokens=6, end=(), **SETTINGS)
    turns, caches = [DOCUMENT[0, :30].tolist(), *QUESTIONS], {"stream": None, "generate": None}
    last = []
    for turn in turns:
        tokens, caches["stream"] = streamed(decoder(), [last + turn], cache=caches["stream"], **settings)
        generated = models.generate(decoder(), [last + turn], cache=caches["generate"], **settings)
        caches["generate"] = generated.cache
        assert tokens.tolist() == generated.tokens.tolist()
        assert held(caches["stream"]) == held(caches["generate"])
        last = [int(tokens[0, -1])]
    if each_way == "layers" and "@" not in policy:
        assert isinstance(caches["stream"], LayerCaches)
        whole = models.stacked(caches["stream"])
        assert bytes_of(whole) == bytes_of(models.stacked(caches["stream"])), "what was given stays"
        evict = jax.jit(lambda cache: kvjax.evict(cache, -cache.position.astype(jnp.float32), budget=4).num_live)
        assert np.asarray(evict(whole)).max() == 4


def test_a_conversation_in_one_size_compiles_once(compiled_steps):
    settings = dict(policy=WINDOW, max_new_tokens=7, end=(), **SETTINGS)
    cache, sizes, programs = None, [], []
    for turn in range(5):
        _, cache = streamed(decoder(), [QUESTIONS[turn % 3]], cache=cache, **settings)
        sizes.append(cache.nbytes)
        programs.append(compiled_steps())
    assert len(set(sizes)) == 1
    assert programs[1:] == programs[1:2] * 4


@pytest.mark.matrix
def test_a_smaller_budget_is_reached_though_no_context_comes():
    larger = models.prefill(decoder(), DOCUMENT, policy=STATE, budget=24, block=8).cache
    asked = dict(cache=larger, policy=STATE, question=5, max_new_tokens=3, end=(), **SETTINGS)
    _, cache = streamed(decoder(), QUESTIONS[:1], **asked)
    assert cache.num_live.max() == 16 + 5


@pytest.mark.parametrize(
    ("policy", "new", "each_way"),
    first(1, [(WINDOW, 3, "layers"), ("snapkv(window=8)", 6, "one program"), ("h2o@layer", 1, "layers")]),
    indirect=["each_way"],
)
def test_questions_after_questions_stay_within_the_budget(policy, new, each_way):
    """No answer is as long as the window, or has a step at all: the question's last block evicts."""
    settings = dict(policy=policy, question=3, max_new_tokens=new, end=(), **SETTINGS)
    cache, held = models.prefill(decoder(), DOCUMENT, policy=policy, **SETTINGS).cache, []
    for _ in range(5):
        cache = models.generate(decoder(), [[1, 2, 3]], cache=cache, **settings).cache
        held.append(int(cache.num_live.sum()) / cache.num_live.size)
    assert max(held) <= 16 + 3 + new - 1
    assert held[1:] == held[1:2] * 4


@pytest.mark.parametrize(
    ("when", "each_way"),
    tiered(1, 1, [("prompt", "layers"), ("block", "one program"), ("block", "layers"), ("prompt", "one program")]),
    indirect=["each_way"],
)
def test_a_full_cache_that_is_compressed_shrinks(when, each_way):
    full = models.prefill(decoder(), DOCUMENT, block=8).cache
    small = models.prefill(decoder(), [[1]], cache=full, policy="tova", budget=8, block=8, when=when).cache
    assert small.num_live.tolist() == [[[8, 8]]] * 2
    assert small.num_slots <= 16 + 2


@pytest.mark.matrix
def test_progress_counts_what_is_new_in_rows_that_begin_anywhere():
    kept, seen = models.prefill(decoder(), [DOCUMENT[0].tolist(), [1, 2, 3]], block=8).cache, []
    steps = models.stream(
        decoder(), [[1], [2] * 30], cache=kept, block=8, max_new_tokens=1, end=(), on_block=lambda *at: seen.append(at)
    )
    assert len(list(steps)) == 1
    assert seen == [(6, 30), (14, 30), (22, 30), (30, 30)]


@pytest.mark.matrix
def test_a_base_that_follows_the_length_is_refused():
    config = dataclasses.replace(CONFIG, rope=Rope(type="dynamic", factor=4.0, original_positions=64))
    kept = models.prefill(decoder(config), DOCUMENT).cache
    assert models.prefill(decoder(config), [[1, 2, 3]], cache=kept).cache.next_position.tolist() == [63]
    with pytest.raises(
        ValueError,
        match=r"now has 65 tokens, but this model's rotary frequencies depend on the text's length .* 64 tokens",
    ):
        models.prefill(decoder(config), [[1] * 5], cache=kept)


@pytest.mark.matrix
def test_a_text_that_crosses_the_length_where_frequencies_change_is_refused():
    rope = Rope(type="longrope", original_positions=62, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    model = decoder(dataclasses.replace(CONFIG, rope=rope))
    short, long = (models.prefill(model, [[3] * length], reserve=1).cache for length in (60, 63))
    assert models.prefill(model, [[1, 2]], cache=short).cache.next_position.tolist() == [62]
    assert models.prefill(model, [[1, 2]], cache=long).cache.next_position.tolist() == [65]
    with pytest.raises(ValueError, match=r"now has 63 tokens, but this model's rotary frequencies depend .* 62 tokens"):
        models.prefill(model, [[1] * 3], cache=short)
    with pytest.raises(ValueError, match=r"has 60 tokens and up to 3 may follow, .* beyond 62 tokens: let at most 2"):
        models.generate(model, [[3] * 60], max_new_tokens=3)


@pytest.mark.parametrize("each_way", first(1, ["one program", "layers"]), indirect=True)
def test_a_cache_that_a_stream_has_used_up_is_refused(each_way):
    steps = models.stream(decoder(), DOCUMENT, policy=WINDOW, max_new_tokens=7, end=(), **SETTINGS)
    _, used = next(steps)
    next(steps)
    with pytest.raises(ValueError, match="a later step has deleted this cache"):
        models.generate(decoder(), [[1]], cache=used)


@pytest.mark.matrix
def test_sage_warns_where_more_comes_behind_its_choice():
    settings = dict(policy="sage", when="published", **SETTINGS)
    kept = models.prefill(decoder(), DOCUMENT, **settings).cache
    with pytest.warns(UserWarning, match="'sage' is made to choose once, but 3 more tokens follow its choice"):
        models.prefill(decoder(), [[1, 2, 3]], cache=kept, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.stream(decoder(), [[1, 2, 3]], cache=kept, question=3, max_new_tokens=2, **settings)


def test_rows_of_several_kinds_of_integers_keep_their_tokens():
    rows = [np.array([1, 2, 3], np.uint8), np.array([300, 2], np.int64)]
    with pytest.raises(ValueError, match="token 300 is outside the vocabulary of 256"):
        models.prefill(decoder(), rows)
    with pytest.raises(ValueError, match=r"tokens are float64 \(2, 3\)"):
        models.prefill(decoder(), [[1, 2, 3], [1.7, 2]])


@pytest.mark.matrix
def test_a_ratio_is_of_all_that_was_seen():
    kept = models.prefill(decoder(), DOCUMENT, policy=STATE, budget=0.25, block=8).cache
    more = models.prefill(decoder(), DOCUMENT[:, :20], cache=kept, policy=STATE, budget=0.25, block=8).cache
    assert (kept.num_live.max(), more.num_live.max()) == (15, 20)


@pytest.mark.matrix
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_a_mesh_goes_on_as_one_device():
    settings, results = dict(policy=STATE, **SETTINGS), []
    for model in (decoder(), on_mesh()):
        kept = kvjax.repeat(models.prefill(model, DOCUMENT.repeat(2, axis=0), **settings).cache, 2)
        asked = [*QUESTIONS, QUESTIONS[0]]
        out = models.generate(
            model, asked, cache=kept, question=lengths_of(asked), max_new_tokens=9, end=(), **settings
        )
        results.append((answers(out), held(out.cache)))
    assert results[0] == results[1]
    assert out.cache.key.sharding.spec == jax.sharding.PartitionSpec(None, "data", "tensor")


def test_prompts_of_any_lengths_are_a_list():
    rows = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]
    listed = models.prefill(decoder(), rows, question=[3, 0, 2], policy=STATE, **SETTINGS)
    for row, question in enumerate((3, 0, 2)):
        expected = run(rows[row], question=question, policy=STATE, **SETTINGS)
        np.testing.assert_allclose(np.asarray(listed.logits)[row], expected.logits[-1], atol=1e-4)
        assert_keeps(listed.cache, row, expected)


REFUSED = {
    "another number of rows": (dict(tokens=QUESTIONS), r"1 rows, but 3 prompts .* kvjax.repeat\(cache, 3\)"),
    "another policy": (dict(policy="tova", budget=16), "the cache's policy state is not that of 'tova': give the"),
    "an allocation": (dict(policy="h2o@layer", budget=16), "the cache is plain, but 'h2o@layer' divides"),
    "query heads": (dict(policy="sage(heads='query')", budget=16), "holds 2 heads per layer, but .* is for 4"),
    "a selection": (dict(select="oracle", budget=4), "a selection remembers tokens outside the cache"),
    "no cache": (dict(cache="kept"), "the cache is a str; give what models.prefill"),
    "all that prefill gave": (
        dict(cache=lambda: models.Prefilled(empty(None), None)), "the cache is a Prefilled; give its .cache",
    ),
    "too much for a full cache": (dict(max_new_tokens=500), "take 521 positions, but the model has 512"),
    "another model's": (
        dict(cache=lambda: empty(None, layers=3)),
        "of another model: it has 3 layers and 2 heads of dimension 8",
    ),
    "pages": (
        dict(cache=lambda: empty("h2o@layer"), policy="h2o", budget=16),
        "the cache is paged, but 'h2o' divides the slots in an even way",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_on_is_refused_in_a_sentence(kept, given, sentence):
    given = {"tokens": QUESTIONS[:1], "cache": kept, **given}
    given["cache"] = given["cache"]() if callable(given["cache"]) else given["cache"]
    with pytest.raises(ValueError, match=sentence):
        models.generate(decoder(), given.pop("tokens"), **given)
