"""Who gets how many slots: sorts in NumPy (tests/kvjax/contests.py) say, for a plain and for a paged cache."""

import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import KVCache, allocation
from kvjax._src import eviction, topk
from kvjax.allocation import parse_allocation
from tests.kvjax import blocks, contests, definitions
from tests.kvjax.contests import Row, Token
from tests.models import reference
from tests.tiers import first

L, B, K, S = 3, 2, 2, 13
LARGEST = np.finfo(np.float32).max
# Scores whose sums are exact in float32, many of them alike; some are as good as protected, some as bad as can be.
NONNEGATIVE = [0, 0, 1, 1, 2, 3, 5, 8, 13, 64, LARGEST]
ANY = [*NONNEGATIVE, -1, -5, -0.0, -LARGEST, -np.inf, np.nan]

HEADS = str(Path(tempfile.mkdtemp()) / "heads.npy")
np.save(HEADS, np.array([[0.0, 0.5], [2.0, 0.25], [1.0, 0.75]]))  # [L, K], sums that are exact

CURVE = HEADS.replace("heads", "curve")
np.save(CURVE, np.random.default_rng(0).integers(0, 9, (99, L, K)) / 8)

NAMES = f"""
uniform layer adakv adakv(safeguard=0.5,cap=1.25) adakv(safeguard=0,cap=None) model model(normalise=False,cap=1.3)
threshold(least=0.5,cap=None) threshold(least=1,cap=1.3) pyramid pyramid(beta=3.0) cake d2o lava
headkv(file={HEADS!r},beta=3.0,cap=1.3) lukv(file={CURVE!r},cap=1.5)
duo(file={HEADS!r},sinks=0.2,recent=2,streaming=0.7,cap=1.3)
duo(file={HEADS!r},sinks=1,recent=0.25,cap=None) simlayer(sinks=1,recent=2)
simlayer(sinks=0.2,recent=0.2,threshold=0.5,cap=None)
""".split()
CASES = [reference.policy(f"h2o@{name}")[1:] for name in NAMES]
ONE_OF_EACH = list({name: (name, options) for name, options in reversed(CASES)}.values())[::-1]


def each(cases=ONE_OF_EACH):
    """Parametrizes by the allocations, of which one of each runs by default."""
    cases = ONE_OF_EACH + [case for case in cases if case not in ONE_OF_EACH]
    ids = [f"{name}{ {**options, 'file': 'heads'} if 'file' in options else options or '' }" for name, options in cases]
    return pytest.mark.parametrize(("name", "options"), first(len(ONE_OF_EACH), cases), ids=ids)


def make(name: str, options: dict) -> kvjax.Allocation:
    return allocation.ALLOCATIONS[name](**options)


NO_WINDOWS = np.full(L, 2**31 - 1, np.int32)


def evict_after_a_block(what: kvjax.Allocation, cache, scores, budget, measured, entered, window):
    """Evicts by what a policy says of all layers; ``entered`` tokens came into each row."""
    given = dict(measured=measured[..., : what.measures], window=window, allocation=what)
    return kvjax.evict(cache, kvjax.Evidence(scores, entered, **given), budget)


@functools.cache
def jitted(what: kvjax.Allocation):
    return jax.jit(functools.partial(evict_after_a_block, what))


def evict(what: kvjax.Allocation, cache, scores, budget, measured=None, entered=1, window=NO_WINDOWS):
    """By one program for each allocation, whatever is not said."""
    measured = np.zeros((*cache.heads_shape, 3), np.float32) if measured is None else measured
    budget, entered = (np.broadcast_to(np.asarray(x, np.int32), cache.next_position.shape) for x in (budget, entered))
    return jitted(what)(cache, np.asarray(scores), budget, measured, entered, window)


def plain_cache(position: np.ndarray, seen) -> kvjax.LayerCaches:
    """Keys and values tell slots apart; position is [L, B, K, S]."""
    rows = np.arange(position.size, dtype=np.float32).reshape(*position.shape, 1)
    return jax.device_put(blocks.in_layers(rows, -rows, position, np.asarray(seen, np.int32)))


@jax.jit
def positions(cache) -> jax.Array:
    """The positions in the slots of either kind of cache, [L, B, K, S]."""
    return jnp.stack([cache.layer(one).position for one in range(cache.heads_shape[0])])


def kept_in(cache, b: int) -> set[tuple[int, int, int]]:
    """(layer, head, position) of one row, of either kind of cache."""
    position = np.asarray(positions(cache))[:, b]
    return {(int(one), int(k), int(position[one, k, s])) for one, k, s in np.argwhere(position >= 0)}


@st.composite
def contest(draw, numbers, *, even: bool):
    """Positions and scores [L, B, K, S], protected slots +inf; the budgets, what was measured, and what came in."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    budget = np.array([draw(st.integers(1, S)) for _ in range(B)], np.int32)
    seen = np.array([draw(st.integers(0, 2 * S)) for _ in range(B)], np.int32)
    position = np.full((L, B, K, S), -1, np.int32)
    scores = rng.choice(np.array(numbers, np.float32), size=position.shape)
    for b in range(B):
        protected = int(rng.integers(min(budget[b], seen[b]) + 1))
        least = min(protected, S)
        for one in range(L):
            count = rng.integers(least, min(S, seen[b]) + 1)
            for k in range(K):
                if not even:
                    count = rng.integers(least, min(S, seen[b]) + 1)
                slots = rng.permutation(S)[:count]
                # The last tokens are protected, and never evicted: every head holds them.
                older = rng.permutation(seen[b] - protected)[: count - protected]
                position[one, b, k, slots] = np.append(older, np.arange(seen[b] - protected, seen[b]))
                recent = (position[one, b, k] >= 0) & (position[one, b, k] >= seen[b] - protected)
                scores[one, b, k, recent] = np.inf
    measured = np.sort(rng.choice(np.array([0, 0.5, 1, 2, 7], np.float32), size=(L, B, K, 3)))
    return position, scores, budget, seen, measured, rng.integers(seen + 1).astype(np.int32)


def rows_of(position, scores, budget, seen, measured, entered, name="cake", threshold=0.9, **_):
    """Measure: CAKE prefers by a product of two sums; a layer is lazy by a mean; D2O has variances of heads."""
    for b in range(B):
        tokens = [
            Token(one, k, int(position[one, b, k, s]), float(scores[one, b, k, s]))
            for one, k, s in np.ndindex(L, K, S)
            if position[one, b, k, s] >= 0
        ]
        of_heads = np.moveaxis(measured[:, b].astype(np.float64), -1, 0)  # [measures, L, K]
        first, second, _ = of_heads.sum(axis=2)
        preference = {"simlayer": first / K > threshold, "d2o": contests.d2o_preference(*of_heads)}.get(
            name, first * second
        )
        yield b, Row(tokens, L, K, int(budget[b]), int(seen[b]), int(entered[b]), preference)


@each(CASES)
@hypothesis.settings(max_examples=12)
@hypothesis.given(data=st.data())
def test_an_allocation_keeps_what_a_sort_does(name, options, data):
    """A layer's budget is at most its sliding window, and a head of such a layer holds fewer tokens than that."""
    what = make(name, options)
    numbers = NONNEGATIVE if what.needs_nonnegative else ANY
    position, scores, *rest = data.draw(contest(numbers, even=what.scope == "head"))
    budget, seen, measured, entered = rest
    windows, limits = (None,) * L, NO_WINDOWS
    if data.draw(st.booleans()):
        windows = (*data.draw(st.tuples(*[st.integers(2, S)] * (L - 1))), None)
        limits = np.array([*windows[:-1], NO_WINDOWS[-1]], np.int32)
        for one, window in enumerate(windows[:-1]):
            newest = np.sort(position[one])[..., -(window - 1), None]
            position[one] = np.where(position[one] >= newest, position[one], -1)
    after = evict(what, plain_cache(position, seen), scores, budget, measured, entered, limits)
    given = {k: v for k, v in options.items() if k == "threshold"}
    for b, row in rows_of(position, scores, *rest, name, **given):
        kept, row = kept_in(after, b), row._replace(windows=windows)
        if not row.entered:
            assert kept == set(map(contests.place, row.tokens))
            continue
        contests.check(name, options, row, kept)
        assert len(kept) <= K * sum(row.budgets)
        if limits is not NO_WINDOWS:
            continue
        most = max(what.most(L, K, row.budget), row.budget)
        assert all(sum(t[:2] == head for t in kept) <= most for head in row.heads())
        if what.fills:
            of = {"uniform": [*row.heads()], "layer": [*np.ndindex(L)], "adakv": [*np.ndindex(L)]}.get(name, [()])
            could = {head: min(most, len(row.of(*head))) for head in row.heads()}
            each = [sum(count for head, count in could.items() if head[: len(group)] == group) for group in of]
            assert len(kept) == sum(min(L * K * row.budget // len(of), count) for count in each)


@hypothesis.settings(max_examples=8)
@hypothesis.given(given=contest(ANY, even=False))
def test_the_wide_rounds_of_an_accelerator_keep_the_same_tokens(given):
    position, scores, budget, seen, *_ = given
    what, cache = allocation.model(normalise=False), plain_cache(position, seen)
    np.testing.assert_array_equal(
        *(positions(run(what, cache, scores, budget)) for run in (evict, evict_in_wide_rounds))
    )


def evict_in_wide_rounds(what: kvjax.Allocation, cache, scores, budget):
    evict_slots = eviction._evict_slots.__wrapped__
    apart = jax.jit(lambda *given: evict_slots(*given))  # not what was traced for the other run
    with (
        mock.patch.object(topk, "bits_here", lambda: 4),
        mock.patch.object(eviction, "_evict_slots", apart),
        mock.patch.object(sys.modules[__name__], "jitted", wide),
    ):
        return evict(what, cache, scores, budget)


@functools.cache
def wide(what: kvjax.Allocation):
    return jax.jit(lambda *given: evict_after_a_block(what, *given))


def test_one_layer_alone_is_shared_out_as_in_the_whole():
    rng = np.random.default_rng(3)
    position = np.stack([rng.permutation(20)[:S] for _ in range(L * B * K)]).reshape(L, B, K, S)
    scores = rng.normal(size=position.shape).astype(np.float32)
    cache = plain_cache(position.astype(np.int32), [20, 20])
    step = jax.jit(functools.partial(kvjax.evict, budget=5, allocation="adakv"))
    whole = step(cache, scores)
    for one in range(L):
        np.testing.assert_array_equal(step(cache.layers[one], scores[one]).position, whole.layers[one].position)


@pytest.mark.parametrize("name", ["adakv", "model", "lava"])
def test_ties_go_to_the_latest_position_then_to_the_lowest_layer_and_head_however_long_the_sequence(name):
    """position * L * K, and position * L * K + 1 with it, lie beyond int32."""
    start = 2**31 - 1 - S
    position = np.broadcast_to(np.arange(start, start + S, dtype=np.int32), (L, B, K, S))
    cache = plain_cache(position, [start + S] * B)
    after = evict(parse_allocation(name), cache, np.ones((L, B, K, S), np.float32), 4)
    assert (np.sort(after.position, axis=-1)[..., -4:] == position[..., -4:]).all()
    odd = np.full((L, B, K, S), -1, np.int32)
    odd[..., 3] = start
    odd[..., 7] = start + 1
    scores = np.where(odd == start, np.float32(2), np.float32(1))  # one token of each head surely, one of some heads
    after = evict(parse_allocation(name), plain_cache(odd, [start + 2] * B), scores, 1)
    assert (np.asarray(after.position) == np.where(odd == start, odd, -1)).all()


# Budgets of layers.


def test_cake_measures_entropy_and_variance_of_the_window_over_what_may_go():
    policy = kvjax.parse("tova(heads='group')+protect(recent=2)@cake(window=3)")
    rng = np.random.default_rng(4)
    G, T, D = 2, 5, 4
    q, k, v = (rng.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (K * G, K, K))
    position = np.array([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]], np.int32)
    sizes = dict(batch=B, kv_heads=K, slots=T, head_dim=D)
    cache = jax.jit(lambda: KVCache.init(**sizes, state=policy.state(B, K, G, T, D)))()
    measured = jax.jit(functools.partial(kvjax.observe, policy=policy, budget=4))(cache, q, k, v, position)[2].measured
    keys = np.repeat(position[:, None], K, axis=1)
    weights = definitions.block_weights(q, k.swapaxes(1, 2), keys, position)
    for b in range(B):
        last = weights[b][:, position[b] >= 0][:, -3:]
        last = last[..., (position[b] >= 0) & (position[b] < position[b].max() - 1)]
        entropy = -(last * np.log(np.where(last > 0, last, 1))).sum()
        variance = last.var(axis=1, ddof=1).sum()
        np.testing.assert_allclose(np.asarray(measured)[b].sum(axis=0), [entropy, variance], rtol=1e-5)


@pytest.mark.parametrize("name", ["adakv", "lava"])
def test_budgets_of_millions_are_counted_exactly(name):
    """cap * budget * heads and safeguard * budget * 10 ** 4 lie beyond int32."""
    cache = plain_cache(np.arange(8, dtype=np.int32).reshape(2, 1, 2, 2), [2**26])
    evidence = kvjax.Evidence(*jax.device_put((np.ones((2, 1, 2, 2), np.float32), np.ones(1, np.int32))))

    @jax.jit
    def keep(budget):
        given = cache.position, cache.next_position, jnp.full(1, budget)
        return parse_allocation(name).keep(kvjax._src.eviction._contest(cache, evidence, *given))

    assert np.asarray(keep(2**26)).all()


def test_a_budget_beyond_all_slots_leaves_the_choice_to_the_threshold():
    """Times the layers and heads, it lies beyond int32."""
    position = np.broadcast_to(np.arange(S, dtype=np.int32), (L, B, K, S))
    scores = np.where(position % 2, np.float32(0.5), np.float32(0.25))  # the threshold itself, and less
    after = evict(make("threshold", {"least": 0.5, "cap": None}), plain_cache(position, [S] * B), scores, 2**31 - 1)
    np.testing.assert_array_equal(after.position, np.where(position % 2, position, -1))


def test_shares_of_millions_add_up():
    """float32 holds no odd number above 2 ** 24."""
    total = 2**26 + 1
    room, totals = np.int32([[4 * total], [3 * total], [total // 7]]), np.int32([total])
    weights = np.float32([[1.0], [0.1], [0.3]])
    shares = jax.jit(lambda *given: allocation._in_proportion(jnp.asarray(weights))(*given))(room, totals)
    whole = np.asarray(jax.jit(allocation._whole)(shares, room, totals))
    assert whole.sum() == total and (whole <= room).all() and (whole >= 0).all()
    np.testing.assert_allclose(whole, shares, rtol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 2.3, 8.0])
def test_a_head_may_hold_what_the_page_table_was_made_for(cap):
    share = jax.jit(topk.share_of, static_argnums=0)
    for budget in (1, 10, 131_072, 10_000_000):
        most = allocation.model(cap=cap).most(32, 8, budget)
        assert most == min(round(cap * 10) * budget // 10, 256 * budget) == int(share(cap, np.int32(budget)))


# The policies' side.


@pytest.mark.parametrize(
    ("name", "window"), [("h2o@cake", 32), ("h2o@cake(window=8)", 8), ("snapkv(window=16)@cake", 16)]
)
def test_cake_observes_the_policys_window_or_its_own(name, window):
    policy = kvjax.parse(name)
    assert policy.reads.window == window and {"window_log", "window_variance"} <= policy.reads.statistics
    kvjax.check_block(policy, window)
    with pytest.raises(ValueError, match=rf"observes the last {window} queries, but a block has {window - 1}"):
        kvjax.check_block(policy, window - 1)


def measure(policy: kvjax.Policy, what: kvjax.Allocation, block: blocks.Block):
    def run(seen):
        seen = kvjax._src.policy.mark_protected(policy, seen)
        return seen, what.measure(seen)

    seen, measured = jax.jit(run)(block.observation)
    return seen, np.asarray(measured)


def test_a_layer_is_lazy_by_the_last_querys_attention_to_first_and_last_tokens():
    block = blocks.make(50)
    seen, measured = measure(kvjax.h2o(), allocation.simlayer(sinks=3, recent=5), block)
    attention = measured[..., 0].mean(axis=1)
    position, following = np.asarray(seen.position), np.asarray(seen.next_position)
    for b in range(2):
        near = (position[b] >= 0) & ((position[b] < 3) | (position[b] >= following[b] - 3))  # of a budget of 6
        expected = np.where(np.repeat(near, blocks.G, axis=0), block.rows(b)[:, -1], 0).sum()
        np.testing.assert_allclose(attention[b], expected / blocks.N, rtol=1e-5)
    assert (kvjax.h2o() @ "simlayer").reads.window == 0  # a single query judges


def test_d2o_measures_the_variance_of_what_the_windows_queries_give_the_tokens():
    block = blocks.make(51, window=3)
    seen, measured = measure(kvjax.h2o() @ "d2o(window=3)", allocation.d2o(window=3), block)
    for b in range(2):
        rows = block.rows(b)[:, -3:].mean(axis=1)  # [N, S]
        live = np.repeat(np.asarray(seen.position)[b] >= 0, blocks.G, axis=0)
        variance = [x[there].var(ddof=1) / x[there].mean() ** 2 for x, there in zip(rows, live, strict=True)]
        grouped = np.reshape(variance, (-1, blocks.G))
        expected = [grouped.min(axis=1), grouped.mean(axis=1), grouped.max(axis=1)]
        np.testing.assert_allclose(measured[b].T, expected, rtol=1e-5)
    assert kvjax.parse("h2o@d2o").reads.window == 32


def test_lava_does_not_share_out_by_the_rounding_of_an_entropy():
    """Where each layer has one token whose score counts, no layer's entropy is above 0."""
    position = np.full((L, B, K, S), -1, np.int32)
    position[..., :6] = np.arange(6)
    scores = np.full(position.shape, LARGEST, np.float32)
    for seed in range(20):
        scores[..., 5] = np.random.default_rng(seed).random((L, 1, 1), np.float32)
        after = evict(allocation.lava(), plain_cache(position, [6] * B), scores, 5)
        assert ((np.asarray(after.position) >= 0).sum(-1) == 5).all(), seed


@pytest.mark.parametrize("name", ["layer", "lava", "model", "model(normalise=False)", "adakv"])
def test_scores_times_a_constant_keep_the_same_tokens(name):
    """Up to the largest float: sums of such scores would be infinite, and the newest tokens would stay."""
    scores = np.tile(np.where(np.arange(S) < 6, 1.5, 0.25), (L, B, K, 1)).astype(np.float32)
    cache = plain_cache(np.tile(np.arange(S), (L, B, K, 1)), [S] * B)
    evicted = jax.jit(lambda x: kvjax.evict(cache, x, 6, allocation=name).position >= 0)
    alike = [np.full(L, power) for power in (-100, 0, 100, 125, 127)]
    for power in alike + (
        [] if "False" in name else [np.array([125, -100, 0])]
    ):  # of layers that are compared as shares
        stays = np.asarray(evicted(scores * np.float32(2.0 ** power.astype(float))[:, None, None, None]))
        assert stays[..., :6].all() and not stays[..., 6:].any(), power
