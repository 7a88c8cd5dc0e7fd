"""A mesh is entered once, around attention and eviction: each device does for its rows and heads what one would do."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from benchmarks.targets import executable
from kernels_pallas import select_attention
from kvjax._src.attention import attend_unchecked
from kvjax._src.border import OF_HEADS, OF_ROWS, OF_TOKENS, enter, implementation_for, on_mesh, split
from kvjax._src.cache import CACHE
from kvjax._src.layer import LayerBlock
from tests.kernels_pallas.targets import CALLS, DEVICES, tpu_topology
from tests.kvjax.blocks import empty
from tests.kvjax.test_paged import content
from tests.tiers import first, matrix, nightly

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; conftest.py forces them on a CPU")
B, K, N, T, D, BUDGET, BLOCKS = 2, 4, 8, 4, 8, 6, 3
SIZES = dict(batch=B, kv_heads=K, query_heads=N, head_dim=D, budget=BUDGET, block=T, page_size=2)
ONE_LAYER = """
h2o+caote tova h2o@layer(cap=1.5) h2o+sample h2o+merge snapkv(window=2)+caote h2o+match h2o+moments rkv(window=2)
h2o+cam tova(heads='group')+caote@layer sage h2o+chunks(size=2,heads='layer') streaming random
""".split()
TOGETHER = ["h2o@model", "h2o+merge@layer", "h2o@lava", "h2o@pyramid"]


@functools.cache
def mesh(data: int = 2, tensor: int = 4, names: tuple[str, ...] = ("data", "tensor"), **options) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), names, **options)


def rows(seed: int = 0, blocks: int = BLOCKS, batch: int = B) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(blocks, batch, T, heads, D)).astype(np.float32) for heads in (N, K, K)]


def fed(policy: str | None, **context):
    """Attend over three blocks, and once more over a single token of each row."""

    def run(cache, query, key, value):
        outs = []
        for block in zip(query, key, value, strict=True):
            out, cache = kvjax.attend(cache, *block, policy=policy, budget=policy and BUDGET)
            outs.append(out)
        one = (x[0][:, :1] for x in (query, value, key))
        promised = kvjax.Context(excess=1, **context)
        out, cache = kvjax.attend(cache, *one, policy=policy, budget=policy and BUDGET, context=promised)
        return jnp.concatenate([*outs, out], axis=1), cache

    return run


def put(mesh: Mesh, given: list[np.ndarray], *spec) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x in given]


close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5))


def entries(function, *given) -> int:
    """Count how often a program enters a mesh."""
    return str(jax.make_jaxpr(function)(*given)).count("shard_map[")


@pytest.mark.parametrize("policy", first(2, first(9, ONE_LAYER, rest=nightly)))
def test_devices_end_with_what_one_ends_with(policy):
    run, blocks = jax.jit(fed(policy)), rows()
    alone, cache = empty(policy, **SIZES), empty(policy, mesh=mesh(), **SIZES)
    (out, after), (wanted, expected) = run(cache, *blocks), run(alone, *blocks)
    close(out, wanted)
    assert after.axis is None and jax.tree.structure(after) == jax.tree.structure(cache)
    if cache.paged:  # tokens of a device are in pages of its own
        held, tokens = content(after.layer()), content(expected.layer())
        assert all(held[head].keys() == own.keys() for head, own in tokens.items())
        close(held, tokens)
    else:
        assert after.key.sharding.spec == cache.key.sharding.spec == OF_HEADS
        np.testing.assert_array_equal(after.position, expected.position)
        close(*(jax.tree.map(lambda x: np.asarray(x, np.float32), one) for one in (after, expected)))


@pytest.mark.parametrize("policy", first(1, TOGETHER))
def test_layers_that_are_evicted_from_together_keep_what_one_device_keeps(policy):
    """In slots, as after a whole prompt; a cache in pages is in test_split.py."""
    what, blocks = kvjax.parse(policy), rows(1)

    def run(cache, *blocks):
        evidence = kvjax.Evidence.of_layers(cache, what.allocation, merging=what.merging)
        for layer, block in enumerate(zip(*blocks, strict=True)):
            context = kvjax.Context(layer=layer)
            _, cache, said = kvjax.observe(cache, *block, policy=what, budget=2, context=context)
            evidence = evidence.with_layer(cache, layer, said)
        return kvjax.evict(cache, evidence, 2)

    def layer():
        state = what.state(B, K, N // K, T, D)
        return kvjax.KVCache.init(batch=B, kv_heads=K, slots=T, head_dim=D, state=state)

    start = lambda: kvjax.LayerCaches(tuple(layer() for _ in range(BLOCKS)))  # noqa: E731
    after = jax.jit(lambda *blocks: run(on_mesh(start(), mesh()), *blocks))(*blocks)
    expected = jax.jit(lambda *blocks: run(start(), *blocks))(*blocks)
    np.testing.assert_array_equal(after.position, expected.position)
    close(*([own.value for own in cache.layers] for cache in (after, expected)))
    assert after.axis is None and 0 < int(jnp.sum(after.num_live)) < BLOCKS * B * K * T


def test_several_policies_say_on_a_mesh_what_they_say_on_one_device():
    policies, block = [kvjax.parse("h2o"), kvjax.parse("tova"), kvjax.parse("snapkv(window=2)@layer")], rows(2, 1)

    def run(mesh, query, key, value):
        states = tuple(policy.state(B, K, N // K, T, D) for policy in policies)
        cache = kvjax.KVCache.init(batch=B, kv_heads=K, slots=T, head_dim=D, state=states)
        cache = cache if mesh is None else on_mesh(cache, mesh)
        budgets = [2, np.array([2, 3]), 3]
        out, cache, said = kvjax.observe_each(cache, query, key, value, policies=policies, budgets=budgets)
        return out, cache.state, [one.scores for one in said]

    given = [x[0] for x in block]
    found, wanted = (jax.jit(functools.partial(run, on))(*given) for on in (mesh(), None))
    close(found, wanted)
    assert entries(functools.partial(run, mesh()), *given) == 1


def test_chosen_slots_are_read_by_the_devices_that_hold_them():
    (query,), (key,), (value,) = rows(3, 1)
    cache = jax.jit(kvjax.insert)(empty(None, **SIZES | dict(budget=T)), key, value)
    slots = np.random.default_rng(0).integers(-1, T, (B, N, 3)).astype(np.int32)

    def read(cache, query, slots):
        given = (query, OF_TOKENS), (slots, OF_HEADS)
        return enter(cache, lambda own, q, s: select_attention(q, **own.entries, slots=s), *given, outputs=OF_TOKENS)

    placed = jax.jit(functools.partial(on_mesh, mesh=mesh()))(cache)
    np.testing.assert_allclose(
        jax.jit(read)(placed, query[:, :1], slots), jax.jit(read)(cache, query[:, :1], slots), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("policy", ["h2o+caote", "h2o@layer"])
def test_a_block_enters_once_and_what_is_inside_sees_one_device(policy):
    cache, block, seen = empty(policy, mesh=mesh(), **SIZES), [x[0] for x in rows()], []

    def looks(own):
        around = jax.sharding.get_abstract_mesh()
        seen.append((own.heads_shape, own.all_heads, own.axis, set(around.axis_types)))
        return own

    position = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def step(cache, *block):
        return attend_unchecked(cache, LayerBlock(*block), kvjax.parse(policy), BUDGET, kvjax.Context())

    assert entries(step, cache, *block, position) == 1
    jax.eval_shape(lambda cache: enter(cache, looks, outputs=CACHE), cache)
    assert seen == [((1, 1), K, "tensor", {AxisType.Manual})]


def test_no_border_is_inside_another():
    """In a shard_map of the caller's own the cache is one device's already; in the border, what is called runs."""
    cache, block, of_cache = empty("h2o", **SIZES), [x[0] for x in rows()], P(*OF_HEADS)

    def step(cache, *block):
        return kvjax.attend(dataclasses.replace(cache, axis="tensor"), *block, policy="h2o", budget=BUDGET)[0]

    specs = dataclasses.replace(jax.tree.map(lambda _: of_cache, cache), next_position=OF_ROWS)
    own = jax.shard_map(step, mesh=mesh(), in_specs=(specs, *(OF_TOKENS,) * 3), out_specs=OF_TOKENS, check_vma=False)
    assert entries(own, cache, *block) == 1
    expected, _ = jax.jit(functools.partial(kvjax.attend, policy="h2o", budget=BUDGET))(cache, *block)
    np.testing.assert_allclose(jax.jit(own)(cache, *block), expected, rtol=1e-4, atol=1e-5)


def test_values_made_on_the_way_know_their_mesh():
    shapes = []

    def function(x):
        shapes.append(x.shape)
        return x

    def program(x):
        step = lambda carry, _: (split(function, (2 * carry, OF_HEADS), outputs=OF_HEADS), None)  # noqa: E731
        return jax.lax.scan(step, x, length=2)[0]

    (x,) = put(mesh(), [np.ones((2, 4, 3))], *OF_HEADS)
    assert (np.asarray(jax.jit(program)(x)) == 4).all() and set(shapes) == {(1, 1, 3)}
    assert "all-gather" not in jax.jit(program).lower(x).compile().as_text()


def test_what_is_split_over_slots_is_brought_together():
    x = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
    (placed,) = put(mesh(1, 2), [x], None, None, "tensor")
    total = jax.jit(lambda x: split(lambda x: jnp.cumsum(x, -1), (x, OF_HEADS), outputs=OF_HEADS))(placed)
    np.testing.assert_allclose(total, np.cumsum(x, -1))


@pytest.mark.parametrize(
    ("on", "batch", "names"),
    [(mesh(2, 4), 3, ["tensor"]), (mesh(2, 4, ("x", "tensor")), 2, []), (mesh(1, 2), 2, ["tensor"])],
    ids=["rows that do not divide", "another mesh", "rows on one device"],
)
def test_an_axis_that_does_not_fit_splits_nothing(on, batch, names):
    """Along an axis that does not divide the rows all devices do the same; on another mesh XLA splits as it likes."""
    cache, block = empty("tova", **SIZES | dict(batch=batch)), [x[0] for x in rows(4, 1, batch)]
    step = functools.partial(kvjax.attend, policy="tova", budget=BUDGET)
    placed = put(on, block, None, None, "tensor")
    assert entries(step, cache, *placed) == len(names)
    close(*(jax.jit(step)(cache, *given) for given in (placed, block)))
    expected = "auto" if names else "reference"  # no kernel is left to XLA
    asked = []

    def inside(x):
        asked.append(implementation_for("auto", x))
        return x

    jax.eval_shape(lambda x: split(inside, (x, OF_TOKENS), outputs=OF_TOKENS), placed[0])
    assert asked == [expected] and implementation_for("auto", block[0]) == "auto"
    assert implementation_for("pallas_tpu", placed[0]) == "pallas_tpu"


def test_explicit_axes_are_refused():
    explicit, (_, key, value) = jax.make_mesh((2, 4), ("data", "tensor")), (x[0] for x in rows())
    cache = empty(None, **SIZES | dict(budget=T))
    specs = dataclasses.replace(jax.tree.map(lambda _: OF_HEADS, cache), next_position=OF_ROWS)
    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(explicit, spec)), cache, specs)
    with pytest.raises(ValueError, match="the mesh has explicit axes; expected automatic ones"):
        jax.eval_shape(kvjax.insert, placed, key, value)


def test_gradients_and_batches_of_caches_pass_the_border():
    cache, block = empty("h2o", **SIZES), [x[0] for x in rows(5)]
    placed = jax.jit(functools.partial(on_mesh, mesh=mesh()))(cache)
    loss = lambda cache, *block: jnp.sum(  # noqa: E731
        kvjax.attend(cache, *block, policy="h2o", budget=BUDGET)[0] ** 2
    )
    slopes = jax.jit(jax.grad(loss, (1, 2, 3)))
    for found, wanted in zip(slopes(placed, *block), slopes(cache, *block), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    several = [np.stack([x, 2 * x]) for x in block]
    each = jax.jit(jax.vmap(loss, (None, 0, 0, 0)))
    np.testing.assert_allclose(each(placed, *several), each(cache, *several), rtol=1e-4)


@matrix
def test_outside_jit_the_arrays_tell_the_mesh():
    cache, (_, key, value) = empty(None, **SIZES | dict(budget=T)), (x[0] for x in rows())
    placed = jax.jit(functools.partial(on_mesh, mesh=mesh()))(cache)
    after = kvjax.insert(placed, key, value)
    assert after.key.sharding.spec == OF_HEADS and after.axis is None
    np.testing.assert_array_equal(after.key, key.swapaxes(1, 2))


@matrix
@pytest.mark.parametrize("platform", CALLS)
def test_kernels_are_lowered_for_one_device(platform):
    """A kernel in a program for a mesh has the shapes of its own rows and heads; XLA is left none to split."""
    on = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, abstract_device=DEVICES[platform])
    sizes = dict(batch=B, kv_heads=K, query_heads=N, head_dim=128, budget=256, block=64)
    shapes = [jax.ShapeDtypeStruct((B, 64, heads, 128), jnp.bfloat16) for heads in (N, K, K)]
    cache = jax.eval_shape(lambda: kvjax.empty_cache("h2o+caote", dtype="bfloat16", **sizes))
    step = functools.partial(kvjax.attend, policy="h2o+caote", budget=256, context=kvjax.Context(excess=64))
    with jax.sharding.use_abstract_mesh(on):
        text = jax.jit(step).trace(cache, *shapes).lower(lowering_platforms=(platform,)).as_text()
    calls = [line for line in text.splitlines() if any(name in line for name in CALLS[platform])]
    values = [shape for line in calls for shape in re.findall(r"tensor<([\dx]*)x320x128xbf16>", line)]
    assert len(values) >= 3 and {shape.strip("1x") for shape in values} == {""}


@matrix
@pytest.mark.tpu
def test_each_tpu_chip_runs_the_kernels_on_its_own_rows_and_heads():
    on = Mesh(np.array(tpu_topology("v5e:2x4")).reshape(2, 4), ("data", "tensor"))
    sizes = dict(batch=2, kv_heads=8, query_heads=32, head_dim=128, budget=1000, block=16, dtype="bfloat16")

    def shape(heads):
        return jax.ShapeDtypeStruct((2, 16, heads, 128), jnp.bfloat16, sharding=NamedSharding(on, OF_TOKENS))

    def program(*block):
        cache = kvjax.empty_cache("h2o+caote", mesh=on, **sizes)
        return kvjax.attend(cache, *block, policy="h2o+caote", budget=1000)

    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        text = executable(jax.jit(program).lower(shape(32), shape(8), shape(8))).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "all-gather" not in text and "all-reduce" not in text
