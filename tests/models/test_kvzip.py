"""KVzip: scores and kept tokens are kvpress's (files: make_kvzip.py), in any blocks, batch, layout and second turn."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import Text, answer_copies, moments, repeats_of, schedule
from models import driver, engine, prompts, published, repeating
from models.planning import plan_run
from tests.models.commands.test_chat import spaced
from tests.models.make_kvpress import FOLDER
from tests.models.make_kvzip import CHUNK, GRADIENT, KEPT, PLUS, REAL, TINY
from tests.models.tiny import SLIDING, assert_keeps, decoder, positions, run
from tests.tiers import first, nightly

# KVzip compares the scores of layers as they are, and a head may hold any number of tokens.
COMPETE = {"model": "kvzip", "layer": "kvzip@layer(cap=None)"}
SCORE = {TINY: "kvzip", PLUS: "kvzip(normalise=True)", GRADIENT: "kvgrad"}


@functools.cache
def fixture(file=TINY):
    with np.load(file) as arrays:
        return dict(arrays)


@functools.cache
def kvpress_model():
    return models.load(FOLDER)[0]


def asking(name, file=TINY):
    """The policy with the fixture's chunks and words."""
    words = (tuple(fixture(file)[part].tolist()) for part in ("first", "following", "suffix"))
    name = re.sub(r"^(kvzip|kvgrad)(?:\((.*?)\))?", rf"\1(chunk={CHUNK[file]},\2)", name)
    return repeating.asking(kvjax.parse(name), kvjax.RepeatPrompt(*words))


def in_order(cache, array, T, nothing):
    """An array of the slots [L, B, K, S] as [L, B, K, T], by position."""
    position = alike(positions(cache), -1)
    out = np.full((*position.shape[:-1], T + 1), nothing, array.dtype)
    np.put_along_axis(out, position, array, axis=-1)  # a free slot's -1 is the last, which is cut off
    return out[..., :T]


def slots_of(cache, part):
    """A part of each layer, [L, B, K, S]."""
    return alike([np.asarray(part(cache.layer(layer))) for layer in range(cache.heads_shape[0])], 0)


def alike(layers, nothing):
    """Arrays [B, K, S] of layers, stacked; a layer may have fewer slots than the others."""
    most = max(own.shape[-1] for own in layers)
    padding = ([(0, 0), (0, 0), (0, most - own.shape[-1])] for own in layers)
    return np.stack([np.pad(*both, constant_values=nothing) for both in zip(layers, padding, strict=True)])


def kept(cache, T):
    return in_order(cache, np.ones_like(alike(positions(cache), -1), bool), T, False)


@pytest.mark.parametrize(("file", "block"), first(1, [(TINY, 16), (PLUS, 16), (TINY, 128), (PLUS, 128)]))
def test_scores_are_those_of_kvpress(file, block):
    tokens, policy = fixture(file)["tokens"][None], asking(f"{SCORE[file]}@uniform", file)
    cache, _ = models.prefill(kvpress_model(), tokens, policy=policy, budget=1.0, block=block, when="prompt")
    scores = in_order(cache, slots_of(cache, lambda own: own.state.score), tokens.shape[1], np.nan)[:, 0]
    np.testing.assert_allclose(scores, fixture(file)["scores"], rtol=2e-5, atol=1e-7)


def kept_sets(scope, budget, file=TINY, model=None, block=48):
    """Those of ours and of kvpress, [L, K, T]."""
    golden, name = fixture(file), COMPETE[scope].replace("kvzip", SCORE[file])
    settings = dict(policy=asking(name, file), budget=budget, block=block, when="prompt")
    cache, _ = models.prefill(model or kvpress_model(), golden["tokens"][None], **settings)
    bits = np.unpackbits(golden[f"{scope}/{budget}"], axis=-1, count=len(golden["tokens"]))
    return kept(cache, len(golden["tokens"]))[:, 0], bits.astype(bool)


# What a layer's heads keep by KVzip follows from the scores that are compared above.
SETS = [("model", TINY), ("model", PLUS), ("model", GRADIENT), ("layer", GRADIENT)]


@pytest.mark.matrix
@pytest.mark.parametrize(("scope", "file"), SETS, ids=lambda given: getattr(given, "stem", given))
def test_kept_tokens_are_those_of_kvpress(scope, file):
    for budget in KEPT[file]:
        np.testing.assert_array_equal(*kept_sets(scope, budget, file))


TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
LENGTHS = np.array([40, 23])
WORDS = kvjax.RepeatPrompt((1, 2), (3,), (4,), overlap=2)
ASKING, OF_A_LOSS = (
    repeating.asking(kvjax.parse(f"{name}(chunk=16)+caote@model"), WORDS) for name in ("kvzip", "kvgrad")
)
NEVER = np.iinfo(np.int32).max  # nothing is taken back


@pytest.mark.matrix
@pytest.mark.parametrize("policy", [ASKING, OF_A_LOSS], ids=["kvzip", "kvgrad"])
def test_one_program_and_single_layers_agree(policy, run_by_layer):
    given = engine.check_prompt(decoder(), TOKENS, LENGTHS, 3)
    run, sizes, prompt = engine.prepare(decoder(), given, models.Options(policy, 10, 8, "prompt"))
    state, _ = driver.feed_prompt(driver.Steps.of(run, sizes), prompt, None)
    run_by_layer(False)
    settings = dict(policy=policy, budget=10, block=8, question=3, when="prompt")
    expected, _ = models.prefill(decoder(), TOKENS, lengths=LENGTHS, **settings)
    np.testing.assert_array_equal(kept(state.cache, 40), kept(expected, 40))
    assert state.cache.next_position.tolist() == LENGTHS.tolist()


@pytest.mark.matrix
def test_a_second_turn_repeats_its_own_tokens():
    settings = dict(policy="kvzip(chunk=16)@model", budget=30, block=8, when="prompt")
    first, _ = models.prefill(decoder(), TOKENS[:, :24], **settings)
    before = in_order(first, slots_of(first, lambda own: own.state.score), 40, 0)
    cache, _ = models.prefill(decoder(), TOKENS[:, 24:], cache=first, **settings)
    after = in_order(cache, slots_of(cache, lambda own: own.state.score), 40, 0)
    held = kept(cache, 40)
    assert cache.next_position.tolist() == [40, 40] and (held.sum((0, 2, 3)) == 2 * 2 * 30).all()
    np.testing.assert_array_equal(after[..., :24], np.where(held, before, 0)[..., :24])
    assert (after[held] > 0).all() and held[..., 24:].any()


BY_BLOCK = """
kvzip(chunk=4)@uniform kvzip kvgrad(measure='change')@uniform kvzip(chunk=4,normalise=True)@uniform
kvzip(visible='cache')+caote(per='query')@layer kvgrad(chunk=4)@uniform kvgrad
kvgrad(visible='cache',measure='change',loss='tokens')+caote@layer
""".split()


@pytest.mark.parametrize(
    ("policy", "each_way"),
    first(
        2,
        first(
            5,
            [(BY_BLOCK[0], "layers"), (BY_BLOCK[0], "one program"), *((name, "layers") for name in BY_BLOCK[1:])],
            rest=nightly,
        ),
    ),
    indirect=["each_way"],
)
def test_blocks_are_repeated_as_they_come_in(policy, each_way):
    settings = dict(policy=policy, budget=14, block=8, evict_every=3)
    made = models.generate(decoder(), TOKENS, lengths=LENGTHS, question=3, max_new_tokens=8, end=(), **settings)
    for row, length in enumerate(LENGTHS):
        expected = run(TOKENS[row, :length], question=3, new_tokens=8, **settings)
        assert made.tokens[row].tolist() == expected.tokens
        assert_keeps(made.cache, row, expected)


@pytest.mark.matrix
def test_a_prompt_of_one_block_is_scored_as_published():
    caches = [models.prefill(decoder(), TOKENS[:, :8], policy=BY_BLOCK[0], budget=6, block=8, when=when).cache
              for when in ("block", "prompt")]  # fmt: skip
    scores = [in_order(cache, slots_of(cache, lambda own: own.state.score), 8, 0) for cache in caches]
    np.testing.assert_allclose(*scores, rtol=1e-6)
    np.testing.assert_array_equal(*(kept(cache, 8) for cache in caches))


FITS = dict(policy="kvzip@uniform", budget=20, block=8)


def pending(cache):
    return prompts.kept_of(decoder(), cache, kvjax.kvzip() @ "uniform", 2).pending


def test_what_fits_is_repeated_when_more_comes():
    cache, _ = models.prefill(decoder(), TOKENS[:, :20], lengths=LENGTHS[::-1] // 2, **FITS)  # of 11 and 20 tokens
    np.testing.assert_array_equal(pending(cache)[0], TOKENS[0, :11])
    cache, _ = models.prefill(decoder(), TOKENS[:, 20:32], cache=cache, **FITS)
    live = np.stack(positions(cache)) >= 0
    assert [len(row) for row in pending(cache)] == [0, 0] and (live.sum(-1) == 20).all()
    assert (slots_of(cache, lambda own: own.state.score)[live] > 0).all()


@pytest.mark.matrix
def test_an_answer_is_to_be_repeated_by_the_next_turn():
    cache, _ = models.prefill(decoder(), TOKENS[:, :20], lengths=LENGTHS[::-1] // 2, **FITS)
    cache, _ = models.prefill(decoder(), TOKENS[:, 20:32], cache=cache, **FITS)
    answered = models.generate(decoder(), TOKENS[:, 32:34], cache=cache, max_new_tokens=8, end=(), **FITS)
    assert [row.tolist() for row in pending(answered.cache)] == answered.tokens[:, :-1].tolist()


@pytest.mark.parametrize(
    ("policy", "slots"),
    [("kvzip@uniform", 16), ("kvzip@model(normalise=False,cap=4.0)", 4 * 16)],
    ids=["even", "one budget"],
)
def test_memory_does_not_grow_with_the_prompt(policy, slots):
    """Bytes of the compiled prefill, but for the prompt itself, which is an argument."""
    sizes, held = set(), set()
    for length in (2048, 65536):
        given = engine.check_prompt(decoder(), np.zeros((1, length), int), None, None)
        run, buffers, prompt = engine.prepare(decoder(), given, models.Options(policy, 16, 8, evict_every=4, reserve=8))
        sizes.add(buffers.slots)
        memory = driver.prefill_at_once.lower(run, buffers, prompt, None).compile().memory_analysis()
        fed = sum(x.nbytes for x in jax.tree.leaves(prompt))
        held.add((memory.argument_size_in_bytes - fed, memory.temp_size_in_bytes, memory.output_size_in_bytes))
    assert sizes == {slots + 8 + (8 + 8)}  # what a head may keep, a block and its copies
    assert len(held) == 1


@pytest.mark.parametrize(
    ("policy", "block", "every", "slots"),
    [
        ("kvzip@uniform", 8, 4, 16 + 8 + (8 + 8)),  # a block and its copies, behind eight tokens of the part before
        ("kvzip@uniform", 2, 12, 16 + 12 + (8 + 12)),  # an answer's tokens and their copies
        (
            repeating.asking(kvjax.parse("kvzip(chunk=16)@uniform"), WORDS),
            8,
            4,
            16 + 8 + 4 + 8,
        ),  # with the words that ask
        (repeating.asking(kvjax.parse("kvzip(chunk=5)@uniform"), WORDS), 8, 4, 16 + 8 + 4 + 5),
    ],
)
def test_buffers_hold_what_comes_in_and_what_is_repeated_of_it(policy, block, every, slots):
    given = engine.check_prompt(decoder(), np.zeros((1, 40), int), None, None)
    sizes = plan_run(decoder(), given, models.Options(policy, 16, block, evict_every=every, reserve=8))[1]
    assert (sizes.slots, sizes.first) == (slots, sizes)


@pytest.mark.parametrize(
    ("policy", "every", "slots"),
    [("kvzip(chunk=3)@uniform", 4, (16 + 8 + 4 + 8 + 3, 44)), ("kvzip@uniform", 0, (16 + 8 + 8, 80))],
)
def test_a_prompt_is_held_with_the_copies_of_its_largest_part(policy, every, slots):
    """A row has 30 tokens before its question, and copies of 8 + 3 or 8 + 36: 41 and 74, rounded up.

    Later come up to eight tokens of a question, and those of an answer.
    """
    given = engine.check_prompt(decoder(), np.zeros((2, 36), int), None, [8, 6])
    sizes = plan_run(decoder(), given, models.Options(policy, 16, 8, "prompt", every, reserve=8))[1]
    assert (sizes.slots, sizes.first.slots) == slots


def test_buffers_have_slots_for_copies_and_the_tokens_that_ask_for_them():
    """A copy of 4 tokens follows the 8 before them; one of a block of 8 takes 16 slots."""

    def planned(length, policy, evict_every, model, budget=16):
        given = engine.check_prompt(model, np.zeros((1, length), int), None, None)
        return engine.plan_run(model, given, models.Options(policy, budget, 8, evict_every=evict_every, reserve=4))[1]

    name = "kvzip(chunk=4)@uniform"
    assert planned(200, name, 32, decoder()).slots == 16 + 32 + 12  # the budget, steps of an answer, and their copy
    assert (
        planned(20, name, 32, decoder(), 1.0).slots == 20 + 4 + 12
    )  # all tokens, if they are fewer, and the last copy
    held = (9 + 8 + 16, 16 + 8 + 16, 16 + 8 + 16)  # the layer of the smallest window has it, a block and its copies
    assert planned(200, "kvzip@uniform", 0, decoder(SLIDING)).layer_slots == held
    paged = planned(200, "kvzip@pyramid", 0, decoder(SLIDING))
    assert paged.pages >= kvjax.pages_for(2 * sum(held), 2 * 3, paged.page_size)


def test_the_copy_of_an_answer_follows_whole_words():
    """Those of a later part would end before the tokens that the copy starts with."""
    wanted = ASKING.needs.reconstruction
    (tokens,), (places,), _ = answer_copies(wanted, np.array([[7, 8]]), np.array([12]), np.array([False]))
    assert (tokens.tolist(), places.tolist()) == ([1, 2, 4, 7, 8], [12, 13, 14, 15, 16])


def test_it_evicts_after_each_block_or_once_as_published():
    for when, expected in (("block", ("block", 64)), ("prompt", ("prompt", 0)), ("published", ("prompt", 0))):
        assert moments(kvjax.parse("kvzip@uniform"), when, None) == expected
    assert moments(kvjax.parse("kvzip@uniform"), "block", 1) == ("block", 1)


def test_the_words_are_asked_for_by_the_tokenizer():
    _, tokenizer = models.load("retriever")
    policy = models.with_repeat_prompt("kvzip+caote@uniform", tokenizer)
    assert policy is models.with_repeat_prompt("kvzip+caote@uniform", tokenizer)
    ask = policy.needs.reconstruction.prompt
    assert tokenizer.decode(ask.following) == repeating.FOLLOWING and tokenizer.decode(ask.suffix) == "\n"
    chat = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    speaks = models.Tokenizer(tokenizer.backend, tokenizer.special_tokens, chat)
    ask = models.with_repeat_prompt("kvzip@uniform", speaks).needs.reconstruction.prompt
    assert tokenizer.decode(ask.suffix) == "</u><a>"
    assert models.with_repeat_prompt("h2o", tokenizer) is kvjax.parse("h2o")


def test_the_words_go_on_where_the_prompt_ends():
    tokenizer = spaced(None)
    ask, blank = repeating.repeat_prompt(tokenizer), tokenizer.backend.token_to_id("▁")
    assert ask.first == tuple(tokenizer.encode(repeating.FIRST)[1:]) and blank == tokenizer.encode(repeating.FIRST)[0]
    assert blank not in ask.suffix


def test_parts_of_the_prompt_and_what_asks_for_them():
    contexts = [row[: length - 3] for row, length in zip(TOKENS, LENGTHS, strict=True)]
    blocks = repeats_of(contexts, LENGTHS - 3, ASKING.needs.reconstruction, 8)
    assert blocks.tokens.shape == (9, 2, 8)  # three parts of at most 20 tokens, in three blocks each
    assert blocks.parts[::3, 0].tolist() == [[0, 16, 37], [16, 32, 37], [32, 37, 37]]
    assert blocks.parts[::3, 1].tolist() == [[0, 0, NEVER], [0, 16, 20], [16, 20, 20]]  # a row of two parts is late
    second = blocks.tokens[3:6, 0].ravel()
    assert second[-20:].tolist() == [3, *TOKENS[0, 14:16], 4, *TOKENS[0, 16:32]]
    assert blocks.positions[3:6, 0].ravel().tolist() == [-1] * 4 + list(range(37, 57))


def test_only_rows_that_do_not_fit_are_repeated_block_by_block():
    plan = schedule(
        Text.of(TOKENS[:, :20]), kvjax.kvzip(), block=8, overflows=(np.array([True, False]), np.zeros(2, bool))
    )
    (context, *copies), *_ = (stage.steps for stage in plan.context)
    assert (np.asarray(context.positions)[:, 1] >= 0).any()
    of_row = [np.concatenate([np.asarray(one.positions[:, row]).ravel() for one in copies]) for row in (0, 1)]
    assert (of_row[0] >= 0).sum() >= 20 and (of_row[1] < 0).all()


def test_parts_of_a_later_turn_are_where_its_tokens_are():
    contexts = [row[: length - 3] for row, length in zip(TOKENS, LENGTHS, strict=True)]
    parts = repeats_of(contexts, np.array([50, 30]) + LENGTHS - 3, ASKING.needs.reconstruction, 8).parts[::3]
    assert parts[:, 0].tolist() == [[50, 66, 87], [66, 82, 87], [82, 87, 87]]
    assert parts[1:, 1].tolist() == [[30, 46, 50], [46, 50, 50]]


@pytest.mark.nightly  # of two minutes with a real model; the tiny one shows the same
@pytest.mark.smollm2
@pytest.mark.parametrize("scope", COMPETE)
def test_a_real_text_is_scored_as_by_kvpress(scope):
    try:
        published.find("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    model, tokenizer = models.load("smollm2", dtype="float32")
    tokenizer = models.Tokenizer(tokenizer.backend, tokenizer.special_tokens)  # without a chat template, as there
    golden, budget = fixture(REAL), KEPT[REAL][0]
    policy = models.with_repeat_prompt(COMPETE[scope].replace("kvzip", f"kvzip(chunk={CHUNK[REAL]})"), tokenizer)
    assert policy is asking(COMPETE[scope], REAL)  # the same words
    T = len(golden["tokens"])
    cache, _ = models.prefill(model, golden["tokens"][None], policy=policy, budget=budget, when="prompt")
    expected = np.unpackbits(golden[f"{scope}/{budget}"], axis=-1, count=T).astype(bool)
    found = kept(cache, T)[:, 0]
    assert found.sum() == expected.sum()
    assert (found & expected).sum() / expected.sum() > 0.99
    scores = in_order(cache, slots_of(cache, lambda own: own.state.score), T, np.nan)[:, 0]
    both = found & expected  # a paged cache keeps the scores of the tokens that stayed
    np.testing.assert_allclose(scores[both], golden["scores"][both].astype(np.float32), rtol=2e-2, atol=1e-4)


def test_a_rewound_cache_has_its_slots_back():
    def rewound(rows, start):
        cache = kvjax.insert(kvjax.KVCache.init(batch=2, kv_heads=1, slots=4, head_dim=2), rows, rows)
        return kvjax.rewind(cache, start)

    cache = jax.jit(rewound)(np.ones((2, 3, 1, 2), np.float32), np.array([1, 9]))
    assert cache.position.tolist() == [[[0, -1, -1, -1]], [[0, 1, 2, -1]]] and cache.next_position.tolist() == [1, 3]


N = 6
NAME = f"dapq(window={N},kernel=3)"
DAPQ = dict(budget=14, block=8)


def test_a_prompt_shorter_than_the_window_is_fed_more_than_once():
    lengths = np.array([4, 23])
    rows = [row[:length] for row, length in zip(TOKENS, lengths, strict=True)]
    blocks = repeats_of(rows, lengths, kvjax.parse(NAME).needs.reconstruction, 8)
    assert blocks.tokens[0, 0, -N:].tolist() == [*TOKENS[0, :4], *TOKENS[0, :2]]
    assert blocks.tokens[0, 1, -N:].tolist() == TOKENS[1, 23 - N : 23].tolist()
    assert blocks.positions[0, :, -N:].tolist() == [list(range(4, 4 + N)), list(range(23, 23 + N))]
    assert blocks.parts[0].tolist() == [[0, 4, 4], [0, 23, 23]]


@pytest.mark.matrix
def test_a_second_turn_is_observed_with_all_that_came_before():
    first_turn, _ = models.prefill(decoder(), TOKENS[:1, :24], policy=NAME, budget=1.0, block=8)
    cache, _ = models.prefill(decoder(), TOKENS[:1, 24:], cache=first_turn, policy=NAME, **DAPQ)
    assert_keeps(cache, 0, run(TOKENS[0], policy=NAME, **DAPQ))


def test_cake_may_measure_the_pseudo_queries_and_no_words_are_asked():
    policy = kvjax.parse(f"{NAME}@cake")
    assert policy.reads.window == N and "window_log" in policy.reads.statistics
    _, tokenizer = models.load("retriever")
    assert models.with_repeat_prompt(policy, tokenizer) is policy
    for when in ("block", "prompt", "published"):
        assert moments(kvjax.parse("dapq"), when, None) == ("prompt", 0)


def test_a_row_whose_turn_is_only_a_question_has_no_pseudo_tokens():
    text = Text.of(TOKENS[:, 30:], questions=[3, 10])._replace(start=np.array([30, 30]))
    *_, last = schedule(text, kvjax.parse(NAME), block=8, when="prompt").context
    (blocks,) = last.steps
    assert (np.asarray(blocks.positions[:, 0]) >= 0).sum() == N
    assert (np.asarray(blocks.positions[:, 1]) < 0).all()
