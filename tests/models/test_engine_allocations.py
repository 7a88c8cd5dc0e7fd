"""Uneven budgets on pages against the masked full cache of the reference: prefill by blocks, then many steps."""

import numpy as np
import pytest

import kvjax
import models
from models import engine, states, steps
from models.plan import Options, check_prompt
from models.sampling import Sampling
from tests.models.tiny import (
    LONG,
    LONG_LENGTHS,
    SETTINGS,
    TOKENS,
    assert_keeps,
    decoder,
    kept_tokens,
    run,
    streamed,
)
from tests.tiers import first

STEPS = 40
PROTECTED = "h2o+caote+protect(sinks=2,recent=0.25)@model(cap=None)"
CASES = [
    (PROTECTED, "block"),
    ("tova(heads='group')@adakv(cap=None)", "block"),
    ("laprox(window=4,kernel=1)@model(cap=None)", "block"),
    ("h2o@model(normalise=False,cap=None)", "block"),
    ("h2o@layer(cap=None)", "prompt"),
]


def assert_pages_are_whole(cache):
    """Every page is owned once or free; each head has the fewest pages that hold its tokens."""
    table, free = np.asarray(cache.table), np.asarray(cache.free)[: int(cache.num_free)]
    owned = table[table >= 0]
    assert sorted([*owned.tolist(), *free.tolist()]) == list(range(len(cache.owner)))
    np.testing.assert_array_equal((table >= 0).sum(axis=-1), -(-np.asarray(cache.num_live) // cache.page_size))


@pytest.mark.parametrize(("name", "when"), first(1, CASES))
def test_many_blocks_and_steps_on_pages_are_those_of_a_masked_full_cache(name, when, compiled_steps):
    settings = dict(policy=name, when=when, **SETTINGS)
    answer, cache = streamed(
        decoder(), LONG, lengths=LONG_LENGTHS, max_new_tokens=STEPS, end=(), page_size=4, **settings
    )
    kinds_of_tokens = 2 if "window" in name else 1  # those after which somebody leaves, once in a window, and others
    assert compiled_steps() == kinds_of_tokens + (1 if when == "block" else 2), "and one for each kind of block"
    assert isinstance(cache, kvjax.PagedCache)
    assert_pages_are_whole(cache)
    assert len(set(np.asarray(cache.num_live)[:, 0].ravel().tolist())) > 1, "the budgets should be uneven"
    for row, length in enumerate(LONG_LENGTHS):
        expected = run(LONG[row, :length], new_tokens=STEPS, **settings)
        assert answer[row].tolist() == expected.tokens
        assert_keeps(cache, row, expected)


def run_of(tokens, policy, budget, block, page_size):
    options = Options(policy, budget, block, evict_every=1, page_size=page_size, reserve=8)
    return engine.prepare(decoder(), check_prompt(decoder(), tokens, None, None), options, None, None)[0]


@pytest.mark.matrix
def test_a_step_on_pages_donates_every_array_of_the_cache():
    run = run_of(np.zeros((1, 100), np.int32), "h2o@model", 40, 16, 4)
    state = states.start(run, 1)
    step = engine.token_step.lower(
        run, state, np.zeros(1, np.int32), np.zeros(1, bool), None, steps.decode_phase(run.plan, 1), Sampling()
    )
    assert step.compile().memory_analysis().alias_size_in_bytes >= state.cache.key.nbytes + state.cache.value.nbytes


@pytest.mark.matrix
@pytest.mark.parametrize("allocation", ["layer", "model(normalise=False)"])
def test_a_head_that_wins_all_slots_after_a_long_question_loses_no_token(allocation):
    favourite = kvjax.base_score("favourite", lambda o: (o.position + 1e4 * (o.head[:, None] == 0))[:, :, None] + 0.0)
    out = models.generate(
        decoder(), TOKENS[:1, :40], policy=favourite @ allocation, budget=4, block=4, question=24, max_new_tokens=40,
        page_size=4, end=(),
    )  # fmt: skip
    newest = np.array([out.cache.layer(index).position.max(axis=-1)[0] for index in range(2)])
    assert (newest[:, 0] == 40 + 40 - 2).all()
    assert_pages_are_whole(out.cache)


@pytest.mark.matrix
def test_pages_are_for_the_rows_budgets_not_for_the_largest_one():
    lengths = np.array([200, 20, 20, 20])
    tokens = np.resize(LONG[0], (4, 200))
    cache, _ = models.prefill(decoder(), tokens, lengths, policy="h2o@layer", budget=0.2, block=8, page_size=4)
    heads, held = 4, 40 + 4 * 3
    assert cache.position.size <= heads * (held + 4 * 8) + heads * 4 * 4
    assert cache.num_live.sum(axis=(0, 2)).tolist() == [160, 16, 16, 16]


@pytest.mark.parametrize("each_way", first(0, ["one program", "layers"]), indirect=True)
def test_questions_of_nearby_lengths_share_one_program(each_way, compiled_steps):
    settings = dict(policy="tova(heads='group')@layer", budget=9, block=4, max_new_tokens=3, end=())
    sizes = []
    for question in (5, 7, 8):
        streamed(decoder(), TOKENS[:1], question=question, **settings)
        sizes.append(compiled_steps())
    assert 0 < sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(("when", "question"), first(0, [("block", 9), ("prompt", 1)]))
def test_sage_does_not_choose_anew_when_the_question_comes(when, question):
    settings = dict(policy="sage", budget=16, block=16, when=when)
    asked, _ = models.prefill(decoder(), LONG[:1, :64], question=question, **settings)
    alone, _ = models.prefill(decoder(), LONG[:1, : 64 - question], **settings)
    kept, kept_alone = kept_tokens(asked), kept_tokens(alone)
    np.testing.assert_array_equal(kept[..., : 64 - question], kept_alone[..., : 64 - question])
    for layer in range(2):
        views = [cache.layer(layer) for cache in (asked, alone)]
        states = [dict(zip(v.position.ravel().tolist(), v.state.ravel().tolist(), strict=True)) for v in views]
        assert all(states[0][p] == pytest.approx(states[1][p], rel=1e-4) for p in states[1] if p >= 0)


@pytest.mark.matrix
def test_sage_scores_a_prompt_that_comes_token_by_token():
    kept = [
        kept_tokens(models.prefill(decoder(), TOKENS[:1], policy=name, budget=16, block=1).cache)
        for name in ("sage", "streaming(sinks=4)")
    ]
    assert (kept[0] != kept[1]).any()
