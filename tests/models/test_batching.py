"""Continuous batching: whatever comes and goes beside it, a request gets the tokens that it gets alone."""

import jax
import numpy as np
import pytest

import models
from models import batching, driver, steps
from tests.models import tiny
from tests.models.tiny import CONFIG, SETTINGS, STATE, VOCABULARY, WINDOW, decoder, run
from tests.tiers import first, matrix, nightly

WINDOWED = dict(policy=WINDOW, **SETTINGS)
EVERY = dict(policy=STATE, **SETTINGS)
CASES = {
    "a window": WINDOWED,
    "every step": EVERY,
    "pages": dict(policy="h2o@model", page_size=4, **SETTINGS),
    "below a threshold": dict(policy="tova(heads='group')@threshold(least=0.02)", **SETTINGS),
}


def requests(count: int, seed: int) -> list[tuple[np.ndarray, dict]]:
    """Requests of random sizes."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length, new = rng.integers(1, 41), int(rng.integers(1, 16))
        sampling = dict(max_new_tokens=new, end=tuple(rng.integers(0, VOCABULARY, 2).tolist()))
        if rng.random() < 0.3:
            sampling |= dict(temperature=1.5, top_k=5, key=jax.random.key(int(rng.integers(1000))))
        made.append((rng.integers(0, VOCABULARY, length), sampling))
    return made


def alone(prompt: np.ndarray, sampling: dict, **settings) -> list[int]:
    if "key" in sampling:
        return [int(token[0]) for token, _ in models.stream(decoder(), [prompt], **settings, **sampling)]
    greedy = dict(new_tokens=sampling["max_new_tokens"], end=sampling["end"], policy=settings["policy"])
    return run(prompt, **greedy, **SETTINGS).tokens


def served(arrivals: list[tuple[np.ndarray, dict]], seed: int, rows: int = 3, **settings) -> list[list[int]]:
    """Submit at random moments, and collect each request's tokens."""
    rng, batch = np.random.default_rng(seed), models.Engine(decoder(), rows=rows, max_new_tokens=16, **settings)
    waiting, answers, ended = list(arrivals), {}, set()
    while waiting or not batch.idle:
        while waiting and rng.random() < 0.3:
            prompt, sampling = waiting.pop(0)
            answers[batch.submit(prompt, **sampling)] = []
        for made in batch.step():
            assert made.handle not in ended
            answers[made.handle].append(made.token)
            if made.ended:
                ended.add(made.handle)
    assert ended == set(answers)
    return [answers[handle] for handle in sorted(answers)]


MANY = [("a window", 8), ("a window", 14), ("pages", 8), ("below a threshold", 8)]


@pytest.mark.parametrize(("name", "count"), first(1, first(3, MANY, rest=nightly)))
def test_each_answer_is_the_one_that_its_prompt_gets_alone(name, count):
    arrivals = requests(count, len(name))
    expected = [alone(prompt, sampling, **CASES[name]) for prompt, sampling in arrivals]
    assert served(arrivals, 1, **CASES[name]) == expected


def test_greedy_answers_are_those_of_the_reference(run_by_layer):
    """By layers, of which only few programs are made."""
    arrivals = [(prompt, dict(max_new_tokens=7, end=())) for prompt, _ in requests(8, seed=3)]
    expected = [run(prompt, new_tokens=7, **EVERY).tokens for prompt, _ in arrivals]
    assert served(arrivals, 1, **EVERY) == expected


def test_each_request_has_a_penalty_and_the_tokens_of_its_own():
    penalised = dict(max_new_tokens=9, end=(), repetition_penalty=1.7, key=None)
    arrivals = [(prompt, penalised) for prompt, _ in requests(4, seed=3)]
    arrivals[2] = arrivals[2][0], penalised | dict(repetition_penalty=1.0)
    expected = [alone(prompt, sampling, **EVERY) for prompt, sampling in arrivals]
    assert served(arrivals, 1, **EVERY) == expected


def test_nobody_waits_longer_than_a_block():
    batch = models.Engine(decoder(), rows=3, **EVERY)
    first = batch.submit(range(9), max_new_tokens=30, end=())
    while not any(made.handle == first for made in batch.step()):
        pass
    batch.submit(range(40), max_new_tokens=4, end=())
    for _ in range(5):  # the blocks of the second prompt
        assert [made.token for made in batch.step() if made.handle == first]


def test_cancelling_frees_a_row_and_leaves_the_others_alone():
    prompts = [prompt for prompt, _ in requests(6, seed=5)]
    batch = models.Engine(decoder(), rows=3, **EVERY)
    handles = [batch.submit(prompt, max_new_tokens=12, end=()) for prompt in prompts]
    answers = {handle: [] for handle in handles}
    for number, made in enumerate(batch.run()):
        answers[made.handle].append(made.token)
        if number == 8:
            batch.cancel(handles[0])  # in a row
            batch.cancel(handles[-1])  # waiting
            batch.cancel(99)
    for handle, prompt in list(zip(handles, prompts, strict=True))[1:-1]:
        assert answers[handle] == run(prompt, new_tokens=12, **EVERY).tokens
    assert len(answers[handles[0]]) < 12 and answers[handles[-1]] == []
    assert batch.idle and int(batch.cache.num_live.sum()) == 0


def test_a_loop_that_was_left_goes_on_where_it_was_and_a_cancelled_request_is_silent():
    batch = models.Engine(decoder(), rows=3, **EVERY)
    handles = [batch.submit(range(9), max_new_tokens=8, end=()) for _ in range(3)]
    made = []
    while not batch.idle:
        for token in batch.run():
            made.append(token.handle)
            if (token.handle, made.count(handles[1])) == (handles[0], 2):
                batch.cancel(handles[1])  # whose token of this step is made, but not yielded
            break
    assert [made.count(handle) for handle in handles] == [8, 2, 8]


@matrix
def test_what_a_request_made_is_repeated_at_each_of_its_evictions(run_by_layer):
    """In the engine and in a stream, of several evictions in one answer."""
    settings = dict(policy="kvzip(chunk=4)@uniform", budget=14, block=8, evict_every=3)
    prompts = tiny.TOKENS[:2, :20]
    expected = [run(prompt, new_tokens=12, **settings).tokens for prompt in prompts]
    batch = models.Engine(decoder(), rows=2, max_new_tokens=12, **settings)
    answers = {batch.submit(prompt, end=()): [] for prompt in prompts}
    for made in batch.run():
        answers[made.handle].append(made.token)
    assert list(answers.values()) == expected
    streamed, _ = tiny.streamed(decoder(), prompts, max_new_tokens=12, end=(), **settings)
    assert streamed.tolist() == expected


def test_an_answer_may_be_longer_than_the_model_has_positions_under_a_budget():
    batch = models.Engine(decoder(), rows=3, max_new_tokens=CONFIG.max_positions + 9, **EVERY)
    batch.submit(range(9), max_new_tokens=3, end=())
    assert len(list(batch.run())) == 3


def test_what_comes_and_goes_compiles_nothing_new():
    served(requests(4, seed=7), 1, **EVERY)
    programs = steps.layer_step, batching._join, batching._leave
    before = [program._cache_size() for program in programs]
    served(requests(12, seed=8), 2, **EVERY)
    assert [program._cache_size() for program in programs] == before


def test_a_temperature_asks_for_no_program_of_its_own():
    drawn = [dict(temperature=one, top_p=0.9, key=jax.random.key(0), max_new_tokens=2) for one in (0.5, 0.7, 1.3)]
    served([([1, 2, 3], drawn[0])], 1, **EVERY)
    before = driver.next_token._cache_size()
    served([([1, 2, 3], sampling) for sampling in drawn[1:]], 1, **EVERY)
    assert driver.next_token._cache_size() == before


@pytest.mark.parametrize("longest", [4, None])
def test_a_budget_in_slots_takes_prompts_of_any_length_whatever_the_longest_is_said_to_be(longest):
    engine = models.Engine(
        tiny.decoder(), rows=1, policy="tova", longest_prompt=longest, max_new_tokens=2, **tiny.SETTINGS
    )
    assert engine.cache.num_slots == tiny.BUDGET + tiny.BLOCK
    engine.submit(tiny.DOCUMENT[0])
