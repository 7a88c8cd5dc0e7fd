"""What the compiled programs are: how many, how large, and what they do not copy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import Phase
from models import driver, engine, states, steps
from models.options import Options
from models.planning import plan_run
from models.prompts import check_prompt
from models.sampling import Draws, Sampling
from tests.models import tiny
from tests.tiers import first

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: COMPILED.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
)
BLOCK, BUDGET = 16, 40
POLICIES = ["h2o+caote", "snapkv(window=4)+caote"]
LAYER = (1, 2, 56)  # [B, K, S], S = 40 + 16


def model_of(layers):
    return tiny.decoder(tiny.config(num_layers=layers, max_positions=64))  # fewer positions than prompts have


@functools.cache
def compiled(program, policy, **sizes):
    """A program, compiled once for all that look at it."""
    return lowered(program, policy, **sizes).compile()


def lowered(program, policy, *, layers=3, length=100, evict_every=1):
    """A program of one row and all layers, lowered."""
    model = model_of(layers)
    run, sizes, prompt = prepared(model, length, policy, BUDGET, BLOCK, evict_every=evict_every)
    if program == "prefill":
        return driver.prefill_at_once.lower(run, sizes, prompt, None)
    if program == "generate":
        choice = driver.Choice(Sampling(), 8, ())
        return driver.generate_at_once.lower(run, sizes, prompt, None, None, Draws(), choice)
    state = states.start(run, sizes, 1)
    if program == "block step":
        return driver.block_step.lower(
            run, state, next(prompt.text).tokens[0], next(prompt.text).positions[0], Phase(evicts=True)
        )
    return driver.token_step.lower(
        run, state, jnp.zeros(1, jnp.int32), jnp.zeros(1, bool), Draws(), steps.decode_phase(run.plan, 1), Sampling()
    )


def prepared(model, length, policy, budget, block, *, evict_every=1, **options):
    """What a run of one row is made of, and its prompt in blocks."""
    tokens = np.zeros((1, length), np.int32)
    options = Options(policy, budget, block, evict_every=evict_every, reserve=8, **options)
    return engine.prepare(model, check_prompt(model, tokens, None, None), options)


@pytest.mark.parametrize("each_way", first(1, ["one program", "layers"]), indirect=["each_way"])
def test_one_compilation_serves_streamed_prompts_of_300_and_3000_tokens(each_way, compiled_steps):
    model, random = model_of(2), np.random.default_rng(0)

    def answer(length):
        tokens = random.integers(0, 64, (1, length))
        steps = models.stream(model, tokens, policy="h2o+caote", budget=64, block=256, max_new_tokens=5, end=())
        return [int(token[0]) for token, _ in steps]

    assert len(answer(300)) == 5
    before = len(COMPILED)
    assert before > 0, "compilations are not counted: jax has renamed the event"
    assert len(answer(3000)) == 5
    assert len(COMPILED) == before
    # One for tokens; one for blocks, but among the layers one more, for slots of which some are surely free.
    assert compiled_steps() in (0, 2 if each_way == "one program" else 3), "none where an earlier test compiled them"


def test_memory_is_weights_and_cache_and_the_activations_of_one_block_in_one_layer():
    V, E, F, N, K, D, S, G = tiny.VOCABULARY, 32, 48, 4, 2, 8, BUDGET + BLOCK, 2
    temporary = {}
    for layers in (3, 9):
        given = {} if layers == 3 else dict(layers=layers)
        memory = compiled("prefill", "h2o+caote", length=1_024, **given).memory_analysis()
        # The last norm and the head come after it.
        weights = 4 * (V * E + layers * (2 * E + 2 * E * N * D + 2 * E * K * D + 3 * E * F))
        row, blocks = 4, 4  # its budget, or its next position; how many blocks it has
        assert memory.argument_size_in_bytes == weights + 2 * 4 * 1_024 + row + blocks
        keys_and_values = layers * K * S * D * 2 * 4
        positions_and_sums = layers * K * S * (1 + G) * 4
        pointers = 8 * (2 + layers * (4 + G))  # of the results' tuple
        results = keys_and_values + positions_and_sums + layers * 4 + 4 * E
        assert results <= memory.output_size_in_bytes <= results + pointers
        temporary[layers] = memory.temp_size_in_bytes
    assert temporary[9] - temporary[3] <= 6 * K * S * (1 + G) * 4, "more than positions and sums of six more layers"
    attention, hidden = 4 * N * BLOCK * S, 4 * BLOCK * (4 * E + 2 * F + 3 * N * D)
    assert temporary[3] <= 4 * attention + 2 * hidden + 2 * (K * S * D * 2 * 4)


COPIES = [(program, POLICIES[0], 1) for program in ("token step", "block step")]
COPIES += [("generate", POLICIES[1], 1), ("token step", POLICIES[1], None)]  # the last without the one once in a window


@pytest.mark.parametrize(("program", "policy", "evict_every"), first(2, COPIES))
def test_no_step_copies_the_cache(program, policy, evict_every):
    """The keys and values of each layer are only handed on, or written in place, by a scatter."""
    given = {} if evict_every else dict(evict_every=None)
    computations = parse(compiled(program, policy, **given).as_text())
    inside = (
        {name for name in computations if name.startswith("main")}
        if program != "generate"  # its cache is born inside: zeros outside the loops, once
        else set()
    )
    inside |= {
        body for lines in computations.values() for line in lines for body in re.findall(r"body=%([\w.-]+)", line)
    }
    assert inside, "no loop was found: HLO's text has changed"
    shape_of_cache = r"\w+\[{},{},{},8\]".format(*LAYER)
    written = 0
    for name in inside:
        for line in computations[name]:
            shape, operation = re.search(r"= (.*?) ([\w-]+)\(", line).groups()
            if not re.match(shape_of_cache, shape):
                continue
            if operation == "fusion":
                called = computations[re.search(r"calls=%([\w.-]+)", line).group(1)]
                operation = next(re.search(r"= .*? ([\w-]+)\(", x).group(1) for x in called if x.startswith("ROOT"))
                written += 1
            assert operation in ("parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice"), line
    assert written >= 3 * 2, "keys and values of three layers are written"


@pytest.mark.parametrize("program", ["token step", "block step"])
def test_a_step_donates_every_array_of_the_cache(program):
    made = compiled(program, "h2o+caote")
    keys_and_values, positions_and_sums, next_position = 3 * 2 * 56 * 8 * 2 * 4, 3 * 2 * 56 * 3 * 4, 3 * 4
    assert made.memory_analysis().alias_size_in_bytes == keys_and_values + positions_and_sums + next_position
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", made.as_text()).group(1)
    assert aliases.count("alias)") == 3 * 6, "keys, values, both positions, and the sums of two query heads"


@pytest.mark.parametrize("layers", [False, True], ids=["one program", "layers"])
def test_keys_and_values_stay_where_they_are_in_memory(layers):
    def arrays(cache):
        return [array for layer in cache.layers for array in (layer.key, layer.value)]

    def addresses(cache):
        return [array.unsafe_buffer_pointer() for array in arrays(cache)]

    run, sizes, prompt = prepared(model_of(2), 50, "h2o+caote", 24, 10)
    feed = driver.Steps(run, sizes, steps.weights_of(run.model) if layers else None)
    state = jax.block_until_ready(feed.start(1))
    first = addresses(state.cache)
    assert len(set(first)) == 4
    for phase, tokens, position, _ in prompt.context[0]:
        old = state.cache
        _, state = feed.block(state, tokens, position, phase)
        assert addresses(state.cache) == first
        assert all(array.is_deleted() for array in arrays(old))


def test_identical_layers_are_one_function_that_is_traced_once():
    few, many = (lowered("block step", "h2o+caote", layers=layers).as_text() for layers in (2, 32))
    assert few.count("func.func private @layer_step") == many.count("func.func private @layer_step") == 1
    assert many.count("call @layer_step") == 32


def parse(text):
    """Computations of an HLO module by name ("main..." for the entry), each a list of instructions."""
    computations, name = {}, None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            name = "main " + head.group(2) if head.group(1) else head.group(2)
            computations[name] = []
        elif name and " = " in line:
            computations[name].append(line.strip())
    return computations


# Only planned for: prompts of all lengths.
CONFIG = models.Config(16, 8, 8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, max_positions=40_000)
MOST = 32_768
FOLLOWING = [
    (None, None, "block"),
    ("h2o+caote", 0.25, "block"),
    ("h2o+caote", 64, "prompt"),
    ("h2o@layer", 0.1, "block"),
]


def planned(model, length, policy, budget, when, *, block=128):
    prompt = check_prompt(model, np.zeros((1, length), np.int32), None, None)
    return plan_run(model, prompt, Options(policy, budget, block, when, 1, reserve=8))[1]


@pytest.mark.parametrize(("policy", "budget", "when"), FOLLOWING)
def test_sizes_that_follow_the_prompt_are_few(model, policy, budget, when):
    lengths = np.unique(np.geomspace(128, MOST, 150).astype(int))
    sizes = {int(n): planned(model, n, policy, budget, when) for n in lengths}
    assert len(set(sizes.values())) <= 8 * 9  # nine octaves, from 128 + 8
    for n, made in sizes.items():
        assert made.first.slots <= max(1.125 * (n + 8), n + 16, 1.125 * 64 + 128)


@pytest.mark.parametrize("policy", ["h2o+caote", "h2o@model"])
def test_a_budget_in_slots_has_one_plan_for_all_prompts(model, policy):
    (made,) = {planned(model, n, policy, 64, "block") for n in range(998, MOST, 997)}
    short = {n: planned(model, n, policy, 64, "block") for n in range(1, 500)}
    assert len(set(short.values())) <= 6 and short[500 - 1] == made  # a power of two each
    assert all(min(n + 8, made.slots) <= plan.slots <= max(2 * (n + 8), 16) for n, plan in short.items())
    config = model.config
    sizes = dict(layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    cache = jax.eval_shape(lambda: kvjax.empty_cache(policy, budget=64, block=128, query_heads=2, **sizes))
    assert (made.slots, made.pages) == (cache.num_slots, cache.num_pages)


def test_near_budgets_in_slots_share_sizes_and_powers_of_two_keep_theirs(model):
    budgets = [*range(64, 104), 128, 512, 4_096]
    sizes = {b: planned(model, 9_000, "h2o+caote", b, "block", block=64).slots for b in budgets}
    assert len({sizes[budget] for budget in range(64, 104)}) == 6
    assert all(budget + 64 <= slots <= 1.125 * budget + 64 for budget, slots in sizes.items())
    assert all(sizes[budget] == budget + 64 for budget in (64, 128, 512, 4_096))


def test_questions_of_nearby_lengths_share_one_plan(model):
    def plan(question):
        prompt = check_prompt(model, np.zeros((1, 60), np.int32), None, question)
        return plan_run(model, prompt, Options("tova(heads='group')@layer", 9, 4, reserve=3))[1]

    assert plan(5) == plan(7) == plan(8)
