"""Types and counts: what Python, NumPy and JAX write differently is one thing, and what is neither is refused."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
import kvjax
from kvjax import sources
from kvjax._src.checks import check_fields

pytestmark = pytest.mark.bad_input  # annotations name Python's numbers
COUNTS = (np.int8, jnp.int32, np.array)


@functools.cache
def filled(batch: int = 1) -> kvjax.KVCache:
    cache = kvjax.KVCache.init(batch=batch, kv_heads=1, slots=8, head_dim=2)
    rows = np.ones((batch, 8, 1, 2), np.float32)
    return jax.jit(kvjax.insert)(cache, rows, rows)


def evicted(budget: Any, batch: int = 1) -> list[int]:
    """A budget that is known while the program is made; budgets alike are one program."""
    cache = filled(batch)
    scores = np.zeros(cache.position.shape, np.float32)
    left = jax.jit(lambda cache: kvjax.evict(cache, scores, budget).position)(cache)
    return (np.asarray(left) >= 0).sum(-1).ravel().tolist()


# Budgets and counts.


@pytest.mark.parametrize("make", COUNTS)
def test_a_budget_is_the_same_number_however_it_is_written(make):
    assert evicted(make(3)) == evicted(3) == [3]


@pytest.mark.parametrize("budget", [10**12, np.uint32(2**31), np.uint64(2**64 - 1)])
def test_too_large_a_budget_keeps_all(budget):
    assert evicted(budget) == [8]


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_too_large_a_budget_that_is_traced_keeps_all(dtype):
    budget = np.array(np.iinfo(dtype).max, dtype)
    cache = filled()
    left = jax.jit(lambda b: kvjax.evict(cache, np.zeros(cache.position.shape, np.float32), b).num_live)(budget)
    assert left.item() == 8


BELOW = (np.int64(0), jnp.int32(-1), np.array([0]), 0)


@pytest.mark.parametrize("budget", BELOW, ids=map(repr, BELOW))
def test_a_known_budget_below_1_is_refused(budget):
    one = np.ones((1, 1, 1, 4), np.float32)
    position = np.arange(4, dtype=np.int32)[None, None]
    for call in (
        lambda: evicted(budget),
        lambda: jax.jit(lambda: evicted_under_jit(budget))(),
        lambda: kvjax.keep_mask(one[:, 0], position, budget),
        lambda: kvjax.select(one[:, 0], position, budget),
        lambda: kernels_pallas.caote_topk(one, one[:, 0, ..., None], position, budget),
    ):
        with pytest.raises(ValueError, match=r"the budget is .*; at least 1 token must stay"):
            call()


def evicted_under_jit(budget: Any) -> jax.Array:
    cache = filled()
    return kvjax.evict(cache, np.zeros(cache.position.shape, np.float32), budget).position


def test_a_share_of_numpys_or_jaxs_is_a_share():
    position = np.arange(8, dtype=np.int32)[None, None]

    def select(budget, **options):
        return jax.jit(lambda x: kvjax.select(x, position, budget, **options))(position.astype(np.float32)).tolist()

    expected = select(0.5, sinks=0)
    for make in (np.float32, np.float64, jnp.float32, jnp.bfloat16):
        assert select(make(0.5), sinks=np.int64(0)) == expected


# Links, allocations and sources.


@pytest.mark.parametrize("make", COUNTS)
def test_a_link_is_the_same_object_however_its_numbers_are_written(make):
    assert kvjax.snapkv(window=make(8), kernel=make(3)) is kvjax.snapkv(window=8, kernel=3)
    assert kvjax.protect(sinks=make(4)) is kvjax.protect(sinks=4)
    assert sources.quest(page_size=make(4)) is sources.quest(page_size=4)


def test_a_share_of_a_link_is_the_same_object_however_it_is_written():
    assert kvjax.protect(recent=np.float64(0.5)) is kvjax.protect(recent=jnp.float32(0.5)) is kvjax.protect(recent=0.5)
    assert kvjax.h2o(accumulate=np.bool_(False)) is kvjax.h2o(accumulate=False)


# The mechanism itself.


@dataclasses.dataclass(frozen=True)
class Fields:
    count: int = 1
    share: float | None = None
    sizes: tuple[int | None, ...] = ()
    kind: Literal["a", 2] = "a"
    of: dict | None = None
    free: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_become_what_their_annotations_say():
    made = Fields(np.int8(3), jnp.float32(0.5), [np.int64(1), None], np.int64(2), {}, object)  # type: ignore[arg-type]
    assert made == Fields(3, 0.5, (1, None), 2, {}, object)
    assert [type(x) for x in (made.count, made.share, made.sizes, made.kind)] == [int, float, tuple, int]
