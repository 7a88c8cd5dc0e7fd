"""The order of a head's tokens, continued from ranks, is the one that a sort of the positions gives."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import order_tokens
from kernels_pallas.order_tokens import gpu
from kernels_pallas.order_tokens.reference import Order
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in, lowered

B, K, S = 2, 2, 9
SEEDS = st.integers(0, 2**32 - 1)
ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "order_tokens")


def positions(rng, least=0, most=S - 1, S=S):
    """Positions below 50 or S of a few tokens, in slots anywhere."""
    position = np.full((B, K, S), -1, np.int32)
    for head in np.ndindex(B, K):
        slots = rng.permutation(S)[: rng.integers(least, most + 1)]
        position[head][slots] = rng.permutation(max(50, S))[: len(slots)]
    return position


def ranks(position):
    """1 and on by position; some number where a slot is free."""
    return np.argsort(np.argsort(np.where(position < 0, 1 << 30, position), axis=-1), axis=-1).astype(np.int32) + 1


def leave(position, choose):
    for head in np.ndindex(B, K):
        live = np.flatnonzero(position[head] >= 0)
        by_age = live[np.argsort(position[head][live])]
        position[head][by_age[choose(len(by_age))]] = -1


def enter(rng, position, rank, at=1 << 20):
    for head in np.ndindex(B, K):
        slot = rng.choice(np.flatnonzero(position[head] < 0))
        position[head][slot], rank[head][slot] = at, 0


def check(order, position):
    """Compare with a sort; behind the last token there are free slots or none."""
    live, S = position >= 0, position.shape[-1]
    found, slot = np.asarray(order.rank), np.asarray(order.slot)
    np.testing.assert_array_equal(found[live], ranks(position)[live])
    for head in np.ndindex(B, K):
        by_age = np.argsort(np.where(live[head], position[head], 1 << 30), kind="stable")
        held = live[head].sum()
        np.testing.assert_array_equal(slot[head][:held], by_age[:held])
        assert not np.append(live[head], False)[np.minimum(slot[head][held:], S)].any()


@ways
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, shifts=st.booleans(), new=st.booleans())
def test_a_step_continues_the_order(name, seed, shifts, new):
    rng = np.random.default_rng(seed)
    position = positions(rng)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[: rng.integers(2)])  # the eviction's
    leave(position, lambda n: np.arange(n)[n - rng.integers(min(n, 2) + 1) :])  # taken back
    if shifts:
        leave(position, lambda n: np.arange(n)[: rng.integers(3)])
    if new:
        enter(rng, position, rank)
    check(compiled(name, shifts=shifts)(rank, position), position)


BROKEN = {
    "two gaps": lambda rng, position, rank: leave(position, lambda n: 1 + rng.permutation(n - 2)[:2]),
    "two tokens without a rank": lambda rng, position, rank: [enter(rng, position, rank, at) for at in (99, 98)],
    "a token without a rank that is not the newest": lambda rng, position, rank: np.put_along_axis(
        rank, np.argmin(np.where(position < 0, 99, position), axis=-1)[..., None], 0, axis=-1
    ),
    "no rank at all": lambda rng, position, rank: rank.fill(0),
}


@ways
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("shifts", [False, True])
@settings(deadline=None, max_examples=5)
@given(seed=SEEDS)
def test_where_ranks_are_wrong_slots_are_sorted(name, broken, shifts, seed):
    rng = np.random.default_rng(seed)
    position = positions(rng, least=5, most=S - 2)
    rank = ranks(position)
    BROKEN[broken](rng, position, rank)
    check(compiled(name, shifts=shifts)(rank, position), position)


@pytest.mark.parametrize("most", [1000, 200])
def test_slots_are_read_in_several_turns_or_by_several_programs(most, monkeypatch):
    monkeypatch.setattr(gpu, "SLOTS", 128)
    monkeypatch.setattr(gpu, "MOST_SLOTS", most)
    rng = np.random.default_rng(0)
    position = positions(rng, least=250, most=299, S=300)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[:1])
    enter(rng, position, rank)
    run = jax.jit(functools.partial(targets.run_of("order_tokens", "gpu"), shifts=False))
    for own in (rank, np.zeros_like(rank)):
        check(run(own, position), position)


def test_sorting_and_back():
    order = Order(np.array([[[2, 0, 3]]]), np.array([[[2, 4, 1]]]))  # of S = 3 slots and no slot 3
    x = np.array([[[[5.0, 7.0, 9.0]]]])
    in_order, back = jax.jit(lambda order, x: (order.sort(x, -1), order.unsort(order.sort(x, -1))))(order, x)
    assert in_order.tolist() == [[[[9.0, 5.0, -1.0]]]]
    assert np.asarray(back)[0, 0, 0, [0, 2]].tolist() == [5.0, 9.0]


@pytest.mark.parametrize(("slots", "kernels"), [(8320, 1), (33, 1), (66_560, 2)])
def test_auto_lowers_to_the_kernel_which_writes_in_place_without_a_sort(slots, kernels):
    shape = jax.ShapeDtypeStruct((1, 8, slots), np.int32)
    assert kernels_in("cuda", order_tokens, shape, shape) == kernels
    program = lowered("cuda", order_tokens, shape, shape)
    assert program.count("output_operand_alias<output_tuple_indices") == 1
    assert "sort" not in program and "stablehlo.case" not in program


def test_it_lowers_with_64_bits():
    shape = jax.ShapeDtypeStruct((1, 8, 33), np.int32)
    with jax.enable_x64(True):
        assert kernels_in("cuda", order_tokens, shape, shape) == 1


def test_ranks_and_positions_of_any_kind_are_taken():
    given = np.array([[[2, 0, 1]]], np.int16), np.array([[[5, 9, 0]]], np.int8)
    assert jax.jit(order_tokens)(*given).rank.tolist() == [[[2, 3, 1]]]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"ranks \(1, 2, 3\) and positions \(1, 2, 4\)"):
        order_tokens(np.zeros((1, 2, 3), np.int32), np.zeros((1, 2, 4), np.int32))


@pytest.mark.accelerator
def test_it_runs_on_a_gpu():
    targets.needs("gpu")
    rng = np.random.default_rng(5)
    position = positions(rng, least=9000, most=9000, S=9001)
    rank = ranks(position)
    leave(position, lambda n: rng.permutation(n)[:1])
    enter(rng, position, rank)
    for own in (rank, np.zeros_like(rank)):
        check(targets.run_here("order_tokens", (own, position), shifts=False)[0], position)
