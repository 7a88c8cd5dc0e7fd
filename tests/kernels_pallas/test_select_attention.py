"""Attention over chosen slots against NumPy float64 and dense attention, and what the compiled program reads."""

import functools
import math
import re
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import select_attention
from tests.kernels_pallas.test_cache_attention import sinks_of
from tests.tiers import first


class Case(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    slots: np.ndarray


def case(
    seed: int, B: int = 2, T: int = 1, N: int = 4, K: int = 2, S: int = 9, D: int = 5, H: int = 4, M: int = 6
) -> Case:
    """Slots in any order, with none in between; the first row of heads may have none at all."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=shape) for shape in ((B, T, N, D), (B, K, S, D), (B, K, S, D)))
    slots = np.stack([rng.permutation(S)[:M] for _ in range(B * H)]).reshape(B, H, M)
    slots[rng.random(slots.shape) < 0.3] = -1
    slots[0, 0] = -1
    return Case(*(x.astype(np.float32) for x in (query, key, value)), slots.astype(np.int32))


def definition(
    query, key, value, slots, scale: float | None = None, soft_cap: float | None = None, sink_logits=None
) -> np.ndarray:
    """NumPy float64, one query of one head at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, D = query.shape
    out = np.zeros(query.shape)
    for b, t, n in np.ndindex(B, T, N):
        rows = slots[b, n // (N // slots.shape[1])]
        rows = rows[rows >= 0]
        if len(rows):
            head = n // (N // key.shape[1])
            logits = key[b, head, rows] @ query[b, t, n] * (D**-0.5 if scale is None else scale)
            logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
            logits = logits if sink_logits is None else np.append(logits, np.float64(sink_logits[n]))
            weights = np.exp(logits - logits.max())
            out[b, t, n] = (weights / weights.sum())[: len(rows)] @ value[b, head, rows]
    return out


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(select_attention, **options))


def check(case: Case, *, tolerance: float = 2e-6, **options) -> None:
    sinks = {name: options[name] for name in ("sink_logits",) if name in options}
    out = compiled(**{name: option for name, option in options.items() if name not in sinks})(*case, **sinks)
    assert out.dtype == case.query.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), definition(*case, **options), rtol=0, atol=tolerance)


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_output_is_that_of_the_definition(seed):
    check(case(seed))


@pytest.mark.parametrize("H", first(1, [4, 2]))
def test_a_sink_takes_its_share_of_each_querys_weight(H):
    given = case(4, T=3, H=H)
    check(given, sink_logits=sinks_of(given))


@pytest.mark.parametrize("sizes", [dict(H=2, T=3), dict(N=6, K=1, H=6, D=7)], ids=str)
def test_heads_and_groups_of_any_size_read_their_kv_head(sizes):
    check(case(1, **sizes))


def test_the_scale_is_the_logits_factor_and_they_are_bent_to_the_soft_cap():
    given = case(2)
    check(given._replace(query=10 * given.query), scale=0.3, soft_cap=1.5)


def test_bfloat16_is_within_its_rounding_of_float32():
    given = case(3, H=2, D=33)
    rounded = Case(*(np.asarray(x, jnp.bfloat16) for x in given[:3]), given.slots)
    check(rounded, tolerance=0.03)


K, N, S, D = 2, 8, 4096, 64


def reads_of_the_cache(program: str) -> dict[str, int]:
    """By opcode, how many float32 numbers a compiled program takes out of the arrays of the cache's shape.

    A fusion reads what the instructions inside it read; cost_analysis() would count all of its operand instead.
    """
    cache, reads = f"f32[1,{K},{S},{D}]", {}
    instruction = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\w+\[[\d,]*\])\S* ([\w-]+)\((.*)$")
    instructions = [found.groups() for found in map(instruction.match, program.splitlines()) if found]
    cached = {name for name, shape, _, _ in instructions if shape == cache}
    assert {opcode for name, _, opcode, _ in instructions if name in cached} == {"parameter"}, "one makes a whole cache"
    for _, shape, opcode, operands in instructions:
        taken = cached & set(re.findall(r"%([\w.-]+)", operands))
        if taken and opcode not in ("fusion", "call"):
            numbers = math.prod(int(size) for size in shape[shape.index("[") + 1 : -1].split(","))
            reads[opcode] = reads.get(opcode, 0) + numbers
    return reads


@functools.cache
def step(H: int, M: int):
    """A decode step's attention over M slots of each of H heads, compiled."""
    query, cache = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, N, D), (1, K, S, D)))
    return compiled().lower(query, cache, cache, jax.ShapeDtypeStruct((1, H, M), jnp.int32)).compile()


def test_the_compiled_step_reads_the_chosen_rows_and_nothing_else():
    assert reads_of_the_cache(step(N, 128).as_text()) == {"gather": 2 * N * 128 * D}


@pytest.mark.parametrize("M", [S // 16, S // 2])
def test_memory_is_that_of_the_chosen_rows(M):
    assert step(K, M).memory_analysis().temp_size_in_bytes < 1.1 * (2 * K * M * D * 4)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_a_sharded_cache_is_read_without_communication():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def sharded(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    query = sharded((2, 1, N, D), jnp.float32, "data", None, "tensor")
    cache = sharded((2, K, 64, D), jnp.float32, "data", "tensor")
    slots = sharded((2, K, 16), jnp.int32, "data", "tensor")
    run = jax.jit(select_attention, out_shardings=query.sharding)
    program = run.lower(query, cache, cache, slots).compile().as_text()
    assert not re.findall(r"all-\w+|collective-\w+|reduce-scatter", program)
