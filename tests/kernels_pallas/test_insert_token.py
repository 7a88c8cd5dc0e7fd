"""Insertion of one token per row against NumPy, by the reference and the kernel, which writes in place."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import insert_token
from kernels_pallas.insert_token import gpu
from tests.kernels_pallas import targets
from tests.kernels_pallas.targets import kernels_in, lowered

B, K, S, D = 3, 2, 5, 6
ways = pytest.mark.parametrize("name", ["reference", "gpu"])
compiled = functools.partial(targets.compiled_run, "insert_token")


def case(seed: int, eight: bool = False, S: int = S) -> tuple:
    """Heads with few free slots or none, in any order, and rows of padding."""
    rng = np.random.default_rng(seed)
    position = np.where(rng.random((B, K, S)) < rng.choice([0.3, 1.0], (B, K, 1)), rng.integers(0, 9, (B, K, S)), -1)

    def arrays(*shape: int) -> dict[str, np.ndarray]:
        vectors = {name: rng.normal(size=(B, K, *shape, D)).astype(np.float32) for name in ("key", "value")}
        if not eight:
            return vectors
        scales = {f"{name}_scale": rng.random((B, K, *shape)).astype(np.float32) for name in vectors}
        return {name: (20 * x).astype(np.int8) for name, x in vectors.items()} | scales

    at = np.where(rng.random(B) < 0.3, -1, rng.integers(9, 20, B))
    state = [rng.integers(1, 9, (B, K, S)).astype(np.int32), rng.normal(size=(B, K, S, 2, 3)).astype(np.float32)]
    state.append(np.zeros((B, K, S, 0), np.float32))
    rows = rng.integers(0, 25, B).astype(np.int32)
    return arrays(S), position.astype(np.int32), rows, arrays(), at.astype(np.int32), state


def definition(entries, position, next_position, new, new_position, state, room: bool):
    """NumPy, one head at a time."""
    entries, position, state = jax.tree.map(np.copy, (entries, position, state))
    slot = np.full((B, K), position.shape[2])
    for b, k in np.ndindex(B, K):
        free = np.flatnonzero(position[b, k] < 0)
        if new_position[b] < 0 or (room and not len(free)):
            continue
        slot[b, k] = here = free[0] if len(free) else position.shape[2] - 1
        for name in entries:
            entries[name][b, k, here] = new[name][b, k]
        if not len(free):
            entries["key_scale" if "key_scale" in entries else "key"][b, k, here] = np.nan
        position[b, k, here] = new_position[b]
        for leaf in state:
            leaf[b, k, here] = 0
    return entries, position, np.maximum(next_position, new_position + 1), slot, state


@ways
@hypothesis.given(seed=st.integers(0, 2**32 - 1), eight=st.booleans(), room=st.booleans())
@hypothesis.settings(max_examples=8)
def test_a_token_is_in_the_first_free_slot_and_nothing_else_changes(name, seed, eight, room):
    given = case(seed, eight)
    jax.tree.map(np.testing.assert_array_equal, tuple(compiled(name, room=room)(*given)), definition(*given, room))


def test_positions_are_read_in_several_turns(monkeypatch):
    monkeypatch.setattr(gpu, "SLOTS", 4)
    run = jax.jit(functools.partial(targets.run_of("insert_token", "gpu"), room=False))
    given = case(3, S=11)
    given[1][0] = [[1] * 9 + [-1, 1], [1] * 11]
    jax.tree.map(np.testing.assert_array_equal, tuple(run(*given)), definition(*given, False))


def shapes(S: int, D: int, dtype: str) -> tuple:
    def arrays(*slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        vectors = {name: jax.ShapeDtypeStruct((1, 8, *slots, D), dtype) for name in ("key", "value")}
        scales = {f"{name}_scale": jax.ShapeDtypeStruct((1, 8, *slots), jnp.float32) for name in vectors}
        return vectors | (scales if vectors["key"].dtype.itemsize == 1 else {})

    position, row = jax.ShapeDtypeStruct((1, 8, S), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    return arrays(S), position, row, arrays(), row, [position]


@pytest.mark.parametrize("sizes", [(8320, 128, "bfloat16"), (1001, 80, "float32"), (33, 64, "float8_e4m3fn")], ids=str)
def test_auto_lowers_to_the_kernel_which_writes_in_place(sizes):
    given = shapes(*sizes)
    assert kernels_in("cuda", insert_token, *given) == 1
    program = lowered("cuda", insert_token, *given)
    assert program.count("output_operand_alias<output_tuple_indices") == len(given[0]) + 3


def test_what_the_kernel_does_not_write_is_left_to_the_reference():
    with jax.enable_x64(True):
        targets.refused("cuda", "insert_token", insert_token, shapes(9, 4, "float64"), "keys are float64", room=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda entries, *rest: ({**entries, "bias": np.zeros((B, K, S), np.float32)}, *rest), "bias float32"),
        (lambda entries, position, *rest: (entries, position[:, :, 1:], *rest), "key float32"),
        (lambda *given: (*given[:4], given[4][1:], given[5]), r"are not \(3,\)"),
        (lambda *given: (*given[:5], [given[5][0][:1]]), r"an array \(1, 2, 5\) of the state"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(insert_token, *wrong(*case(0)))


@pytest.mark.accelerator
def test_it_runs_on_a_gpu():
    targets.needs("gpu")
    given = case(5, S=9001)
    jax.tree.map(np.testing.assert_array_equal, *targets.run_here("insert_token", given, room=False))
