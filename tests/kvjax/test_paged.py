"""The paged cache: dictionaries say which tokens it holds, a plain cache what it computes, counting who owns a page."""

import dataclasses
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import HeadState, KVCache, PagedCache, allocation
from kvjax._src.paged import trimmed
from tests.kernels_pallas.targets import compiled_for_tpu, kernels_in, lowered
from tests.kvjax import blocks, contests
from tests.kvjax.contests import Row, Token
from tests.tiers import first

B, K, D = 2, 2, 3

# Who holds what. A model of the cache is a dictionary of each head (layer, row, head): position -> tag of the token.


num_live = jax.jit(lambda cache: cache.num_live)


def check_pages(cache: PagedCache, *, fewest: bool) -> None:
    """No page is lost or shared; ``fewest`` says that no head may have more pages than its tokens need."""
    P, page_size = cache.position.shape
    table, owner, position = (np.asarray(x) for x in (cache.table, cache.owner, cache.position))
    table = table.reshape(-1, table.shape[-1])
    free = np.asarray(cache.free)[: int(cache.num_free)]
    assert sorted([*table[table >= 0], *free]) == list(range(P))
    assert (owner[free] == -1).all() and (position[free] == -1).all()
    tokens = np.asarray(num_live(cache)).ravel()
    for head, pages in enumerate(table):
        have = (pages >= 0).sum()
        assert (pages[:have] >= 0).all() and (pages[have:] == -1).all()
        assert (owner[pages[:have]] == head).all()
        assert tokens[head] == (position[pages[:have]] >= 0).sum()
        assert have == -(-tokens[head] // page_size) if fewest else have >= -(-tokens[head] // page_size)


@jax.jit
def layers_of(cache) -> list[KVCache]:
    """Each layer of either kind of cache, as a plain one."""
    if len(cache.heads_shape) == 3:
        return [cache.layer(one) for one in range(cache.heads_shape[0])]
    return [cache.layer()] if isinstance(cache, PagedCache) else [cache]


def content(cache) -> dict[tuple[int, int, int], dict[int, np.ndarray]]:
    """Position -> key, value and state of each token of each head; of either kind of cache."""
    held = {}
    for one, layer in enumerate(layers_of(cache)):
        leaves = [np.asarray(x) for x in (layer.key, layer.value, *slot_leaves(layer.state))]
        position = np.asarray(layer.position)
        for b, k in np.ndindex(*position.shape[:2]):
            slots = np.flatnonzero(position[b, k] >= 0)
            positions = position[b, k, slots].tolist()
            assert len(set(positions)) == len(positions)
            held[one, b, k] = {
                p: np.concatenate([leaf[b, k, s].ravel() for leaf in leaves])
                for p, s in zip(positions, slots, strict=True)
            }
    return held


def is_head_state(leaf) -> bool:
    return isinstance(leaf, HeadState)


def slot_leaves(state) -> list:
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_head_state) if not is_head_state(leaf)]


def assert_same_tokens(a, b, rtol: float = 0) -> None:
    a, b = content(a), content(b)
    for head in a:
        assert set(a[head]) == set(b[head]), head
        for p, row in a[head].items():
            np.testing.assert_allclose(row, b[head][p], rtol=rtol, atol=rtol)


def tag(layer, b, k, position):
    """A number that only this token has."""
    return 1000.0 * (layer * B * K + b * K + k) + position


def rows_of(layer, position) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, T, K, D] that tell which token they belong to."""
    b, k = np.arange(B)[:, None, None], np.arange(K)
    rows = tag(layer, b, k, position[:, :, None])[..., None] + np.arange(D, dtype=np.float32) / 8
    rows = rows.astype(np.float32)
    return rows, -rows


insert = jax.jit(kvjax.insert)


def init_state(b: int, k: int, s: int) -> dict:
    """Per-slot state that is zero when a token enters, of two types, and what is remembered of a head."""
    return {
        "seen": jnp.zeros((b, k, s, 2)),
        "age": jnp.zeros((b, k, s), jnp.int32),
        "head": HeadState(jnp.zeros((b, k, 4), jnp.float32)),
    }


@functools.cache
def maker(*sizes):
    return jax.jit(lambda: PagedCache.init(**dict(sizes)))


def empty(**sizes) -> PagedCache:
    """In one program."""
    return maker(*sizes.items())()


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int | None
    page_size: int
    T: int  # tokens of a block
    budget: int

    @property
    def L(self) -> int:
        return self.layers or 1

    def start(self) -> PagedCache:
        most = self.budget * self.L * K + self.T
        pages = kvjax.pages_for(self.L * B * K * (self.budget + self.T), self.L * B * K, self.page_size)
        sizes = dict(batch=B, kv_heads=K, pages=pages, page_size=self.page_size, most=most, head_dim=D)
        cache = empty(layers=self.layers, init_state=init_state, **sizes)
        # A head's state is its number, so that a mix-up would show.
        heads = np.arange(self.L * B * K * 4, dtype=np.float32).reshape(cache.state["head"].value.shape)
        return dataclasses.replace(cache, state=cache.state | {"head": HeadState(jax.device_put(heads))})

    def put(self, cache, position):
        """Inserts a block into each layer; the state of what is in the cache grows by one."""
        for one in range(self.L):
            layer = None if self.layers is None else one
            cache = kvjax.insert(cache, *rows_of(one, position), position, layer=layer)
        state = cache.state | {"seen": cache.state["seen"] + 1, "age": cache.state["age"] + 1}
        return dataclasses.replace(cache, state=state)


SHAPES = [
    Shape(layers=2, page_size=2, T=5, budget=4),
    Shape(layers=None, page_size=1, T=3, budget=4),
    Shape(layers=3, page_size=4, T=9, budget=6),
]
ALLOCATIONS = [
    ("layer", {"cap": None}),
    ("adakv", {"safeguard": 0.5, "cap": None}),
    ("model", {"cap": None}),
    ("cake", {"cap": None}),
]


@functools.cache
def put(shape: Shape):
    return jax.jit(shape.put)


@functools.cache
def evict(shape: Shape, which: int):
    """A jitted eviction by the scores of tokens, [L, B, K, positions]."""
    name, options = ALLOCATIONS[which]
    what = allocation.ALLOCATIONS[name](**options)

    def run(cache: PagedCache, by_token, budget, measured, entered):
        owner = jnp.maximum(cache.owner, 0)
        scores = by_token.reshape(-1, by_token.shape[-1])[owner[:, None], jnp.maximum(cache.position, 0)]
        return kvjax.evict(cache, kvjax.Evidence(scores, entered, measured=measured, allocation=what), budget)

    return jax.jit(run)


@pytest.mark.parametrize("shape", first(1, SHAPES), ids=str)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=8)
def test_whatever_is_put_in_and_evicted_no_token_and_no_page_is_lost_or_shared(shape, data):
    here = SHAPES.index(shape)
    two = [here, (here - 1) % len(ALLOCATIONS)]  # each allocation costs seconds to compile
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    counts = st.tuples(*[st.integers(0, shape.T)] * B)
    blocks = data.draw(st.lists(st.tuples(counts, st.sampled_from(two)), min_size=1, max_size=8))
    cache, brought = shape.start(), np.zeros(B, int)
    held: dict[tuple[int, int, int], dict[int, int]] = {head: {} for head in np.ndindex(shape.L, B, K)}
    for block, which in blocks:
        position = np.full((B, shape.T), -1, np.int32)
        for b, count in enumerate(block):
            position[b, np.sort(rng.permutation(shape.T)[:count])] = brought[b] + np.arange(count)
        brought += block
        cache = put(shape)(cache, position)
        for (_, b, _), tokens in held.items():
            tokens |= {int(p): 0 for p in position[b] if p >= 0}
            tokens.update({p: age + 1 for p, age in tokens.items()})
        check_pages(cache, fewest=False)
        check_content(cache, held)

        most = 1 + int(rng.integers(shape.budget))
        budget = np.array([most, shape.budget], np.int32)  # rows of their own
        by_token = rng.choice(np.arange(1.0, 60), size=(shape.L, B, K, 100)).astype(np.float32)
        measured = rng.choice(np.array([0, 1, 1, 4], np.float32), size=(shape.L, B, K, 2))
        cache = evict(shape, which)(cache, by_token, budget, measured, np.array(block, np.int32))
        check_pages(cache, fewest=True)
        kept = content(cache)
        for b in range(B):
            tokens = [
                Token(one, k, p, float(by_token[one, b, k, p]))
                for (one, row, k), in_head in held.items() if row == b for p in in_head
            ]  # fmt: skip
            preference = measured[:, b].sum(axis=1).prod(-1)
            row = Row(tokens, shape.L, K, int(budget[b]), int(brought[b]), block[b], preference)
            stays = {(one, k, p) for one, k in np.ndindex(shape.L, K) for p in kept[one, b, k]}
            name, options = ALLOCATIONS[which]
            if not block[b]:
                assert stays == set(map(contests.place, tokens))
            elif name not in ("pyramid", "cake") or even(held, b):
                contests.check(name, options, row, stays)
        held = {head: {p: age for p, age in tokens.items() if p in kept[head]} for head, tokens in held.items()}
        check_content(cache, held)
        assert cache.next_position.tolist() == brought.tolist()
    np.testing.assert_array_equal(cache.state["head"].value, shape.start().state["head"].value)


def even(held, b: int) -> bool:
    """Whether the heads of each layer hold equally many tokens, which definitions over layers alone ask for."""
    counts = {(one, k): len(tokens) for (one, row, k), tokens in held.items() if row == b}
    return all(count == counts[one, 0] for (one, _), count in counts.items())


def check_content(cache: PagedCache, held) -> None:
    for head, tokens in content(cache).items():
        assert set(tokens) == set(held[head])
        for p, row in tokens.items():
            key, age = tag(*head, p) + np.arange(D) / 8, held[head][p]
            np.testing.assert_array_equal(row, [*key, *-key, age, age, age])  # leaves of a dict come by name


def test_a_pool_for_the_worst_case_holds_it_and_one_page_less_does_not():
    """Each head ends in a page with one token."""
    slots, heads, page = 4 * 4 + 4, 4, 4
    pages = kvjax.pages_for(slots, heads, page)
    assert pages == 8
    for given in (pages, pages - 1):
        cache = empty(batch=B, kv_heads=K, pages=given, page_size=page, most=5, head_dim=D)
        position = np.broadcast_to(np.arange(5, dtype=np.int32), (B, 5))
        if given == pages:
            cache = insert(cache, *rows_of(0, position), position)
            assert int(cache.num_free) == 0 and (np.asarray(num_live(cache)) == 5).all()
        else:
            with pytest.raises(ValueError, match=r"5 tokens do not fit: 4 more free slots are needed; evict first"):
                kvjax.insert(cache, *rows_of(0, position), position)


def test_under_jit_a_row_without_a_page_for_a_token_is_nan_and_harms_no_other():
    cache = empty(batch=B, kv_heads=K, pages=5, page_size=2, most=4, head_dim=D)
    position = np.broadcast_to(np.arange(3, dtype=np.int32), (B, 3))
    cache = insert(cache, *rows_of(0, position), position)
    check_pages(cache, fewest=False)
    before = content(cache)
    assert num_live(cache).tolist() == [[3, 3], [2, 0]]
    assert nan_rows(cache) == [False, True]
    position = position + np.where(np.arange(B)[:, None] == 0, 3, 0)
    position[0, 1:] = -1  # one token more fits into the first row
    cache = insert(cache, *rows_of(0, position), position)
    check_pages(cache, fewest=False)
    assert nan_rows(cache) == [False, True]
    after = content(cache)
    for (row, *head), tokens in before.items():
        for p, kept in tokens.items() if row == 0 else ():
            np.testing.assert_array_equal(after[row, *head][p], kept)


def test_a_token_beyond_the_page_table_makes_its_row_nan_under_jit():
    cache = empty(batch=B, kv_heads=K, pages=40, page_size=2, most=3, head_dim=D)
    position = np.broadcast_to(np.arange(7, dtype=np.int32), (B, 7))
    cache = insert(cache, *rows_of(0, position), position)
    check_pages(cache, fewest=True)
    assert all(set(tokens) == {0, 1, 2, 3} for tokens in content(cache).values())
    assert nan_rows(cache) == [True] * B


def nan_rows(cache):
    """Tell whether what attends over a row is NaN."""
    table, key = np.asarray(cache.table), np.asarray(cache.entries["key"])
    live = np.asarray(cache.position) >= 0
    return [bool(np.isnan(key[pages][live[pages]]).any()) for pages in (row[row >= 0] for row in table)]


# Attention.

G = 2


def on_a_large_pool(name: str, T: int, excess: int | None = None):
    """A block upon pages whose heads may own a hundredth of the pool, and the shapes of what it takes."""
    policy, most, width = kvjax.parse(name), 4096, 128
    pages = K * 100 * most // 16
    cache = jax.eval_shape(
        lambda: PagedCache.init(
            batch=1, kv_heads=K, pages=pages, page_size=16, most=most, head_dim=width, dtype=jnp.bfloat16,
            init_state=lambda b, k, s: policy.state(b, k, G, s, width),
        )
    )  # fmt: skip
    leaves, tree = jax.tree.flatten(cache)

    def block(query, rows, *leaves):
        cache = jax.tree.unflatten(tree, leaves)
        if excess is not None:
            context = kvjax.Context(excess=excess)
            return kvjax.attend(cache, query, rows, rows, policy=policy, budget=64, context=context)
        out, cache, seen = kvjax.observe(cache, query, rows, rows, policy=policy)
        return out, seen.scores, jax.tree.leaves(cache)

    of_heads = (jax.ShapeDtypeStruct((1, T, heads, width), jnp.bfloat16) for heads in (K * G, K))
    return block, (*of_heads, *leaves)


# On a GPU a second kernel also combines the parts of a single query's softmax, and makes its statistics; one more adds
# them to those of earlier queries.
@pytest.mark.parametrize(("platform", "T", "kernels"), [("tpu", 1, 1), ("cuda", 4, 3)])
def test_one_kernel_reads_the_pages_of_all_heads_and_one_makes_statistics_of_several_queries(platform, T, kernels):
    block, shapes = on_a_large_pool("h2o+caote@model", T)
    assert kernels_in(platform, block, *shapes) == kernels


@pytest.mark.parametrize(
    ("name", "loops"), [("h2o+caote@model", 1), ("keydiff@model(normalise=False)", 1), ("h2o@model", 0)]
)
def test_only_a_policy_that_reads_keys_or_values_is_asked_head_by_head(name, loops):
    block, shapes = on_a_large_pool(name, 1)
    assert lowered("cuda", block, *shapes).count("stablehlo.while") == loops


# A branch of the sort, and of two platforms.
@pytest.mark.parametrize(("platform", "branches", "kernels"), [("tpu", 3, 0), ("cuda", 0, 1)])
def test_in_decode_the_order_is_sorted_only_where_it_must_be(platform, branches, kernels):
    """Under vmap each branch of a condition would run, so heads are asked one by one; a GPU has a kernel for all."""
    block, shapes = on_a_large_pool("snapkv@layer", 1, excess=1)
    program = lowered(platform, block, *shapes)
    assert (program.count("stablehlo.case"), program.count('name = "order_tokens"')) == (branches, kernels)


@pytest.mark.matrix
@pytest.mark.tpu
@pytest.mark.parametrize(("name", "times"), [("h2o+caote@model", 1), ("h2o@model", 0)])
def test_compiled_for_a_tpu_pages_are_laid_out_only_for_a_policy_that_reads_them(name, times):
    block, shapes = on_a_large_pool(name, 1)
    program = compiled_for_tpu("v5e:2x2", block, *shapes, donate=range(2, len(shapes)))
    laid_out = re.findall(r"= bf16\[256,16,128\]\S* gather\(", program.as_text())
    assert len(laid_out) == times
    pool = shapes[2].size * 2
    assert program.memory_analysis().temp_size_in_bytes < pool / 2


def test_a_cache_without_its_spare_pages_takes_tokens_in_until_it_is_full():
    """Where a row of 5 tokens was rewound, the pages in use are not the first ones; each head has 1, of 2 tokens."""
    shape = SHAPES[0]
    cache = put(shape)(shape.start(), np.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]], np.int32))
    small = jax.jit(lambda cache: trimmed(kvjax.rewind(cache, jnp.array([2, 9])), 16))(cache)
    check_pages(small, fewest=True)
    assert (len(small.owner), int(small.num_free)) == (16, 16 - shape.L * B * K)
    small = put(shape)(small, np.array([[2, 3, -1, -1, -1], [2, 3, -1, -1, -1]], np.int32))
    check_pages(small, fewest=True)
    assert int(small.num_free) == 0 and nan_rows(small) == [False, False]
    for head, tokens in content(small).items():
        assert tokens.keys() == {0, 1, 2, 3}
        for p, row in tokens.items():
            key = tag(*head, p) + np.arange(D) / 8
            np.testing.assert_array_equal(row[: 2 * D], [*key, *-key])


# Packing.


@pytest.mark.parametrize("layers, page_size, pages", first(1, [(3, 2, 30), (None, 1, 18)]))
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10)
def test_packing_keeps_tokens_and_takes_the_fewest_pages(layers, page_size, pages, seed):
    rng, S = np.random.default_rng(seed), 9
    shape = (*(() if layers is None else (layers,)), B, K)
    counts = rng.integers(S + 1, size=shape)
    while (need := (-(-counts // page_size)).sum()) > pages:
        counts.flat[counts.argmax()] -= 1
    position = np.full((*shape, S), -1, np.int32)
    for head, count in np.ndenumerate(counts):
        position[head][rng.permutation(S)[:count]] = rng.permutation(40)[:count]
    rows = rng.normal(size=(*shape, S, D)).astype(np.float32)
    state = {
        "seen": rng.normal(size=(*shape, S, 2)).astype(np.float32),
        "age": rng.integers(9, size=(*shape, S)).astype(np.int32),
        "head": HeadState(rng.normal(size=(*shape, 4)).astype(np.float32)),
    }
    make = KVCache.of if layers is None else blocks.in_layers
    plain = make(rows, -rows, position, np.full(B, 40, np.int32), state=state, positions="compact")
    paged = pack(pages, page_size)(plain)
    check_pages(paged, fewest=True)
    assert_same_tokens(plain, paged)
    assert int(paged.num_free) == pages - need
    assert paged.positions == "compact" and paged.next_position.tolist() == [40] * B
    assert paged.state["age"].dtype == jnp.int32
    np.testing.assert_array_equal(paged.state["head"].value, state["head"].value)


@functools.cache
def pack(pages: int, page_size: int, most: int = 9):
    return jax.jit(functools.partial(kvjax.pack, pages=pages, page_size=page_size, most=most))


def four_in_each_head() -> KVCache:
    position = np.broadcast_to(np.arange(4, dtype=np.int32), (B, 4))
    sizes = dict(batch=B, kv_heads=K, slots=4, head_dim=D)
    return jax.jit(lambda: kvjax.insert(KVCache.init(**sizes), *rows_of(0, position), position))()


def test_packing_into_too_few_pages_loses_tokens_and_shares_none():
    cache = four_in_each_head()
    paged = pack(5, 2, 4)(cache)
    check_pages(paged, fewest=True)
    assert nan_rows(paged) == [False, True]
    assert sum(map(len, content(paged).values())) == 10
    short = pack(9, 2, 2)(cache)
    check_pages(short, fewest=True)
    assert (np.asarray(num_live(short)) == 2).all() and nan_rows(short) == [True] * B


@pytest.mark.matrix  # outside jit each operation is a program
@pytest.mark.parametrize(
    ("sizes", "message"), [((5, 2, 4), "need 8 pages of 2 slots, but 5"), ((9, 2, 2), "most is 2, but a head holds 4")]
)
def test_packing_into_too_few_pages_is_refused_outside_jit(sizes, message):
    with pytest.raises(ValueError, match=message):
        pack.__wrapped__(*sizes).__wrapped__(four_in_each_head())


# Layers and bytes.


def test_a_layer_of_pages_is_a_plain_cache_and_so_is_one_head_of_it():
    shape = SHAPES[0]
    cache = put(shape)(shape.start(), np.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]], np.int32))
    layer = jax.jit(lambda cache: cache.layer(1))(cache)
    assert isinstance(layer, KVCache) and layer.num_slots == cache.num_slots
    assert (np.asarray(layer.position) >= 0).sum(-1).tolist() == [[5, 5], [2, 2]]
    arrays, whole = (jax.tree.map(np.asarray, x) for x in (layer, cache))
    np.testing.assert_array_equal(arrays.state["head"].value, whole.state["head"].value[1])
    assert (np.where(arrays.position >= 0, arrays.state["age"], 1) == 1).all()
    of_head = jax.jit(lambda cache, head: cache.layer(1, head))
    for head in range(K):
        one = of_head(cache, head)
        for name in ("key", "value", "position", "state"):
            for a, b in zip(*(jax.tree.leaves(getattr(x, name)) for x in (one, arrays)), strict=True):
                np.testing.assert_array_equal(a, np.asarray(b)[:, head : head + 1])


def test_a_donated_pool_is_updated_in_place():
    """An allocation that changes moves pages, not the cache."""
    cache = empty(batch=2, kv_heads=2, pages=64, page_size=8, most=96, head_dim=8, layers=2)

    def step(cache, key, value, scores):
        cache = kvjax.insert(cache, key, value, layer=jnp.int32(1))
        return kvjax.evict(cache, scores, 24, allocation="layer")

    rows, scores = np.ones((2, 1, 2, 8), np.float32), np.ones((64, 8), np.float32)
    program = jax.jit(step, donate_argnums=0).lower(cache, rows, rows, scores).compile()
    text = program.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text).group(1)
    aliased = {(int(out), int(into)) for out, into in re.findall(r"\{(\d+)\}: \((\d+), \{\}", aliases)}
    assert {(0, 0), (1, 1), (2, 2)} <= aliased  # key, value, position
    assert "f32[64,8,8]" in text
    assert not re.findall(r"f32\[64,8,8\]\S* copy\(.*", text)
