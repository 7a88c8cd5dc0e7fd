"""How many programs prompts of all lengths compile: few for each plan, and few plans."""

import collections

import jax
import numpy as np
import pytest

import models
from benchmarks.measure import compilations
from kvjax import schedule
from models import engine
from models.plan import Options, bucketed, check_prompt, plan_run
from tests.models import reference
from tests.models.tiny import held
from tests.tiers import first

CONFIG = models.Config(
    16, 8, 8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, max_positions=40_000
)  # fmt: skip
MOST = 32_768
FOLLOWING = [
    (None, None, "block"),
    ("h2o+caote", 0.25, "block"),
    ("h2o+caote", 64, "prompt"),
    ("h2o@layer", 0.1, "block"),
]


@pytest.fixture(scope="module")
def model():
    return reference.decoder(CONFIG, reference.parameters(CONFIG))


def planned(model, length, policy, budget, when, *, stream=False, block=128):
    prompt = check_prompt(model, np.zeros((1, length), np.int32), None, None)
    options = Options(policy, budget, block, when, 1, reserve=8, fit_prompt=not stream)
    return plan_run(model, prompt, options, None)[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("policy", "budget", "when"), FOLLOWING)
def test_sizes_that_follow_the_prompt_take_one_of_eight_in_an_octave(model, policy, budget, when, stream):
    lengths = np.unique(np.geomspace(128, MOST, 150).astype(int))
    plans = {int(n): planned(model, n, policy, budget, when, stream=stream) for n in lengths}
    assert len(set(plans.values())) <= 8 * 9  # nine octaves, from 128 + 8
    for n, plan in plans.items():
        assert max(plan.slots, plan.prompt_slots) <= max(1.125 * (n + 8), n + 16, 64 + 128 + 16)


@pytest.mark.parametrize("policy", ["h2o+caote", "h2o@layer"])
def test_a_budget_in_slots_has_one_plan_for_all_longer_prompts(model, policy):
    assert len({planned(model, n, policy, 64, "block") for n in range(300, MOST, 997)}) == 1
    assert len({planned(model, n, policy, 64, "block", stream=True) for n in range(1, MOST, 997)}) == 1


@pytest.mark.parametrize("size", [1, 7, 8, 9, 127, 129, 1000, 1025, 32_767])
def test_a_bucket_is_at_most_an_eighth_larger(size):
    assert size <= bucketed(size) <= max(1.125 * size, size)


@pytest.mark.parametrize("function", first(1, ["stream", "generate"]))
def test_prompts_of_all_lengths_under_a_budget_compile_twelve_programs_at_most(model, function):
    # No other test takes a budget of 72, so that nothing is compiled already.
    rng = np.random.default_rng(0)
    lengths = [300, *np.geomspace(301, MOST // 4, 6).astype(int) - rng.integers(0, 9, 6), MOST // 4]
    with compilations() as compiled:
        for length in lengths:
            run(model, function, int(length), "h2o+caote", 72, "block")
    assert 0 < len(compiled) <= 12


@pytest.mark.parametrize(
    ("policy", "budget", "when", "layers"),
    [
        *first(0, [(*FOLLOWING[1], False), (*FOLLOWING[2], True)]),
        # Each of 8 s; how many plans there are is counted above.
        *first(0, [(*FOLLOWING[number], layers) for number, layers in ((0, 0), (0, 1), (3, 1))], pytest.mark.nightly),
    ],
)
def test_prompts_of_one_plan_compile_twelve_programs_at_most(model, policy, budget, when, layers, run_by_layer):
    run_by_layer(layers)
    by_plan = collections.defaultdict(list)
    for length in range(1800, 2100, 7):
        by_plan[planned(model, length, policy, budget, when, stream=True)].append(length)
    lengths = max(by_plan.values(), key=len)
    assert len(lengths) > 10
    with compilations() as compiled:
        for length in lengths[::4]:
            run(model, "stream", length, policy, budget, when)
    assert len(compiled) <= 12


@pytest.mark.parametrize(("policy", "budget", "when"), first(0, FOLLOWING[2:]))
def test_rounded_sizes_and_counted_blocks_change_no_result(model, policy, budget, when, monkeypatch):
    prompts = np.random.default_rng(1).integers(0, 16, (2, 333))
    settings = dict(policy=policy, budget=budget, when=when, block=32, max_new_tokens=5, lengths=[333, 190], end=())
    rounded = models.generate(model, prompts, **settings)
    monkeypatch.setattr("models.plan.bucketed", lambda size: size)
    exactly = lambda *given, **options: schedule.schedule(*given, **options | {"exact": True})  # noqa: E731
    monkeypatch.setattr(engine, "schedule", exactly)
    exact = models.generate(model, prompts, **settings)
    assert exact.tokens.tolist() == rounded.tokens.tolist()
    assert held(exact.cache) == held(rounded.cache)


def run(model, function, length, policy, budget, when):
    prompt = np.random.default_rng(length).integers(0, 16, (1, length))
    out = getattr(models, function)(model, prompt, policy=policy, budget=budget, when=when, max_new_tokens=8, end=())
    jax.block_until_ready(out.tokens) if function == "generate" else collections.deque(out, maxlen=0)


@pytest.mark.parametrize(("policy", "budget", "when"), first(0, [FOLLOWING[0], FOLLOWING[2]]))
def test_attention_over_the_filled_slots_alone_is_attention_over_all(model, policy, budget, when, run_by_layer):
    prompts = np.random.default_rng(2).integers(0, 16, (2, 1100))
    settings = dict(policy=policy, budget=budget, when=when, lengths=[1100, 700], outputs="all")
    cache, logits = models.prefill(model, prompts, **settings)
    run_by_layer(False)
    expected, all_logits = models.prefill(model, prompts, **settings)
    np.testing.assert_allclose(logits[0], all_logits[0], atol=1e-5)
    np.testing.assert_allclose(logits[1, :700], all_logits[1, :700], atol=1e-5)
    assert held(cache) == held(expected)
