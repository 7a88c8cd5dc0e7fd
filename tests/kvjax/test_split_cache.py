"""Pages on a mesh: what stays, and what attention returns, is what one device gives; no page is exchanged."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax import Evidence, SplitCache
from kvjax._src.cache import PARTS
from tests.kvjax import contests, test_allocation
from tests.kvjax.blocks import empty
from tests.kvjax.test_allocation import HEADS, NONNEGATIVE, K, L, S
from tests.kvjax.test_paged import check_pages, content, num_live
from tests.tiers import first

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; conftest.py forces them on a CPU")
PAGE = 4
COLLECTIVE = r"= (\(.*?\)|\S+) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\("
COMPETING = [  # the other pairs of an allocation and a mesh are in the campaign's table
    ("cake", {}),
    ("model", {"cap": None}),
    ("lava", {}),
    ("duo", {"file": HEADS, "sinks": 1, "recent": 0.25, "cap": None}),
]


@functools.cache
def mesh(data: int = 2, tensor: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))


@functools.cache
def pack():
    sizes = dict(pages=L * -(-S // PAGE), page_size=PAGE, most=S)  # a device has one row and one head of each layer
    return jax.jit(functools.partial(SplitCache.pack, mesh=mesh(), **sizes))


@functools.cache
def evict(what: kvjax.Allocation):
    def run(cache, scores, budget, measured, entered):
        own = measured[..., : what.measures].transpose(1, 2, 0, 3)[
            :, :, :, None, None
        ]  # a device measures its own head
        came = jnp.broadcast_to(entered[:, None, None], (2, 2, 1))
        evidence = Evidence(scores, came, measured=own, allocation=what)
        return kvjax.evict(cache, evidence, budget)

    return jax.jit(run)


def tagged(plain: kvjax.LayerCaches, scores: np.ndarray) -> jax.Array:
    """Scores of a plain cache's slots as those of the pages that each device packs."""
    keys = [{"key": np.asarray(of_layer)[..., None]} for of_layer in scores]
    marked = plain.map(lambda own, key: dataclasses.replace(own, entries=own.entries | key), (keys, PARTS))
    return pack()(marked).parts.key[..., 0]


def parts_of(cache: SplitCache) -> list[kvjax.PagedCache]:
    rows, heads = cache.ways
    one = dataclasses.replace(jax.device_get(cache.parts), axis=None)
    return [jax.tree.map(lambda x, at=at: x[at], one) for at in np.ndindex(rows, heads)]


@pytest.mark.parametrize(("name", "options"), first(2, COMPETING), ids=[name for name, _ in COMPETING])
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_heads_on_several_devices_keep_what_a_sort_of_all_keeps(name, options, data):
    what = test_allocation.make(name, options)
    given = data.draw(test_allocation.contest(NONNEGATIVE, even=what.scope == "head"))
    position, scores, budget, seen, measured, entered = given
    plain = test_allocation.plain_cache(position, seen)
    after = evict(what)(pack()(plain), tagged(plain, scores), budget, measured, entered)
    for b, row in test_allocation.rows_of(*given, name, **{k: v for k, v in options.items() if k == "threshold"}):
        kept = test_allocation.kept_in(after, b)
        if row.entered:
            contests.check(name, options, row, kept)
        else:
            assert kept == set(map(contests.place, row.tokens))
    for part in parts_of(after):
        check_pages(part, fewest=True)


def test_an_eviction_adds_up_counts_and_gathers_no_scores():
    """Each step of a bisection is one sum of an integer per row; all else has a few numbers per layer or head."""
    cache = pack()(test_allocation.plain_cache(np.full((L, 2, K, S), -1, np.int32), [0, 0]))
    two, measured = np.zeros(2, np.int32), np.zeros((L, 2, K, 3), np.float32)
    scores = np.zeros(cache.parts.position.shape, np.float32)
    text = evict(test_allocation.make("cake", {})).lower(cache, scores, two, measured, two).compile().as_text()
    found = re.findall(COLLECTIVE, text)
    assert {kind for _, kind in found} == {"all-reduce", "all-gather"}
    sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in re.findall(r"\[([\d,]*)\]", str(found))]
    assert max(sizes) <= L * K * 2


B, T, N, D, BUDGET = 4, 6, 8, 8, 8


@functools.cache
def block(policy: str, windows: tuple[int | None, ...]):
    """One block in both layers: (cache, start, queries, keys, values) -> outputs, cache; K is 4 here."""
    what = kvjax.parse(policy)
    frequency = 10.0 ** -np.arange(D // 2, dtype=np.float32)[None]
    limits = np.array([window or 2**31 - 1 for window in windows], np.int32)

    def run(cache, start, *rows):
        position = jnp.broadcast_to(start + jnp.arange(T), (B, T))

        def of_layer(carry, given):
            cache, evidence = carry
            layer, window, *rows = given
            context = kvjax.Context(layer=layer, sliding_window=window, frequency=frequency)
            out, cache, said = kvjax.observe(cache, *rows, position, policy=what, budget=BUDGET, context=context)
            return (cache, evidence.with_layer(cache, layer, said)), out

        evidence = Evidence.of_layers(cache, what.allocation)
        (cache, evidence), out = jax.lax.scan(of_layer, (cache, evidence), (jnp.arange(2), limits, *rows))
        return out, kvjax.evict(cache, evidence, BUDGET)

    return jax.jit(run)


def cache_for(policy: str, windows=(None, None), **on):
    sizes = dict(layers=2, batch=B, kv_heads=4, query_heads=N, head_dim=D, budget=BUDGET, block=T, page_size=PAGE)
    sizes |= dict(windows=windows) | on
    return empty(policy, **sizes)


def test_a_block_moves_no_pages_between_devices_and_copies_none_of_a_donated_cache():
    cache = cache_for("h2o@layer", mesh=mesh())
    rows = [np.zeros((2, B, T, heads, D), np.float32) for heads in (N, 4, 4)]
    step = jax.jit(block("h2o@layer", (None, None)), donate_argnums=0)
    text = step.lower(cache, 0, *rows).compile().as_text()
    assert {kind for _, kind in re.findall(COLLECTIVE, text)} == {"all-reduce"}
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text).group(1)
    assert len(re.findall(r"may-alias|must-alias", aliases)) == len(jax.tree.leaves(cache))
    pool = rf"f32\[(1,1,)?{cache.num_pages},{PAGE},{D}\]"
    assert re.search(pool, text) and not re.findall(rf"= {pool}\S* copy\(", text)


def test_a_device_needs_pages_for_its_own_rows_alone():
    """Checked while a block is traced, against the pool that the cache was made with."""
    policy, rows = "h2o@layer(cap=1.5)", [np.zeros((B, T, heads, D), np.float32) for heads in (N, 4, 4)]

    def block(budget):
        options = dict(policy=policy, budget=budget, context=kvjax.Context(layer=0))
        return jax.eval_shape(lambda: kvjax.observe(cache_for(policy, mesh=mesh()), *rows, **options))

    block(BUDGET)
    with pytest.raises(ValueError, match=r"8 heads may hold 9 tokens .* make the cache with \d+ pages, not \d+"):
        block(BUDGET + 1)


@pytest.mark.matrix
def test_rows_are_repeated_taken_back_joined_and_read_on_their_devices():
    policy, other = "h2o@layer(cap=1.5)", mesh(1, 2)

    def changed(cache, one):
        cache = kvjax.rewind(kvjax.repeat(cache, 2), jnp.full(2 * B, 4))
        cache = kvjax.leave(kvjax.join(cache, 1, one), 4)
        rows = jnp.ones((2 * B, 2, 4, D))
        context = kvjax.Context(layer=0)
        return kvjax.observe(cache, jnp.ones((2 * B, 2, N, D)), rows, rows, policy=None, context=context)[1]

    def start(batch, **on):
        cache = cache_for(policy, (None,), batch=batch, layers=1, **on)
        rows = jnp.arange(batch * T * 4 * D, dtype=jnp.float32).reshape(batch, T, 4, D)
        return kvjax.insert(cache, rows, -rows, layer=0)

    whole = jax.jit(lambda: changed(start(B), start(1)))()
    parts = jax.jit(lambda: changed(start(B, mesh=other), start(1, mesh=other)))()
    held, wanted = content(parts), content(whole)
    assert held.keys() == wanted.keys()
    for head, tokens in held.items():
        assert tokens.keys() == wanted[head].keys()
        for position, token in tokens.items():
            np.testing.assert_array_equal(token, wanted[head][position])
    np.testing.assert_array_equal(parts.next_position, whole.next_position)


@pytest.mark.parametrize(
    ("policy", "windows"),
    [("h2o", (None, None)), ("h2o@pyramid", (5, None)), ("laprox(window=4)@layer(cap=1.5)", (5, None))],
)
def test_memory_counts_the_bytes_of_one_device(policy, windows):
    shape = lambda **on: jax.eval_shape(lambda: cache_for(policy, windows, **on))  # noqa: E731
    cache, alone = shape(mesh=mesh(2, 4)), shape()
    assert (cache.heads_shape, cache.num_slots) == (alone.heads_shape, alone.num_slots)
    sizes = dict(layers=2, batch=B, kv_heads=4, query_heads=N, head_dim=D, budget=BUDGET, block=T, page_size=PAGE)
    counted = kvjax.memory(**sizes, policy=policy, windows=windows, dtype="float32", mesh=mesh(2, 4))
    copies = 3 * 4 * B if isinstance(cache, kvjax.LayerCaches) else 0  # next_position is on each device along "tensor"
    assert counted.total == (cache.nbytes + copies) / 8


def test_without_layers_heads_are_counted_and_a_full_pool_is_told():
    sizes = dict(batch=2, kv_heads=2, pages=3, page_size=2, most=6, head_dim=2, init_state=lambda *_: ())
    rows = np.ones((2, 5, 2, 2), np.float32)
    position = np.array([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]], np.int32)
    cache = jax.jit(lambda: kvjax.insert(SplitCache.init(mesh=mesh(), **sizes), rows, rows, position))()
    assert num_live(cache).tolist() == [[3, 3], [5, 5]]
    for entering, lacking in (([[3, 4], [-1, -1]], 0), ([[-1, -1], [5, -1]], 0), ([[-1, -1], [5, 6]], 2)):
        assert cache.lacking(np.array(entering), None) == lacking  # a device has one row
    with pytest.raises(ValueError, match="2 tokens do not fit: 2 more free slots are needed"):
        kvjax.insert(cache, rows[:, :2], rows[:, :2])
