"""Eight devices: data = 2, tensor = 4. The same tokens, and an eviction without communication."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import models
from models import Config, Decoder, engine, states, steps
from models.parameters import partition
from models.plan import Options, check_prompt
from models.sampling import Sampling
from tests.models import reference

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; conftest.py forces them on a CPU")

CONFIG = Config(48, 32, 48, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8)
WEIGHTS = reference.parameters(CONFIG)
LENGTHS = np.array([100, 64, 31, 90])
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 100))


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))


def sharded_model():
    return Decoder(
        CONFIG, {n: jax.device_put(a, NamedSharding(mesh(), partition(n, mesh()))) for n, a in WEIGHTS.items()}
    )


def place(array, *names):
    return jax.device_put(array, NamedSharding(mesh(), P(*names)))


def collectives(compiled):
    """How many arrays each kind of collective exchanges (XLA may join two in one operation)."""
    names = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
    counts = Counter()
    for result, name in re.findall(rf"= (\(.*?\)|\S+) ({names})(?:-start)?\(", compiled.as_text()):
        counts[name] += result.count("[")
    return counts


@pytest.mark.parametrize("policy", ["h2o+caote", "tova+protect(sinks=2,recent=0.25)"])
def test_a_mesh_gives_the_tokens_and_keeps_the_tokens_of_one_device(policy):
    settings = dict(lengths=LENGTHS, policy=policy, budget=16, block=8, max_new_tokens=10, end=(3, 7, 20))
    one = models.generate(reference.decoder(CONFIG, WEIGHTS), TOKENS, **settings)
    many = models.generate(sharded_model(), TOKENS, **settings)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_array_equal(many.lengths, one.lengths)
    np.testing.assert_array_equal(np.sort(many.cache.position), np.sort(one.cache.position))
    assert many.cache.key.sharding.spec == P(None, "data", "tensor")
    assert many.cache.key.addressable_shards[0].data.shape == (2, 2, 1, 24, 8)


def test_a_streamed_answer_on_a_mesh_is_that_of_one_device():
    settings = dict(lengths=LENGTHS, policy="h2o", budget=0.3, block=16, max_new_tokens=6, end=(), evict_every=0)
    one, many = (
        [token.tolist() for token, _ in models.stream(model, TOKENS, **settings)]
        for model in (reference.decoder(CONFIG, WEIGHTS), sharded_model())
    )
    assert many == one


def cache_on_mesh(layers=None, state=()):
    cache = kvjax.KVCache.init(batch=4, kv_heads=4, slots=24, head_dim=8, layers=layers, state=state)
    front = () if layers is None else (None,)
    put = {1: lambda x: place(x, "data")}
    return jax.tree.map(lambda x: put.get(x.ndim, lambda y: place(y, *front, "data", "tensor"))(x), cache)


@pytest.mark.parametrize("layers", [None, 3])
def test_evicting_and_inserting_need_no_communication(layers):
    cache, layer = cache_on_mesh(layers), None if layers is None else 1
    scores = place(jnp.zeros((4, 4, 24)), "data", "tensor")
    rows = place(jnp.zeros((4, 8, 4, 8)), "data", None, "tensor")
    budgets = place(jnp.array([16, 15, 14, 13]), "data")
    programs = {
        "evict": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, 16, layer=layer), donate_argnums=0),
        "evict, a budget a row": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, b, layer=layer), donate_argnums=0),
        "evict one": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, 16, layer=layer, excess=1), donate_argnums=0),
        "insert": jax.jit(lambda c, s, r, b: kvjax.insert(c, r, r, layer=layer), donate_argnums=0),
        "compact": jax.jit(lambda c, s, r, b: kvjax.compact(c, 16)),
    }
    for name, program in programs.items():
        compiled = program.lower(cache, scores, rows, budgets).compile()
        assert not collectives(compiled), name
        assert compiled.output_shardings.position.spec == cache.position.sharding.spec, name


@pytest.mark.parametrize("name", ["h2o+caote", "snapkv(window=4)+fast_caote", "key_norm", "random", "h2o+pool"])
def test_a_block_of_one_layer_needs_no_communication(name):
    policy = kvjax.parse(name)
    cache = cache_on_mesh(state=policy.state(4, 4, 2, 24, 8))
    query = place(jnp.zeros((4, 8, 8, 8)), "data", None, "tensor")
    rows = place(jnp.zeros((4, 8, 4, 8)), "data", None, "tensor")
    step = jax.jit(lambda c, q, r: kvjax.attend(c, q, r, r, policy=policy, budget=16))
    assert not collectives(step.lower(cache, query, rows).compile())


@pytest.mark.parametrize(("policy", "of_the_policy"), [("h2o+caote", 0), ("tova", 1)])
def test_a_decode_step_communicates_only_where_heads_and_vocabulary_meet(policy, of_the_policy):
    """A sum behind the attention, the feed-forward and the embedding each; then the best token out of all parts."""
    options = Options(policy, 16, 8, evict_every=1, reserve=8)
    run, _ = engine.prepare(sharded_model(), check_prompt(sharded_model(), TOKENS, LENGTHS, None), options, None, None)
    state = jax.jit(lambda: states.start(run, 4))()
    step = engine.token_step.lower(
        run, state, jnp.zeros(4, jnp.int32), jnp.zeros(4, bool), None, steps.decode_phase(run.plan, 1), Sampling()
    )
    assert collectives(step.compile()) == {"all-reduce": 3 + of_the_policy, "all-gather": 2}


def kept(cache):
    """The positions that each head holds, [L][B][K]."""
    layers = [np.asarray(cache.layer(layer).position) for layer in range(CONFIG.num_layers)]
    return [[[sorted(head[head >= 0].tolist()) for head in row] for row in layer] for layer in layers]


@pytest.mark.parametrize(
    ("policy", "when"), [("laprox(window=4)@model", "block"), ("snapkv(window=4)+caote@adakv", "prompt")]
)
def test_heads_that_compete_over_a_mesh_keep_the_tokens_of_one_device_in_the_next_turn_too(policy, when):
    settings = dict(policy=policy, budget=16, block=8, when=when)
    answers = []
    for model in (reference.decoder(CONFIG, WEIGHTS), sharded_model()):
        out = models.generate(model, TOKENS, lengths=LENGTHS, max_new_tokens=6, end=(), **settings)
        more = models.prefill(model, TOKENS[:, :20], cache=out.cache, **settings)
        answers.append((out.tokens, kept(out.cache), kept(more.cache), more.logits, more.cache))
    one, many = answers
    np.testing.assert_array_equal(many[0], one[0])
    assert many[1:3] == one[1:3]
    np.testing.assert_allclose(many[3], one[3], atol=1e-5)
    assert isinstance(many[4], kvjax.SplitCache) and many[4].parts.key.sharding.spec == P("data", "tensor")
    assert len({len(head) for layer in many[2] for row in layer for head in row}) > 1


def test_a_decode_step_with_pages_gathers_neither_scores_nor_cache():
    options = Options("h2o@layer", 16, 8, evict_every=1, reserve=8)
    run, _ = engine.prepare(sharded_model(), check_prompt(sharded_model(), TOKENS, LENGTHS, None), options, None, None)
    state = jax.jit(lambda: states.start(run, 4))()
    step = engine.token_step.lower(
        run, state, jnp.zeros(4, jnp.int32), jnp.zeros(4, bool), None, steps.decode_phase(run.plan, 1), Sampling()
    )
    found = collectives(step.compile())
    assert found.keys() == {"all-reduce", "all-gather"} and found["all-gather"] == 2  # those of the model
    assert found["all-reduce"] == 3 + 5  # three bisections, and a count before the second and the third


def test_pages_go_on_only_on_the_devices_that_they_are_on():
    settings = dict(policy="h2o@layer", budget=16, block=8)
    cache = models.prefill(reference.decoder(CONFIG, WEIGHTS), TOKENS, **settings).cache
    with pytest.raises(ValueError, match="on one device, but the model is on a mesh with data=2 and tensor=4"):
        models.prefill(sharded_model(), TOKENS[:, :8], cache=cache, **settings)


def test_rows_come_and_go_on_a_mesh_as_on_one_device():
    devices = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
    parts = {n: jax.device_put(a, NamedSharding(devices, partition(n, devices))) for n, a in WEIGHTS.items()}
    answers = []
    for model in (reference.decoder(CONFIG, WEIGHTS), Decoder(CONFIG, parts)):
        serving = models.Engine(model, rows=2, policy="h2o@layer", budget=16, block=8)
        for row, length in enumerate((60, 25, 40)):
            serving.submit(TOKENS[row, :length], max_new_tokens=5, end=())
        answers.append([(made.handle, made.token) for made in serving.run()])
    assert answers[1] == answers[0] and len(answers[0]) == 15
