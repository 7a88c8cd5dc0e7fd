"""Four devices: data = 2, tensor = 2. The same tokens, and an eviction without communication."""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
import models
from models import driver, engine, states, steps
from models.options import Options
from models.prompts import check_prompt
from models.sampling import Draws, Sampling
from tests.models.tiny import LONG, SETTINGS, assert_keeps, on_mesh, run
from tests.tiers import first

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")

LENGTHS = np.array([60, 37, 9, 31])
TOKENS = np.concatenate([LONG[:, :60], LONG[:1, 60:120]])


def mesh():
    return on_mesh().embedding[...].sharding.mesh


def place(array, *names):
    """Return an array's shape on the mesh: programs are compiled here and not run."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh(), P(*names)))


def collectives(compiled):
    """How many arrays each kind of collective exchanges (XLA may join two in one operation)."""
    names = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
    counts = Counter()
    for result, name in re.findall(rf"= (\(.*?\)|\S+) ({names})(?:-start)?\(", compiled.as_text()):
        counts[name] += result.count("[")
    return counts


def cache_on_mesh(policy=None):
    def empty():
        state = () if policy is None else policy.state(4, 2, 2, 24, 8)
        return kvjax.KVCache.init(batch=4, kv_heads=2, slots=24, head_dim=8, state=state)

    return jax.tree.map(lambda x: place(x, *("data", "tensor")[: x.ndim]), jax.eval_shape(empty))


def test_evicting_and_inserting_need_no_communication():
    cache = cache_on_mesh()
    scores = place(np.zeros((4, 2, 24), np.float32), "data", "tensor")
    rows = place(np.zeros((4, 8, 2, 8), np.float32), "data", None, "tensor")
    budgets = place(np.int32([16, 15, 14, 13]), "data")
    programs = {
        "evict": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, 16), donate_argnums=0),
        "evict, a budget a row": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, b), donate_argnums=0),
        "evict one": jax.jit(lambda c, s, r, b: kvjax.evict(c, s, 16, excess=1), donate_argnums=0),
        "insert": jax.jit(lambda c, s, r, b: kvjax.insert(c, r, r), donate_argnums=0),
        "compact": jax.jit(lambda c, s, r, b: kvjax.compact(c, 16)),
    }
    for name, program in programs.items():
        compiled = program.lower(cache, scores, rows, budgets).compile()
        assert not collectives(compiled), name
        assert compiled.output_shardings.position.spec == cache.position.sharding.spec, name


@pytest.mark.parametrize("name", first(1, ["h2o+caote", "snapkv(window=4)+fast_caote", "h2o+pool"]))
def test_a_block_of_one_layer_needs_no_communication(name):
    policy = kvjax.parse(name)
    cache = cache_on_mesh(policy=policy)
    query = place(np.zeros((4, 8, 4, 8), np.float32), "data", None, "tensor")
    rows = place(np.zeros((4, 8, 2, 8), np.float32), "data", None, "tensor")
    step = jax.jit(lambda c, q, r: kvjax.attend(c, q, r, r, policy=policy, budget=16))
    assert not collectives(step.lower(cache, query, rows).compile())


def compiled_step(policy):
    options = Options(policy, 16, 8, evict_every=1, reserve=8)
    run, sizes, _ = engine.prepare(on_mesh(), check_prompt(on_mesh(), TOKENS, LENGTHS, None), options)
    state = jax.jit(lambda: states.start(run, sizes, 4))()
    given = np.zeros(4, np.int32), np.zeros(4, bool), Draws(), steps.decode_phase(run.plan, 1), Sampling()
    return driver.token_step.lower(run, state, *given).compile()


@pytest.mark.parametrize(("policy", "of_the_policy"), first(1, [("h2o+caote", 0), ("tova", 1)]))
def test_a_decode_step_communicates_only_where_heads_and_vocabulary_meet(policy, of_the_policy):
    """A sum behind two layers' attention and feed-forward, and the embedding; then the best token out of all parts."""
    assert collectives(compiled_step(policy)) == {"all-reduce": 5 + 2 * of_the_policy, "all-gather": 2}


@pytest.mark.matrix
def test_heads_that_compete_over_a_mesh_keep_the_tokens_of_the_reference_in_the_next_turn_too():
    settings = dict(policy="laprox(window=4)", **SETTINGS)
    first_turn = models.prefill(on_mesh(), TOKENS[:, :20], **settings)
    cache, logits = models.prefill(on_mesh(), TOKENS[:, 20:28], cache=first_turn.cache, **settings)
    assert isinstance(cache, kvjax.SplitCache) and cache.parts.key.sharding.spec == P("data", "tensor")
    for row in range(4):
        expected = run(np.concatenate([TOKENS[row, :28]]), **settings | dict(question=0))
        np.testing.assert_allclose(np.asarray(logits)[row], expected.logits[-1], atol=1e-4)
        assert_keeps(cache, row, expected)


@pytest.mark.matrix
def test_a_decode_step_with_pages_gathers_neither_scores_nor_cache():
    found = collectives(compiled_step("h2o@layer"))
    assert found.keys() == {"all-reduce", "all-gather"} and found["all-gather"] == 2  # those of the model
    # The model; three bisections, whose first steps stand before their loops; a count before the second and the third.
    assert found["all-reduce"] == 5 + 2 * 3 + 2


@pytest.mark.matrix
def test_rows_come_and_go_on_a_mesh():
    serving = models.Engine(on_mesh(data=1), rows=2, policy="h2o@layer", **SETTINGS)
    prompts = [TOKENS[row, :length] for row, length in enumerate((60, 25, 40))]
    found = {serving.submit(prompt, max_new_tokens=5, end=()): [] for prompt in prompts}
    for made in serving.run():
        found[made.handle].append(made.token)
    assert list(found.values()) == [
        run(prompt, new_tokens=5, policy="h2o@layer", **SETTINGS).tokens for prompt in prompts
    ]
