"""The published scores that others are compared with, each against its formula in NumPy; and those that remember."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kvjax
from tests.kvjax import blocks, definitions
from tests.kvjax.blocks import B, D, E, G, K, N, S, each_head, heads_of, scores, started
from tests.tiers import first

close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
LARGEST = np.finfo(np.float32).max


def own_tokens(block: blocks.Block, b: int, k: int, window: int) -> np.ndarray:
    position = np.asarray(block.observation.position[b, k])
    return (position >= int(block.observation.next_position[b]) - window) & (position >= 0)


def pooled_before(block, b, k, window, score, kernel, pooling):
    """One row of scores [S], pooled but for the window; +inf for the window's own tokens."""
    own, position = own_tokens(block, b, k, window), np.asarray(block.observation.position[b, k])
    score = np.where(own, 0, score)
    return np.where(own, np.inf, definitions.pooled(score, position, kernel, pooling))


def projected(block: blocks.Block, b: int, k: int) -> np.ndarray:
    """v W_O of each slot for each query head of the group: [G, S, E]."""
    value = np.asarray(block.observation.value[b, k], np.float64)
    return np.stack([value @ np.asarray(w, np.float64) for w in block.observation.context.projection.weight[k]])


# Scores of the window's queries.


@pytest.mark.parametrize(
    ("target", "gqa", "window", "kernel"),
    first(
        3,
        [
            ("output", "group", 3, 7),
            *(("value", gqa, 2, 3) for gqa in ("heads", "group")),
            *((target, gqa, 2, 3) for target in ("output", "attention") for gqa in ("group", "heads")),
            ("output", "group", 1, 1),
        ],
    ),
)
def test_laprox_is_the_length_of_a_column_times_that_of_its_projected_value(target, gqa, window, kernel):
    block = blocks.make(30, window=window)

    def formula(b, k, live):
        rows = block.rows(b, window)[heads_of(k)]
        if gqa == "group":
            column = np.linalg.norm(rows.mean(0), axis=0)
        else:
            column = np.mean([np.linalg.norm(head, axis=0) for head in rows], axis=0)
        if target == "value":
            column = column * np.linalg.norm(np.asarray(block.observation.value[b, k], np.float64), axis=-1)
        elif target == "output":
            column = column * np.linalg.norm(np.concatenate(projected(block, b, k), axis=-1), axis=-1)
        return pooled_before(block, b, k, window, column, kernel, "avg")[live]

    policy = kvjax.laprox(window=window, kernel=kernel, target=target, gqa=gqa)
    close(scores(policy, block), each_head(block, formula))


@pytest.mark.parametrize("gamma", first(1, [200.0, 0.0]))
@pytest.mark.parametrize(("window", "kernel"), first(2, [(3, 5), (9, 1), (2, 3)]))
def test_cake_is_the_mean_and_the_variance_over_the_windows_queries(gamma, window, kernel):
    block = blocks.make(31, window=window, next_position=(20, 19))

    def formula(b, k, live):
        rows = block.rows(b, window)[heads_of(k)]
        observed = rows.mean(1) + gamma * rows.var(1, ddof=1)
        return np.mean([pooled_before(block, b, k, window, a, kernel, "avg") for a in observed], 0)[live]

    close(scores(kvjax.cake(window=window, kernel=kernel, gamma=gamma), block), each_head(block, formula))


@pytest.mark.parametrize(("window", "kernel"), first(1, [(2, 7), (1, 3), (3, 1)]))
def test_lava_is_the_largest_mean_attention_nearby_times_the_largest_value(window, kernel):
    block = blocks.make(32, window=window)

    def formula(b, k, live):
        largest = np.abs(np.asarray(block.observation.value[b, k], np.float64)[live]).sum(-1).max()
        observed = block.rows(b, window)[heads_of(k)].mean(1)
        heads = [pooled_before(block, b, k, window, a, kernel, "max") * largest for a in observed]
        return np.max(heads, 0)[live]

    close(scores(kvjax.lava(window=window, kernel=kernel), block), each_head(block, formula))


# KeyDiff.


def test_keydiff_is_minus_the_cosine_to_the_mean_direction_of_the_keys():
    block = blocks.make(33)

    def formula(b, k, live):
        key = np.asarray(block.observation.key[b, k], np.float64)[live]
        mean = (key / np.linalg.norm(key, axis=-1, keepdims=True)).mean(0)
        return -(key @ mean) / np.linalg.norm(key, axis=-1) / np.linalg.norm(mean)

    close(scores("keydiff", block), each_head(block, formula), atol=1e-6)


def test_keydiff_of_a_zero_key_is_zero():
    block = blocks.make(33)
    zeros = block.observation._replace(key=np.zeros_like(block.observation.key))
    np.testing.assert_array_equal(scores("keydiff", zeros), each_head(block, lambda b, k, live: 0.0))


# Expected attention.


def unrotated(query: np.ndarray, position: int, frequency: np.ndarray) -> np.ndarray:
    first, second = np.split(query, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(-1j * position * frequency)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def mean_rotation(start: int, future: int, frequency: np.ndarray) -> np.ndarray:
    """As kvpress builds it: the matrices of all coming positions, averaged: [D, D]."""
    half = len(frequency)
    swap = np.zeros((2 * half, 2 * half))
    swap[half:, :half], swap[:half, half:] = np.eye(half), -np.eye(half)
    angles = np.concatenate([frequency, frequency])[None] * np.arange(start, start + future)[:, None]
    return np.mean([np.cos(a)[:, None] * np.eye(2 * half) + np.sin(a)[:, None] * swap for a in angles], axis=0)


def expected_attention(queries, key, value, position, rotation, sinks, covariance, value_norm):
    """One query head: its queries before rotation [n, D], and a head's live keys, values and positions -> scores."""
    queries = queries if len(queries) else np.zeros((1, key.shape[-1]))
    mean = rotation @ queries.mean(0)
    products = np.einsum("ni,nj->ij", queries - queries.mean(0), queries - queries.mean(0)) / len(queries)
    logits = key @ mean / np.sqrt(key.shape[-1])
    if covariance:
        logits += np.einsum("si,ij,sj->s", key, rotation @ products @ rotation.T, key) / key.shape[-1] / 2
    counted = position >= sinks
    result = np.zeros(len(key))
    result[counted] = definitions.softmax(logits[counted])
    return np.where(counted, result * (np.linalg.norm(value, axis=-1) if value_norm else 1), np.inf)


@pytest.mark.parametrize(
    "options",
    first(
        2,
        [{}, {"covariance": False, "value_norm": False}, {"sinks": 0, "future": 1}, {"sinks": 6, "future": 33}],
    ),
    ids=str,
)
def test_expected_attention_follows_all_queries_so_far(options):
    """Four blocks over the same slots: queries accumulate; the last is a decode step; row 1 pauses in one."""
    policy = kvjax.expected_attention(**{"future": 16} | options)
    settings = {"future": 16, "sinks": 4, "covariance": True, "value_norm": True} | options
    seen = blocks.make(34).observation
    frequency = np.asarray(seen.context.frequency[0], np.float64)
    positions = [[[0, 1, 2, 3], [-1, 0, 1, 2]], [[4, 5, 6, 7], [-1] * 4], [[-1, -1, 8, 9], [3, 4, 5, 6]], [[10], [7]]]
    rng = np.random.default_rng(34)
    past = [[[] for _ in range(N)] for _ in range(B)]
    state = started(policy)
    for block in positions:
        block = np.array(block, np.int32)
        query = (rng.normal(size=(*block.shape, N, D)) + 2).astype(np.float32)
        for b, t, n in np.ndindex(*block.shape, N):
            if block[b, t] >= settings["sinks"]:
                past[b][n].append(unrotated(query[b, t, n].astype(np.float64), block[b, t], frequency))
        observation = seen._replace(query=query, query_position=block)
        result, state = blocks.compiled(policy)(state, observation)

        def formula(b, k, live):
            key, value = (np.asarray(x[b, k], np.float64)[live] for x in (seen.key, seen.value))
            rotation = mean_rotation(int(seen.next_position[b]), settings["future"], frequency)
            position = np.asarray(seen.position[b, k])[live]
            rest = (rotation, settings["sinks"], settings["covariance"], settings["value_norm"])
            heads = [
                expected_attention(np.array(past[b][n]).reshape(-1, D), key, value, position, *rest)
                for n in range(k * G, (k + 1) * G)
            ]
            return np.mean(heads, 0)

        expected = each_head(blocks.Block(None, None, seen), formula)
        close(np.where(np.asarray(seen.position) >= 0, result, np.nan), expected, rtol=2e-5)


def test_expected_attention_does_not_lose_a_small_covariance_beside_a_large_mean():
    policy, seen = kvjax.expected_attention(future=4, sinks=0), blocks.make(35).observation
    still = blocks.in_context(seen, frequency=np.zeros((1, D // 2), np.float32))
    rng = np.random.default_rng(35)
    state, past = started(policy), []
    for start in range(0, 40, 4):
        query = (100 + 0.1 * rng.normal(size=(B, 4, N, D))).astype(np.float32)
        past.append(query.astype(np.float64))
        position = np.tile(np.arange(start, start + 4, dtype=np.int32), (B, 1))
        _, state = blocks.compiled(policy)(state, still._replace(query=query, query_position=position))
    queries = np.concatenate(past, axis=1).reshape(B, -1, K, G, D)
    deviation = queries - queries.mean(1, keepdims=True)
    products = np.einsum("btkgd,btkge->bkgde", deviation, deviation)
    np.testing.assert_allclose(state[2].value, products, rtol=1e-2, atol=1e-2 * products.max())


def test_expected_attention_reads_one_row_of_frequencies_a_sequence():
    policy, seen = kvjax.expected_attention(future=4), blocks.make(36).observation
    rows = np.float32([[1.0, 0.1], [0.5, 0.2]])
    both = scores(policy, blocks.in_context(seen, frequency=rows))
    for b in range(B):
        np.testing.assert_allclose(
            both[b], scores(policy, blocks.in_context(seen, frequency=rows[b : b + 1]))[b], rtol=1e-6
        )


# SAGE-KV.


def chosen_after_the_prompt(row, position, budget, split, mass):
    """SAGE-KV's choice from the last query's row [S]: (what stays for good, length of the recent window)."""
    order = np.argsort(position)
    row, position = row[order], position[order]
    quarter, n = budget // 4, len(position)
    sinks, recent = quarter, max(quarter, 1)
    if split == "adaptive":
        held = np.cumsum(row[:sinks])
        sinks = int(np.searchsorted(held, mass * held[-1])) + 1 if sinks else 0
        held = np.cumsum(row[n - recent :][::-1])
        recent = int(np.searchsorted(held, mass * held[-1])) + 1
    if n <= budget:
        return set(position[: n - recent]), recent
    middle = range(sinks, n - recent)
    best = sorted(middle, key=lambda i: -row[i])[: budget - sinks - recent]
    return {int(position[i]) for i in [*range(sinks), *best]}, recent


# Each split, and each kind of budget against the prompt's length. Query heads change what is averaged, not the splits:
# with them each split once, and a prompt within the budget.
@pytest.mark.parametrize(
    ("heads", "split", "mass", "budget"),
    first(
        2,
        [
            ("group", "fixed", 0.9, 13),
            ("query", "adaptive", 0.9, 16),
            *(("group", "fixed", 0.9, budget) for budget in (3, 12, 26)),
            *(("group", "adaptive", mass, budget) for mass, budget in ((0.5, 16), (1.0, 12), (0.7, 3))),
            *(("query", "fixed", 0.9, budget) for budget in (12, 40)),
        ],
    ),
)
def test_sage_chooses_once_and_then_only_the_recent_window_moves(heads, split, mass, budget):
    prompt, steps = 30, 25
    policy = kvjax.sage(heads=heads, split=split, mass=mass)
    heads_held = N if heads == "query" else K
    rng = np.random.default_rng(budget)
    query, key, value = (2 * rng.normal(size=(B, prompt + steps, h, D)) for h in (N, K, K))
    lengths = [prompt, prompt - 6]  # row 1 is shorter: padding stands in front
    position = np.stack([np.arange(prompt + steps) - (prompt - n) for n in lengths]).clip(-1).astype(np.int32)
    slots = prompt + budget
    state = policy.init(B, heads_held, N // heads_held, slots, D)
    cache = kvjax.KVCache.init(batch=B, kv_heads=heads_held, slots=slots, head_dim=D, state=state)
    inputs = [*(x.astype(np.float32) for x in (query, key, value)), position]
    attend = jax.jit(functools.partial(kvjax.attend, policy=policy, budget=budget))
    cache = attend(cache, *(x[:, :prompt] for x in inputs))[1]

    held = {}
    for b, h in np.ndindex(B, heads_held):
        tokens = np.flatnonzero((position[b] >= 0) & (np.arange(prompt + steps) < prompt))
        members = range(h * N // heads_held, (h + 1) * N // heads_held)
        rows = [
            definitions.attention_weights(
                query[b, prompt - 1, n], key[b, tokens, n // G], position[b, tokens], position[b, prompt - 1]
            )
            for n in members
        ]
        held[b, h] = chosen_after_the_prompt(np.mean(rows, 0), position[b, tokens], budget, split, mass)

    for step in range(steps + 1):
        if step:
            cache = attend(cache, *(x[:, prompt + step - 1 : prompt + step] for x in inputs))[1]
        positions = np.asarray(cache.position)
        for (b, h), (for_good, recent) in held.items():
            last = lengths[b] + step
            window = recent + step if lengths[b] <= budget else recent  # a short prompt leaves it room to grow
            window = min(window, budget - len(for_good))
            kept = positions[b, h]
            assert set(kept[kept >= 0].tolist()) == for_good | set(range(last - window, last)), (b, h, step)


def test_sage_keeps_what_it_chose_in_a_row_without_a_query_in_the_block():
    policy, block = kvjax.sage(), blocks.make(37)
    seen = block.observation
    _, state = blocks.compiled(policy)(started(policy), seen)
    assert (np.asarray(state[1])[np.asarray(seen.position)[1] >= 0] > 0).any()
    query_position, last = np.array(seen.query_position), np.array(seen.columns.last)
    query_position[1], last[1] = -1, 0
    idle = seen._replace(query_position=query_position, columns=seen.columns._replace(last=last))
    np.testing.assert_array_equal(np.asarray(blocks.compiled(policy)(state, idle)[1])[1], np.asarray(state)[1])


def test_sage_scores_the_middle_by_the_groups_mean_attention():
    block = blocks.make(38, budget=8)

    def formula(b, k, live):
        position = np.asarray(block.observation.position[b, k])[live]
        ends = (position < 2) | (position >= int(block.observation.next_position[b]) - 2)
        return np.where(ends, np.inf, block.rows(b)[heads_of(k), -1].mean(0)[live])

    close(scores("sage", block), each_head(block, formula))


# CriticalKV.


def output_lengths(block: blocks.Block) -> np.ndarray:
    """|v W_O|_1 of each slot, its mean over the group, [B, K, S]."""
    lengths = [[np.abs(projected(block, b, k)).sum(-1).mean(0) for k in range(K)] for b in range(B)]
    return definitions.rounded(np.stack(lengths))


@pytest.mark.parametrize("protect", first(1, ["+protect(sinks=2,recent=1)", ""]))
@pytest.mark.parametrize(
    ("safe", "epsilon", "budget"), first(2, [(0.5, 0.1, 5), (0.0, 1e-4, 6), (0.5, 1e-4, 6), (1.0, 0.0, 4)])
)
@pytest.mark.parametrize("seed", first(1, [39, 40]))
def test_critical_keeps_the_best_and_weighs_the_others_by_their_projected_values(protect, safe, epsilon, budget, seed):
    block = blocks.make(seed, budget=budget, next_position=(14, 12))
    policy = kvjax.parse(f"tova(heads='group')+critical(safe={safe},epsilon={epsilon}){protect}")
    position, entered = np.asarray(block.observation.position), block.valid.sum(1)
    new = position >= np.asarray(block.observation.next_position)[:, None, None] - entered[:, None, None]
    assert new.any()
    known = np.where(new, 0, output_lengths(block)).astype(np.float32)  # insertion zeroes a slot's state
    state = ((), known, ())[: 3 if protect else 2]

    def formula(b, k, live):
        base = block.rows(b)[heads_of(k), -1].mean(0)
        stays = np.zeros(S, bool)
        if protect:
            stays = (position[b, k] < 2) | (position[b, k] >= int(block.observation.next_position[b]) - 1)
        first = sorted(live, key=lambda j: (stays[j], base[j]), reverse=True)[: int(safe * budget)]
        rescored = (base + epsilon) * output_lengths(block)[b, k]
        rescored[first] = LARGEST
        return np.where(stays, np.inf, rescored)[live]

    close(scores(policy, block, state), each_head(block, formula))


@pytest.mark.parametrize("block_size", first(1, [5, 1, 20]))
def test_critical_measures_each_value_once_when_it_enters(block_size):
    policy, budget = kvjax.parse("h2o+critical"), 8
    rng = np.random.default_rng(41)
    weight = rng.normal(size=(N, D, E)).astype(np.float32)
    projection = blocks.project(weight, policy.needs.projections)
    slots = budget + block_size
    state = policy.init(B, K, G, slots, D)
    cache = kvjax.KVCache.init(batch=B, kv_heads=K, slots=slots, head_dim=D, state=state)
    step = jax.jit(
        functools.partial(kvjax.attend, policy=policy, budget=budget, context=kvjax.Context(projection=projection))
    )
    for start in range(0, 40, block_size):
        q, k, v = (rng.normal(size=(B, block_size, h, D)).astype(np.float32) for h in (N, K, K))
        position = np.tile(np.arange(start, start + block_size, dtype=np.int32), (B, 1))
        position[1] = np.where(position[1] < 7, -1, position[1] - 7)  # row 1 begins later
        cache = step(cache, q, k, v, position)[1]
        blocks_of_weight = weight.astype(np.float64).reshape(K, G, D, E)
        norms = np.abs(np.einsum("bksd,kgde->bkgse", np.asarray(cache.value, np.float64), blocks_of_weight)).sum(-1)
        live = np.asarray(cache.position) >= 0
        close(np.asarray(cache.state[1])[live], definitions.rounded(norms.mean(2)[live]))
    assert (live.sum(-1) == budget).all()


def test_critical_measures_a_long_block_in_parts():
    from kvjax.transforms import _output_length

    rng = np.random.default_rng(42)
    value, weight = rng.normal(size=(B, K, 11, D)), rng.normal(size=(K, G, D, E))
    expected = definitions.rounded(np.abs(np.einsum("bktd,kgde->bkgte", value, weight)).sum(-1).mean(2))
    for chunk in (4, 128):
        found = jax.jit(_output_length, static_argnums=2)(value.astype(np.float32), weight.astype(np.float32), chunk)
        close(found, expected)


# What does not fit.


@pytest.mark.parametrize(
    ("name", "without", "message"),
    [
        ("expected_attention", "frequency", r"expected_attention .* no rotary frequencies were given; hand over"),
        ("laprox(window=2)", "projection", r"laprox reads the layer's output projection, but none was given"),
        ("tova+critical", "projection", r"critical reads the layer's output projection, but none was given"),
    ],
)
def test_a_score_says_what_it_misses(name, without, message):
    policy, seen = kvjax.parse(name), blocks.make(43).observation
    with pytest.raises(ValueError, match=message):
        scores(policy, blocks.in_context(seen, **{without: None}))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.sage(heads="layer"), r"sage: heads is 'layer'; expected 'group' or 'query'"),
        (lambda: kvjax.sage(split="half"), r"sage: split is 'half'; expected 'fixed' or 'adaptive'"),
        (lambda: kvjax.sage(mass=0), r"sage: mass is 0; give a share of the attention in \(0, 1\]"),
        (lambda: kvjax.sage(mass=1.5), r"sage: mass is 1\.5"),
        (lambda: kvjax.sage(mass="all"), r"sage: mass is 'all'"),
        (lambda: kvjax.laprox(window=0), r"laprox: window is 0; give the number of queries"),
        (lambda: kvjax.laprox(kernel=2), r"laprox: kernel is 2; give an odd number"),
        (lambda: kvjax.laprox(target="key"), r"laprox: target is 'key'; expected 'output', 'value' or 'attention'"),
        (lambda: kvjax.laprox(gqa="max"), r"laprox: gqa is 'max'; expected 'group' or 'heads'"),
        (lambda: kvjax.cake(window=1), r"cake: window is 1; a variance needs at least 2 queries"),
        (lambda: kvjax.cake(kernel=0), r"cake: kernel is 0"),
        (lambda: kvjax.cake(gamma=-1), r"cake: gamma is -1; give a number from 0"),
        (lambda: kvjax.cake(gamma=float("nan")), r"cake: gamma is nan"),
        (lambda: kvjax.lava(window=1.0), r"lava: window is 1\.0"),
        (lambda: kvjax.lava(kernel=6), r"lava: kernel is 6"),
        (lambda: kvjax.expected_attention(future=0), r"expected_attention: future is 0; give a number of coming"),
        (lambda: kvjax.expected_attention(sinks=-1), r"expected_attention: sinks is -1; give a number of first tokens"),
        (lambda: kvjax.expected_attention(sinks=0.1), r"expected_attention: sinks is 0\.1"),
        (lambda: kvjax.critical(safe=1.5), r"critical: safe is 1\.5; give a share of the budget in \[0, 1\]"),
        (lambda: kvjax.critical(safe=None), r"critical: safe is None"),
        (lambda: kvjax.critical(epsilon=-1), r"critical: epsilon is -1; give a number from 0"),
        (lambda: kvjax.parse("keydiff+critical"), r"'critical' needs non-negative scores, which 'keydiff' does not"),
        (lambda: kvjax.parse("keydiff+caote"), r"'caote' needs non-negative scores"),
    ],
)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (kvjax.sage(heads="query", split="adaptive", mass=0.8), "sage(heads='query',split='adaptive',mass=0.8)"),
        (kvjax.laprox(window=8, target="value", gqa="heads"), "laprox(window=8,target='value',gqa='heads')"),
        (kvjax.cake(gamma=10.0), "cake(gamma=10.0)"),
        (kvjax.lava(kernel=3), "lava(kernel=3)"),
        (kvjax.expected_attention(covariance=False), "expected_attention(covariance=False)"),
        (kvjax.keydiff(), "keydiff"),
    ],
    ids=str,
)
def test_a_short_name_gives_the_same_policy(policy, name):
    assert str(policy) == name and kvjax.parse(name) is policy
