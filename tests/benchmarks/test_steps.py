"""Steps started as after a long prompt are the decoder's steps, on a cache that is what it says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks import steps
from benchmarks.shapes import SHAPES
from models.steps import DecodeState, decode_phase, forward
from tests.tiers import matrix

CONFIG = SHAPES["tiny"]
EVICTING = steps.Setting(CONFIG, "h2o+caote", 16, block=8)
FREE = 2**30


@pytest.fixture(scope="module")
def model():
    return steps.random_model(CONFIG, jnp.float32)


def test_heads_hold_distinct_places_all_over_the_prompt():
    shape = steps.shapes(EVICTING, 1_000_000).cache
    cache = steps.after_prompt(shape, 1_000_000, 16)
    for head in np.asarray(cache.position).reshape(-1, 24):
        live = head[head >= 0]
        assert len(set(live.tolist())) == 16 and live.max() > 900_000 and live.min() < 100_000
    assert np.asarray(cache.next_position).tolist() == [1_000_000]
    state = jax.tree.leaves(cache.state)
    assert state and all(np.isfinite(leaf).all() for leaf in state)


def test_a_full_cache_stands_in_order():
    setting = steps.Setting(CONFIG, None, None, block=8)
    cache = steps.after_prompt(steps.shapes(setting, 40).cache, 40, 40)
    assert cache.position[0, 0, 0].tolist() == [*range(40), *[-1] * 8]


@matrix
def test_a_program_is_so_many_of_the_decoder_s_steps(model):
    program = steps.program("decode", EVICTING, 100, 3, free=FREE)
    projection = models.output_projection(model, "h2o+caote")
    run = dataclasses.replace(program.run, model=model, projection=projection)
    make = lambda: steps.after_prompt(program.cache, 100, 16)  # noqa: E731
    after, logits = program.compiled(run, make(), program.tokens)
    state = DecodeState(make())
    for _ in range(3):
        hidden, state = forward(
            run, state, program.tokens, state.cache.next_position[:, None], decode_phase(run.plan, 1)
        )
    expected, cache = model.logits(hidden[:, 0]), state.cache
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.position, make().position)  # started anew
    np.testing.assert_allclose(after.value, cache.value, rtol=1e-4, atol=1e-5)


def test_contenders_have_the_same_slots_and_one_program_serves_every_prompt_under_a_budget():
    for policy in ("h2o+caote", "streaming", None):
        setting = steps.Setting(CONFIG, policy, 16, block=8)
        assert steps.shapes(setting, 1_000_000).cache.position.shape == (2, 1, 2, 24)
    shapes = [steps.shapes(EVICTING, prompt) for prompt in (100, 1_000_000)]
    assert shapes[0].cache == shapes[1].cache and shapes[0].run.plan == shapes[1].run.plan


@matrix
def test_a_second_prompt_compiles_nothing(model):
    first, second = (steps.feed(model, EVICTING, prompt, steps=2) for prompt in (24, 48))
    assert first.compilations <= 1 and second.compilations == 0
