"""What the compiled programs are: how many, how large, and what they do not copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import Config, decoding
from tests.models import reference

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: COMPILED.append(name) if name == "/jax/core/compile/backend_compile_duration" else None
)
BLOCK, BUDGET = 16, 40
POLICIES = ["h2o+caote", "snapkv(window=4)+caote"]
STACKED = (1, 2, 56)  # [B, K, S] behind the layers, S = 40 + 16


def model_of(layers):
    config = Config(
        64, 32, 48, num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64  # shorter than prompts
    )  # fmt: skip
    return reference.decoder(config, reference.parameters(config))


def lowered(program, policy, *, layers=3, length=100):
    """A program of models.decoding for one row, lowered."""
    model = model_of(layers)
    plan, rows, prompt = planned(model, length, policy, BUDGET, BLOCK, fit_prompt=False)
    key, greedy = jax.random.key(0), decoding.Sampling()
    if program == "prefill":
        return decoding._prefill.lower(model, prompt, rows, None, plan)
    if program == "generate":
        return decoding._generate.lower(model, prompt, rows, None, key, plan, greedy, 8, ())
    cache = decoding._empty_cache(model, plan, 1)
    if program == "block step":
        return decoding._block_step.lower(
            model, cache, prompt.tokens[0], prompt.positions[0], rows.lengths, rows.budgets, None, plan.policy, True
        )
    token, finished = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    return decoding._token_step.lower(
        model, cache, token, finished, rows, None, key, 1, plan.policy, plan.evict_every, greedy
    )


def planned(model, length, policy, budget, block, **settings):
    """What a run of one row is made of."""
    lengths, questions = np.array([length], np.int32), np.zeros(1, np.int32)
    plan, rows = decoding._plan(
        model.config,
        None,
        length,
        lengths,
        questions,
        policy,
        budget,
        block,
        "block",
        1,
        8,
        decoding.PAGE_SIZE,
        **settings,
    )
    return plan, rows, decoding._blocks(np.zeros((1, length), np.int32), lengths, questions, block)


def test_one_compilation_serves_streamed_prompts_of_300_and_3000_and_30000_tokens():
    model, random = model_of(2), np.random.default_rng(0)

    def answer(length):
        tokens = random.integers(0, 64, (1, length))
        steps = models.stream(model, tokens, policy="h2o+caote", budget=64, block=256, max_new_tokens=5, end=())
        return [int(token[0]) for token, _ in steps]

    before = decoding._block_step._cache_size(), decoding._token_step._cache_size()
    assert len(answer(300)) == 5
    first = len(COMPILED)
    assert first > 0, "compilations are not counted: jax has renamed the event"
    assert len(answer(3_000)) == len(answer(30_000)) == 5
    assert len(COMPILED) == first
    assert (decoding._block_step._cache_size(), decoding._token_step._cache_size()) == (before[0] + 1, before[1] + 1)


def test_memory_does_not_grow_with_the_prompt():
    sizes = {}
    for length in (1_024, 4_096, 16_384):
        memory = lowered("prefill", "h2o+caote", length=length).compile().memory_analysis()
        tokens_and_positions = 2 * 4 * length
        sizes[length] = (
            memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.argument_size_in_bytes - tokens_and_positions
        )  # fmt: skip
    assert len(set(sizes.values())) == 1, sizes


def test_memory_is_weights_and_cache_and_the_activations_of_one_block_in_one_layer():
    V, E, F, N, K, D, S, G = 64, 32, 48, 4, 2, 8, BUDGET + BLOCK, 2
    temporary = {}
    for layers in (3, 9):
        memory = lowered("prefill", "h2o+caote", layers=layers, length=1_024).compile().memory_analysis()
        weights = 4 * (2 * V * E + E + layers * (2 * E + 2 * E * N * D + 2 * E * K * D + 3 * E * F))
        row = 4  # its budget, its next position
        assert memory.argument_size_in_bytes == weights + 2 * 4 * 1_024 + row
        keys_and_values = layers * K * S * D * 2 * 4
        positions_and_sums = layers * K * S * (1 + G) * 4
        pointers = 8 * (5 + G)  # of the results' tuple
        results = keys_and_values + positions_and_sums + row + 4 * V
        assert results <= memory.output_size_in_bytes <= results + pointers
        temporary[layers] = memory.temp_size_in_bytes
    assert temporary[3] == temporary[9]
    attention, hidden = 4 * N * BLOCK * S, 4 * BLOCK * (4 * E + 2 * F + 3 * N * D)
    assert temporary[3] <= 4 * attention + 2 * hidden + 2 * (K * S * D * 2 * 4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", ["token step", "block step", "generate"])
def test_no_step_copies_the_cache(program, policy):
    """Each array of the whole cache is only handed on, or written in place (a scatter, or an update of one layer)."""
    compiled = lowered(program, policy).compile()
    computations = parse(compiled.as_text())
    inside = (
        {name for name in computations if name.startswith("main")}
        if program != "generate"  # its cache is born inside: zeros outside the loops, once
        else set()
    )
    inside |= {
        body for lines in computations.values() for line in lines for body in re.findall(r"body=%([\w.-]+)", line)
    }
    assert inside, "no loop was found: HLO's text has changed"
    written = 0
    for name in inside:
        for line in computations[name]:
            shape, operation = re.search(r"= (.*?) ([\w-]+)\(", line).groups()
            if not re.match(r"\w+\[3,{},{},{}[,\]]".format(*STACKED), shape):
                continue
            if operation == "fusion":
                called = computations[re.search(r"calls=%([\w.-]+)", line).group(1)]
                operation = next(re.search(r"= .*? ([\w-]+)\(", x).group(1) for x in called if x.startswith("ROOT"))
                written += 1
            assert operation in ("parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice"), line
    assert written >= 4, "keys, values and positions (twice) are written"


@pytest.mark.parametrize("program", ["token step", "block step"])
def test_a_step_donates_every_array_of_the_cache(program):
    compiled = lowered(program, "h2o+caote").compile()
    keys_and_values, positions_and_sums, next_position = 3 * 2 * 56 * 8 * 2 * 4, 3 * 2 * 56 * 3 * 4, 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == keys_and_values + positions_and_sums + next_position
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", compiled.as_text()).group(1)
    assert aliases.count("alias)") == 6, "keys, values, both positions, and the sums of two query heads"


def test_keys_and_values_stay_where_they_are_in_memory():
    model = model_of(2)
    plan, rows, prompt = planned(model, 50, "h2o+caote", 24, 10)
    cache = jax.block_until_ready(decoding._empty_cache(model, plan, 1))
    addresses = {cache.key.unsafe_buffer_pointer(), cache.value.unsafe_buffer_pointer()}
    for block, position in zip(prompt.tokens, prompt.positions, strict=True):
        old = cache
        cache, _ = decoding._block_step(
            model, cache, block, position, rows.lengths, rows.budgets, None, plan.policy, True
        )
        assert {cache.key.unsafe_buffer_pointer(), cache.value.unsafe_buffer_pointer()} == addresses
        assert old.key.is_deleted() and old.value.is_deleted()


def test_32_layers_are_as_long_a_program_as_2():
    few, many = (len(lowered("block step", "h2o+caote", layers=layers).as_text()) for layers in (2, 32))
    assert many < 1.01 * few


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
