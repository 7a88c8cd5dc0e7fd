"""More is kept while a prompt is read than after its last block."""

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import Phase, Text, schedule
from tests.models import tiny
from tests.tiers import matrix

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))
KEPT = dict(budget=12, block=8)
EVEN, UNEVEN = "tova", "keydiff@adakv"
REPEATS = "kvzip@model(normalise=False)"


def read(policy, tokens=TOKENS, **settings):
    return models.prefill(tiny.decoder(), tokens, policy=policy, **{**KEPT, **settings})


@matrix
@pytest.mark.parametrize("policy", [EVEN, UNEVEN])
def test_the_last_block_evicts_to_the_budget_and_those_before_it_to_the_reading_budget(policy):
    before = read(policy, TOKENS[:, :-8], budget=24)
    expected = read(policy, TOKENS[:, -8:], cache=before.cache)
    found = read(policy, reading_budget=24)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)
    assert np.array_equal(np.asarray(found.cache.num_live), np.asarray(expected.cache.num_live))
    assert np.abs(np.asarray(found.logits - read(policy).logits)).max() > 1e-3


@matrix
@pytest.mark.parametrize("policy", [EVEN, UNEVEN, REPEATS])
def test_a_reading_budget_of_the_budget_changes_nothing(policy):
    found, expected = read(policy, reading_budget=12), read(policy)
    assert np.array_equal(found.logits, expected.logits)
    assert np.array_equal(found.cache.num_live, expected.cache.num_live)


@matrix
@pytest.mark.parametrize("policy", [EVEN, UNEVEN])
def test_what_is_left_takes_no_more_bytes_than_without_it_and_can_go_on(policy):
    sizes = []
    note = lambda done, total, cache: sizes.append(cache.nbytes)  # noqa: E731
    *_, (_, last) = models.stream(
        tiny.decoder(), TOKENS, policy=policy, reading_budget=0.6, max_new_tokens=20, on_block=note, **KEPT
    )
    assert last.nbytes <= read(policy).cache.nbytes < max(sizes)
    assert np.asarray(last.num_live).mean() <= 12


@matrix
def test_one_program_reads_as_the_host_does():
    compiled = jax.jit(lambda model: models.prefill(model, TOKENS, policy=EVEN, reading_budget=24, **KEPT).logits)
    np.testing.assert_allclose(compiled(tiny.decoder()), read(EVEN, reading_budget=24).logits, atol=1e-5)


def test_a_schedule_names_the_blocks_that_more_follow():
    text = Text.of(np.arange(20)[None])
    reading, last = schedule(text, kvjax.parse(EVEN), block=8, reading=True, exact=True).context
    assert [len(stage.steps[0].tokens) for stage in (reading, last)] == [2, 1]
    assert [stage.steps[0].phase for stage in (reading, last)] == [Phase(True, reading=True), Phase(True)]
    (only,) = schedule(text, kvjax.parse(EVEN), block=32, reading=True, exact=True).context
    assert only.steps[0].phase == Phase(True)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (dict(policy=EVEN, reading_budget=8), "less than the budget"),
        (dict(policy=EVEN, reading_budget="20%"), "less than the budget"),
        (dict(policy=EVEN, reading_budget=24, when="prompt"), "evicted once, at its end"),
        (dict(policy=None, budget=None, reading_budget=24), "nothing is evicted"),
    ],
)
def test_a_reading_budget_that_means_nothing_is_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        read(**settings)


def test_a_prompt_that_goes_on_in_a_cache_has_one_budget():
    with pytest.raises(ValueError, match="goes on in a cache"):
        read(EVEN, TOKENS[:, :8], cache=tiny.empty(EVEN, batch=2), reading_budget=24)
