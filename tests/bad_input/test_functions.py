"""Arrays, numbers and names that no function can use: each is refused in one sentence of ours."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
import kvjax
import models
from kvjax import allocation, sources
from tests.bad_input.campaign import refused
from tests.models import reference

pytestmark = pytest.mark.bad_input

NAN = float("nan")
SIZES = dict(batch=1, kv_heads=2, slots=8, head_dim=4)
BYTES = dict(layers=2, kv_heads=2, head_dim=4, budget=8)
A = np.full((2, 4), 0.25, np.float32)
V = np.ones((2, 4, 3), np.float32)
CONFIG = models.Config(48, 16, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
TOKENS = np.arange(40)[None]


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


@functools.cache
def cache(**changes: Any) -> kvjax.KVCache:
    return kvjax.KVCache.init(**(SIZES | changes))


@functools.cache
def model() -> models.Decoder:
    return reference.decoder(CONFIG)


def attend(cache_: Any = None, **changes: Any) -> Any:
    given: dict[str, Any] = dict(query=zeros(1, 2, 4, 4), key=zeros(1, 2, 2, 4), value=zeros(1, 2, 2, 4))
    given |= changes
    held, arrays = cache() if cache_ is None else cache_, [given.pop(name) for name in ("query", "key", "value")]
    return jax.eval_shape(lambda: kvjax.attend(held, *arrays, **given))  # refused before anything is compiled


def run(**changes: Any) -> Any:
    given: dict[str, Any] = dict(tokens=TOKENS) | changes
    return models.generate(model(), given.pop("tokens"), **given)


def of_shapes(function: Any, **given: Any) -> Any:
    """Return the function of what differs from ``given``; it is refused before anything is compiled."""
    return lambda **changes: jax.eval_shape(lambda: function(**(given | changes)))


POSITIONS = zeros(1, 2, 8, dtype=jnp.int32)
KEYS = dict(key=zeros(1, 2, 8, 4), value=zeros(1, 2, 8, 4), key_position=POSITIONS)
attention = of_shapes(
    kernels_pallas.cache_attention, query=zeros(1, 2, 4, 4), query_position=zeros(1, 2, dtype=jnp.int32), **KEYS
)
topk = of_shapes(
    kernels_pallas.caote_topk, weights=zeros(1, 2, 2, 8), value=zeros(1, 2, 8, 4), position=POSITIONS, budget=4
)
select = of_shapes(kvjax.select, importance=zeros(1, 2, 8), position=POSITIONS, budget=4)


SCORE = {
    "score: NaN weights": lambda: kvjax.score(np.full((2, 4), NAN), V),
    "score: weights of other length": lambda: kvjax.score(A[:, :3], V),
    "score: values without D": lambda: kvjax.score(A, A),
    "score: text": lambda: kvjax.score("weights", V),
    "score: complex values": lambda: kvjax.score(A, V.astype(np.complex64)),
    "score: no tokens": lambda: kvjax.score(A[:, :0], V[:, :0]),
    "score: a group that is missing": lambda: kvjax.score(A, V, group="exact"),
    "score: unknown group": lambda: kvjax.score(A[:, None], V, group="max"),
    "score: unknown norm": lambda: kvjax.score(A, V, norm=3),
    "score: a mask of other shape": lambda: kvjax.score(A, V, mask=np.ones((2, 3), bool)),
    "score: a projection and a plain norm": lambda: kvjax.score(A, V, projection=np.ones((1, 3, 5))),
    "score: a projection of other width": lambda: kvjax.score(
        A[:, None], V, group="exact", projection=np.ones((1, 4, 5))
    ),
    "score: cross without projection": lambda: kvjax.score(A, V, cross=False),
    "score: a projection without its parts": lambda: kvjax.score(
        A[:, None], V, group="exact", projection=kvjax.OutputProjection()
    ),
}
CACHE = {
    **{
        f"KVCache.init: {name}={value!r}": functools.partial(
            lambda given: kvjax.KVCache.init(**given), SIZES | {name: value}
        )
        for name, value in [
            ("kv_heads", -1), ("slots", 0), ("slots", 2.5), ("slots", None), ("slots", True), ("slots", 10**12),
            ("layers", 0), ("positions", "relative"), ("dtype", "float7"), ("dtype", "int32"), ("dtype", "int8/int4"),
            ("dtype", ("int8", "int8", "int8")), ("dtype", object),
        ]
    },
    "insert: keys of other heads": lambda: kvjax.insert(cache(), zeros(1, 2, 3, 4), zeros(1, 2, 3, 4)),
    "insert: values of other length": lambda: kvjax.insert(cache(), zeros(1, 2, 2, 4), zeros(1, 3, 2, 4)),
    "insert: keys without batch": lambda: kvjax.insert(cache(), zeros(2, 2, 4), zeros(2, 2, 4)),
    "insert: more than fits": lambda: kvjax.insert(cache(), zeros(1, 9, 2, 4), zeros(1, 9, 2, 4)),
    "insert: no such layer": lambda: kvjax.insert(cache(layers=2), zeros(1, 2, 2, 4), zeros(1, 2, 2, 4), layer=2),
    "insert: a layer is missing": lambda: kvjax.insert(cache(layers=2), zeros(1, 2, 2, 4), zeros(1, 2, 2, 4)),
    "insert: a layer of none": lambda: kvjax.insert(cache(), zeros(1, 2, 2, 4), zeros(1, 2, 2, 4), layer=0),
    "insert: positions of other length": lambda: kvjax.insert(
        cache(), zeros(1, 2, 2, 4), zeros(1, 2, 2, 4), zeros(1, 3, dtype=jnp.int32)
    ),
    "insert: positions that are fractions": lambda: kvjax.insert(
        cache(), zeros(1, 2, 2, 4), zeros(1, 2, 2, 4), zeros(1, 2)
    ),
    "insert: not a cache": lambda: kvjax.insert({}, zeros(1, 2, 2, 4), zeros(1, 2, 2, 4)),
    "compact: no slots": lambda: kvjax.compact(cache(), 0),
    "compact: half a slot": lambda: kvjax.compact(cache(), 2.5),
    "evict: scores of other shape": lambda: kvjax.evict(cache(), zeros(1, 2, 7), 4),
    "evict: not a cache": lambda: kvjax.evict([], zeros(1, 2, 8), 4),
    "evict: complex scores": lambda: kvjax.evict(cache(), zeros(1, 2, 8, dtype=jnp.complex64), 4),
    **{
        f"evict: budget {budget!r}": functools.partial(
            lambda budget: kvjax.evict(cache(), zeros(1, 2, 8), budget), budget
        )
        for budget in (0, -1, 0.5, NAN, "4", None, [4], True, np.int64(0), np.int64(-3), np.array([0]), np.float32(4))
    },
    "evict: a traced count": lambda: jax.jit(lambda n: kvjax.compact(cache(), n))(4),
    "evict: half an excess": lambda: jax.eval_shape(lambda: kvjax.evict(cache(), zeros(1, 2, 8), 4, excess=0.5)),
    "evict: budgets of other rows": lambda: kvjax.evict(cache(), zeros(1, 2, 8), np.array([1, 2])),
    "evict: unknown allocation": lambda: kvjax.evict(cache(), zeros(1, 2, 8), 4, allocation="fair"),
    "evict: no such layer": lambda: kvjax.evict(cache(layers=2), zeros(1, 2, 8), 4, layer=5),
    "evict: a layer of none": lambda: kvjax.evict(cache(), zeros(1, 2, 8), 4, layer=0),
    "keep_mask: scores of other shape": lambda: kvjax.keep_mask(zeros(2, 7), zeros(2, 8, dtype=jnp.int32), 4),
    **{
        f"memory: {name}={value!r}": functools.partial(lambda given: kvjax.memory(**given), BYTES | {name: value})
        for name, value in [
            ("layers", 0), ("budget", -1), ("budget", 0.5), ("budget", "many"), ("block", -1), ("block", NAN),
            ("policy", "h2oo"), ("policy", 7), ("query_heads", 3), ("query_heads", 0), ("dtype", "float7"),
            ("dtype", ("int8", 7)), ("page_size", 0), ("policy", "snapkv"),
        ]
    },
    "pages_for: no page size": lambda: kvjax.pages_for(8, 2, 0),
}  # fmt: skip
POLICIES = {
    f"parse: {name!r}": functools.partial(kvjax.parse, name)  # type: ignore[arg-type]
    for name in (
        "", " ", "h2oo", "h2o+", "+h2o", "h2o+(", "h2o()()", "h2o(1)", "h2o(x=1)", "h2o(accumulate=open)", "caote",
        "h2o+tova", "key_norm+caote", "h2o@", "h2o@modle", "@layer", "h2o@layer@model", "h2o@layer(cap=0)",
        "h2o@adakv(safeguard=nan)", "snapkv(window=0)", "snapkv(window=-1)", "snapkv(window=2.5)", "snapkv(kernel=2)",
        "snapkv(pooling='mean')", "snapkv(16)", "h2o+fast_caote(1)", "laprox(target='x')", "laprox(gqa=1)",
        "tova(heads='all')",
        "sage(split='no')", "cake(gamma=-1)", "cake(gamma=1e999)", "cake(window=1)", "lava(window=None)",
        "random(seed=-1)", "random(seed=0.5)", "butler(dim=0)", "expected_attention(future=0)", "streaming(sinks=-1)",
        "h2o+protect(recent=1.5)", "h2o+protect(sinks=-1)", "h2o+protect(recent='x')", "h2o+caote(norm=3)",
        "h2o+caote(group='x')", "h2o+caote(target='x')",
        "h2o+pool(kernel=0)", "h2o+critical(safe=2)", "h2o+critical(epsilon=-1)", "h2o+positions(kind='x')",
        "h2o\x00", "h2o+" * 3000, "(" * 5000, "__import__('os')", "h2o.__class__", "h2o if 1 else tova", "снап", None,
        3, b"h2o", "h2o" + "+pool" * 20_000,
    )
} | {
    f"parse_source: {name!r}": functools.partial(kvjax.parse_source, name)  # type: ignore[arg-type]
    for name in (
        "", "oracel", "quest(page_size=0)", "quest(page_size='x')", "random(seed=-1)", "oracle(1)", "((", None, 3,
    )
}  # fmt: skip
POLICIES |= {
    "chain: nothing": lambda: kvjax.chain(),
    "chain: a list of links": lambda: kvjax.chain([kvjax.h2o(), kvjax.caote()]),
    "chain: names in place of links": lambda: kvjax.chain("h2o", "caote"),
    "chain: a link that is none": lambda: kvjax.chain(kvjax.h2o(), None),
    "allocation: unknown cap": lambda: allocation.layer(cap="x"),
    "allocation: a policy at a number": lambda: kvjax.h2o() @ 3,
    "base_score: a window below 0": lambda: kvjax.base_score("mine", lambda o: o, window=-1),
    "base_score: unknown statistics": lambda: kvjax.base_score("mine", lambda o: o, statistics=("median",)),
    "check_budget: 0": lambda: kvjax.check_budget(kvjax.h2o(), 0),
    "check_block: 0": lambda: kvjax.check_block(kvjax.snapkv(), 0),
    "fit_predictor: 0": lambda: kvjax.fit_predictor(kvjax.butler(), 0),
    "source: a page that is a float": lambda: sources.quest(page_size=1.5),
    "output_projection: unknown kind": lambda: kvjax.output_projection(zeros(4, 4, 8), 2, ["norm"]),
    "output_projection: heads not divided": lambda: kvjax.output_projection(zeros(4, 4, 8), 3, ["gram"]),
    "output_projection: a flat matrix": lambda: kvjax.output_projection(zeros(4, 4), 2, ["gram"]),
    "rewind: not a cache": lambda: kvjax.rewind("x", [2]),
    "rewind: positions of other rows": lambda: kvjax.rewind(cache(), [2, 2]),
    "rewind: a fraction": lambda: kvjax.rewind(cache(), 2.5),
    "rotate: an odd head": lambda: kvjax.rotate(zeros(3), zeros(1), zeros(1)),
    "rotate: angles of other length": lambda: kvjax.rotate(zeros(4), zeros(3), zeros(3)),
    "turn: frequencies of other length": lambda: kvjax.turn(zeros(4), jnp.ones(()), zeros(3)),
}
ATTEND = {
    "select: importance without heads": lambda: select(importance=zeros(1, 8)),
    "select: slots of other length": lambda: select(importance=zeros(1, 2, 7)),
    "select: heads not divided": lambda: select(importance=zeros(1, 3, 8)),
    **{
        f"select: budget {budget!r}": functools.partial(select, budget=budget)
        for budget in (0, -1, 0.0, 1.5, NAN, "4", None, [4], True, np.int64(0), np.float32(1.5), np.array([0.5]))
    },
    "select: negative sinks": lambda: select(sinks=-1),
    "select: too small a size": lambda: select(size=2),
    "select: an array without size": lambda: select(budget=np.array([4])),
    "selected_mask: sequences without positions": lambda: kvjax.selected_mask(
        zeros(1, 2, 3, 8), zeros(1, 2, 8, dtype=jnp.int32), 4
    ),
    "cache_attention: heads not divided": lambda: attention(query=zeros(1, 2, 3, 4)),
    "cache_attention: other D": lambda: attention(query=zeros(1, 2, 4, 5)),
    "cache_attention: unknown statistics": lambda: attention(statistics=("median",)),
    "cache_attention: unknown implementation": lambda: attention(implementation="fastest"),
    "cache_attention: a negative window": lambda: attention(statistics=("window_mean",), window=-1),
    "cache_attention: positions of other length": lambda: attention(key_position=zeros(1, 2, 7, dtype=jnp.int32)),
    "cache_attention: no such layer": lambda: attention(layer=0),
    "caote_topk: weights of other length": lambda: topk(weights=zeros(1, 2, 2, 7)),
    "caote_topk: unknown norm": lambda: topk(norm=5),
    "caote_topk: unknown group": lambda: topk(group="max"),
    "caote_topk: budget 0": lambda: topk(budget=0),
    "caote_topk: unknown implementation": lambda: topk(implementation="fastest"),
}
GENERATE = {
    **{
        f"generate: {name}={value!r}": functools.partial(run, **{name: value})
        for name, value in [
            ("tokens", "text"), ("tokens", [[]]), ("tokens", [[1.5]]), ("tokens", [[1], [1, 2]]), ("tokens", [[48]]),
            ("tokens", [[-1]]), ("tokens", None), ("tokens", [1, 2]), ("tokens", [["a"]]),
            ("tokens", np.zeros((1, 2, 3), int)), ("lengths", [0]), ("lengths", [41]), ("lengths", [1, 2]),
            ("lengths", [1.5]), ("lengths", "all"), ("policy", 3), ("policy", "full+caote"), ("budget", 16),
            ("block", 0), ("block", 2.5), ("block", None), ("max_new_tokens", 0), ("max_new_tokens", 2.5),
            ("max_new_tokens", 10**12), ("max_new_tokens", np.int64(0)), ("max_new_tokens", True), ("when", "later"),
            ("evict_every", 0), ("evict_every", 1.5), ("evict_every", 10**12), ("temperature", True),
            ("temperature", -1.0), ("temperature", NAN), ("temperature", "hot"), ("top_k", True), ("top_k", 0),
            ("top_k", 1.5), ("top_p", True), ("top_p", 0.0), ("top_p", np.float32(1.5)), ("question", 40),
            ("question", -1), ("question", 0.5), ("select", "oracel"), ("select", "oracle"), ("select", 3),
            ("networks", "folder"), ("end", 5), ("end", ("x",)), ("end", (True,)), ("end", (10**12,)), ("page_size", 0),
            ("key", 3), ("projection", 3),
        ]
    },
    **{
        f"generate: h2o, {name}={value!r}": functools.partial(run, **({"policy": "h2o", "budget": 16} | {name: value}))
        for name, value in [
            ("budget", 0), ("budget", 0.0), ("budget", 1.5), ("budget", NAN), ("budget", "16"), ("budget", None),
            ("budget", [16]), ("budget", 10**12), ("budget", np.int64(0)), ("budget", True),
            ("budget", np.float32(1.5)), ("select", "oracle"), ("page_size", 2.5), ("policy", "butler"),
            ("policy", "snapkv"),
        ]
    },
    **{
        f"generate: oracle, {name}={value!r}": functools.partial(
            run, **({"select": "oracle", "budget": 16} | {name: value})
        )
        for name, value in [
            ("budget", 0), ("budget", 1.5), ("budget", "16"), ("budget", 10**9), ("sinks", -1), ("sinks", 1.5),
            ("sinks", True), ("sinks", None), ("select", "butler"),
        ]
    },
    "prefill: unknown outputs": lambda: models.prefill(model(), TOKENS, outputs="some"),
    "prefill: a negative reserve": lambda: models.prefill(model(), TOKENS, reserve=-1),
    "generate: no model": lambda: models.generate(None, TOKENS),
    "output_projection: unknown policy": lambda: models.output_projection(model(), "laproxx"),
    "parse_mesh: nothing": lambda: models.parse_mesh("data=0"),
    "parse_mesh: a thousand": lambda: models.parse_mesh("data=1000"),
    "parse_mesh: twice": lambda: models.parse_mesh("data=1,data=2"),
    "butler_input: unknown source": lambda: models.butler_input(model(), TOKENS, source="layer9"),
    **{
        f"Config: {name}={value!r}": functools.partial(
            lambda given: models.Config(**given),
            dict(vocab_size=48, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
            | {name: value},
        )
        for name, value in [
            ("num_heads", 0), ("num_kv_heads", 0), ("num_kv_heads", 3), ("num_layers", -1), ("head_dim", 3),
            ("sliding_windows", (4, 4)), ("hidden_size", 0), ("hidden_size", "16"), ("vocab_size", -1),
            ("vocab_size", None), ("tie_embeddings", "false"), ("norm_epsilon", NAN), ("eos", 3), ("rope", None),
        ]
    },
}  # fmt: skip
ATTENDING = {
    "attend: keys of other heads": lambda: attend(key=zeros(1, 2, 3, 4), value=zeros(1, 2, 3, 4)),
    "attend: queries of other D": lambda: attend(query=zeros(1, 2, 4, 5)),
    "attend: heads not divided": lambda: attend(query=zeros(1, 2, 3, 4)),
    "attend: a policy without budget": lambda: attend(policy=kvjax.h2o()),
    "attend: a state of another policy": lambda: attend(policy=kvjax.h2o(), budget=4),
    "attend: unknown implementation": lambda: attend(context=kvjax.Context(implementation="fastest")),
    "attend: more than fits": lambda: kvjax.attend(  # told by how full the cache is, which tracing does not know
        cache(), zeros(1, 9, 4, 4), zeros(1, 9, 2, 4), zeros(1, 9, 2, 4)
    ),
}
CASES = SCORE | CACHE | POLICIES | ATTEND | GENERATE | ATTENDING


@pytest.mark.parametrize("call", CASES.values(), ids=[name[:60] for name in CASES])
def test_is_refused_in_one_sentence(call):
    assert refused(call)


SLIPS = {
    "write snapkv(window=16).": lambda: kvjax.parse("snapkv(16)"),
    "write quest(page_size=16).": lambda: kvjax.parse_source("quest(16)"),
    "empty_cache() takes no argument 'kv_head'. Did you mean 'kv_heads'?": lambda: kvjax.empty_cache(
        "h2o", budget=4, kv_head=8, head_dim=4
    ),
    "give a list of rows, such as [tokens].": lambda: run(tokens=[1, 2, 3]),
    "the prompt is empty (tokens (0,))": lambda: run(tokens=[]),
    "the prompt is empty (tokens (1, 0))": lambda: run(tokens=[[]]),
    "of the old kind (jax.random.PRNGKey); give": lambda: run(key=jax.random.PRNGKey(0), max_new_tokens=4),
}


@pytest.mark.parametrize("sentence", SLIPS)
def test_a_likely_slip_is_told_what_to_write(sentence):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        SLIPS[sentence]()


def test_lists_and_single_names_will_do():
    """Of shapes alone, so that nothing is compiled."""
    rows = np.ones((1, 2, 2, 4)).tolist()

    def given() -> Any:
        held = kvjax.insert(cache(), rows, rows, position=[[0, 1]])
        _, held = kvjax.attend(held, rows, rows, rows)
        chosen = kvjax.select([[[1.0, 2.0]]], [[[0, 1]]], 1), kvjax.keep_mask([1.0, 2.0], [0, 1], 1)
        gram = kvjax.output_projection(jnp.ones((4, 3, 16)), 2, "gram")
        return kvjax.rewind(held, 2), chosen, kvjax.score(A, V, mask=[[True] * 4] * 2), gram

    held, *_, gram = jax.eval_shape(given)
    assert held.next_position.shape == (1,) and (gram.gram.shape, gram.weight) == ((2, 2, 3, 3), None)
