"""Selection in generate and stream: what each step reads against a brute-force reading of the rules, row by row."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from kvjax.schedule import Phase
from models import Butler, ButlerConfig, Config, by_layer, engine, layer_caches, selecting, states, steps
from models.butler import parameter_shapes as butler_shapes
from models.plan import Options, check_prompt
from models.sampling import Sampling
from tests.models import reference, tiny
from tests.models.test_engine_compiled import COMPILED
from tests.models.tiny import streamed, tiered

V = 64
CONFIG = Config(V, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, sliding_windows=(None, None, 21))
PROMPT, STEPS = 37, 6
TOKENS = np.random.default_rng(0).integers(0, V, (1, PROMPT + STEPS))
SOURCES = ["butler", "oracle", "quest(page_size=4)", "first_layer", "previous_layer", "random(seed=3)", "streaming"]
SOURCES += ["butler(group='max')"]


weights = functools.partial(tiny.weights, CONFIG)
decoder = functools.partial(tiny.decoder, CONFIG)


@functools.cache
def predictor(source="layer0_output"):
    config = ButlerConfig(32, num_layers=3, num_heads=4, hidden=16, dim=4, source=source)
    random = np.random.default_rng(1)
    shapes = butler_shapes(config)
    drawn = {name: random.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return Butler(config, jax.device_put(drawn))


def butler_for(select, source="layer0_output"):
    return predictor(source) if select.startswith("butler") else None


def prepared(model, tokens, select, budget, *, block=16, sinks=4, butler=None, answer=STEPS):
    """What a run that selects is made of, and its prompt in blocks."""
    options = Options(None, budget, block, evict_every=1, select=select, sinks=sinks, reserve=answer)
    return engine.prepare(model, check_prompt(model, tokens, None, None), options, None, butler)


@functools.cache
def forced(select, budget, *, sinks=2, block=16, source="layer0_output", way=engine.ProgramSteps):
    """Logits of a row's last prompt token and of its steps, which are told what to read next; and the slots read."""
    model, read = decoder(), {}
    butler = butler_for(select, source)
    run, prompt = prepared(model, TOKENS[:, :PROMPT], select, budget, block=block, sinks=sinks, butler=butler)
    (tokens, positions, _), feed = next(prompt.text).arrays, way(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selecting, "_chosen", functools.partial(_recorded, read, selecting._chosen))
        for module, program, static in ((engine, "block_step", 4), (by_layer, "_run_layer", (0, 1, 2))):
            patch.setattr(module, program, traced_anew(getattr(module, program), static))
        state, logits = feed.start(1), []
        for number in range(-(-PROMPT // block)):
            hidden, state = feed.block(state, tokens[number], positions[number], Phase(evicts=False))
        logits.append(model.logits(hidden[:, -1]))
        for number in range(PROMPT, PROMPT + STEPS):
            read[number] = {}
            token, position = TOKENS[:, number : number + 1], np.array([[number]], np.int32)
            hidden, state = feed.block(state, token, position, steps.decode_phase(run.plan, 1))
            logits.append(model.logits(hidden[:, 0]))
            jax.effects_barrier()
    return np.concatenate(logits), read


def traced_anew(program, static):
    """A program as another one, which knows of no trace of the first."""
    return jax.jit(lambda *given: program.__wrapped__(*given), static_argnums=static)


def _recorded(read, choose, selection, cache, memory, carry, query, position, context):
    def note(slots, layer):
        of_heads = np.repeat(slots[0], CONFIG.num_heads // slots.shape[1], axis=0)  # a group may choose together
        read[max(read)][int(layer)] = [set(row[row >= 0].tolist()) for row in of_heads]

    slots = choose(selection, cache, memory, carry, query, position, context)
    jax.debug.callback(note, slots, context.layer)
    return slots


def brute_force(importance, budget, sinks):
    """The whole sequence at once in float64: rows of steps see, in all layers but the first, what the rule says."""
    w = {name: np.asarray(array, np.float64) for name, array in weights().items()}
    tokens, P, N, K, D = TOKENS[0], PROMPT + STEPS, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    (frequency, _), at = reference.inverse_frequencies(CONFIG, P), np.arange(P)
    x, seen_logits, read, first_output = w["embedding"][tokens], [], {t: {} for t in range(PROMPT, P)}, None
    for layer in range(CONFIG.num_layers):
        p = {name.removeprefix("layers."): a[layer] for name, a in w.items() if name.startswith("layers.")}
        y = reference.norm(x, p["attention_norm"], CONFIG.norm_epsilon)
        query, key, value = (np.einsum("te,ehd->htd", y, p[name]) for name in ("query", "key", "value"))
        query, key = (reference.rope(z, at, frequency) for z in (query, key))
        key, value = (np.repeat(z, N // K, axis=0) for z in (key, value))
        true = np.einsum("ntd,npd->ntp", query, key) / math.sqrt(D)
        seen_logits.append(true)
        visible = at <= at[:, None]
        if CONFIG.sliding_windows[layer]:
            visible &= at > at[:, None] - CONFIG.sliding_windows[layer]
        visible = np.repeat(visible[None], N, axis=0)
        for t in range(PROMPT, P) if layer else ():
            wanted = importance(layer, t, query[:, t], key[:, : t + 1], seen_logits, first_output)
            read[t][layer] = [chosen(wanted[n], visible[n, t, : t + 1], budget, sinks) for n in range(N)]
            for n in range(N):
                visible[n, t] = np.isin(at, list(read[t][layer][n]))
        attention = reference.softmax(np.where(visible, true, -np.inf))
        x = x + np.einsum("ntp,npd,nde->te", attention, value, p["output"])
        y = reference.norm(x, p["feed_norm"], CONFIG.norm_epsilon)
        gate, up = y @ p["gate"], y @ p["up"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
        first_output = x if layer == 0 else first_output
    return reference.norm(x, w["norm"], CONFIG.norm_epsilon) @ w["head"], read


def chosen(wanted, visible, budget, sinks):
    """The visible tokens of the largest importance, newer ones first among equals, and the first ones."""
    tokens = np.flatnonzero(visible)
    count = math.ceil(round(budget * len(tokens), 6)) if isinstance(budget, float) else budget
    best = sorted(tokens, key=lambda p: (wanted[p], p), reverse=True)[:count]
    return {int(p) for p in best} | {int(p) for p in tokens if p < sinks}


@functools.cache
def foreseen(source="layer0_output"):
    """Importance logits of the predictor, [layer, N, query, key], run on the whole sequence at once."""
    said = jax.jit(lambda tokens: predictor(source)(models.butler_input(decoder(), tokens, source=source)))(TOKENS)
    query, key = np.asarray(said.query), np.asarray(said.key)
    return np.einsum("lbtnd,lbsnd->lbnts", query, key)[:, 0] / math.sqrt(query.shape[-1])


def bounds(query, key, size):
    """Quest: a page's bound, for each of its tokens."""
    tokens = key.shape[1]
    rows = np.empty((len(query), tokens))
    for start in range(0, tokens, size):
        page = key[:, start : start + size]
        largest = np.maximum(query * page.min(axis=1), query * page.max(axis=1))
        rows[:, start : start + size] = largest.sum(axis=-1, keepdims=True)
    return rows


def hashes(seed, layer, t, heads, tokens):
    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    return np.array(
        [[mix(seed ^ mix(layer ^ mix(head ^ mix(t ^ mix(p))))) >> 8 for p in range(tokens)] for head in range(heads)]
    )


RULES = {
    "butler": lambda layer, t, query, key, true, x: foreseen()[layer - 1][:, t],
    "butler(group='max')": lambda layer, t, *_: np.repeat(
        foreseen()[layer - 1][:, t].reshape(2, 2, -1).max(axis=1), 2, axis=0
    ),
    "oracle": lambda layer, t, query, key, true, x: true[layer][:, t],
    "quest(page_size=4)": lambda layer, t, query, key, true, x: bounds(query, key, 4),
    "first_layer": lambda layer, t, query, key, true, x: true[0][:, t],
    "previous_layer": lambda layer, t, query, key, true, x: true[layer - 1][:, t],
    "random(seed=3)": lambda layer, t, query, key, true, x: hashes(3, layer, t, 4, t + 1),
    "streaming": lambda layer, t, query, key, true, x: np.tile(np.arange(t + 1), (4, 1)),
}


READS = [(source, *[(0.3, 2), (7, 0)][number % 2]) for number, source in enumerate(SOURCES)]
CARRIED = ("butler", "quest(page_size=4)", "first_layer", "previous_layer")  # what the host hands from layer to layer
BY_DEFAULT = ("butler", "quest(page_size=4)", "random(seed=3)")


def by_tier(ways):
    """Sources by one program and, of those that carry something, by layers; few of both by default."""
    for way, sources, default in ways:
        for case in (case for case in READS if case[0] in sources):
            yield pytest.param(*case, way, marks=() if case[0] in default else pytest.mark.matrix)


@pytest.mark.parametrize(
    ("select", "budget", "sinks", "way"),
    list(by_tier([(engine.ProgramSteps, SOURCES, BY_DEFAULT), (by_layer.LayerSteps, CARRIED, ("first_layer",))])),
)
def test_a_step_reads_what_the_rule_says_and_gives_the_logits_of_that(select, budget, sinks, way):
    logits, read = forced(select, budget, sinks=sinks, way=way)
    expected, expected_read = brute_force(RULES[select], budget, sinks)
    assert read == expected_read
    np.testing.assert_allclose(logits, expected[PROMPT - 1 :], atol=1e-4, rtol=0)


@pytest.mark.matrix
def test_reading_everything_gives_the_dense_logits():
    logits, _ = forced("quest(page_size=4)", 1.0, sinks=0)
    dense = np.asarray(decoder()(jnp.asarray(TOKENS)))[0]
    np.testing.assert_allclose(logits, dense[PROMPT - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("select", tiered(0, 1, ["quest(page_size=4)", "butler"]))
def test_a_prompt_in_blocks_of_any_size_is_remembered_alike(select):
    one, first = forced(select, 0.3, sinks=2, way=engine.ProgramSteps)  # in blocks of 16
    others = (forced(select, 0.3, block=block) for block in (1, 32))
    for logits, read in others:
        assert read == first
        np.testing.assert_allclose(logits, one, atol=1e-5, rtol=0)


RAGGED, LENGTHS = np.random.default_rng(1).integers(0, V, (3, 43)), np.array([43, 9, 30])
ANSWER = dict(budget=0.3, block=16, max_new_tokens=6, end=(5, 9, 17))


@pytest.mark.parametrize(
    ("select", "rows"),
    tiered(1, 1, [("butler", [2]), ("butler", [0, 1]), ("quest(page_size=4)", [0, 1, 2])]),
)
def test_a_row_gets_the_tokens_that_it_gets_alone_in_a_stream(select, rows):
    settings = dict(select=select, butler=butler_for(select), **ANSWER)
    batch = models.generate(decoder(), RAGGED, lengths=LENGTHS, **settings)
    live = np.asarray(batch.cache.num_live)
    for row in rows:
        alone, _ = streamed(decoder(), RAGGED[row : row + 1, : LENGTHS[row]], **settings)
        assert alone[0].tolist() == tiny.answers(batch)[row]
        assert live[:, row].min() == LENGTHS[row] + batch.lengths[row] - 1


@pytest.mark.parametrize(
    ("select", "each_way"),
    tiered(0, 2, [("butler", "one program"), ("quest", "layers"), ("butler", "layers"), ("quest", "one program")]),
    indirect=["each_way"],
)
def test_a_streamed_answer_is_the_generated_one_and_compiles_once(select, each_way):
    settings = dict(select=select, budget=0.3, butler=butler_for(select), block=16, max_new_tokens=5, end=())
    generated = models.generate(decoder(), TOKENS, **settings)
    np.testing.assert_array_equal(streamed(decoder(), TOKENS, **settings)[0], generated.tokens)
    compiled = len(COMPILED)
    assert compiled > 0, "compilations are not counted: jax has renamed the event"
    assert streamed(decoder(), TOKENS[:, ::-1], **settings)[0].shape == (1, 5)
    assert len(COMPILED) == compiled


@pytest.mark.parametrize(
    ("asked", "each_way"),
    tiered(1, 1, [
        (dict(select="butler"), "one program"),
        (dict(select="butler"), "layers"),
        (dict(policy="butler", budget=8), "one program"),
        (dict(policy="butler", budget=8), "layers"),
    ]),
    indirect=["each_way"],
)  # fmt: skip
def test_a_look_at_the_prompts_cache_sees_the_cache_alone(asked, each_way):
    seen = []
    settings = ANSWER | dict(butler=predictor(), on_cache=lambda cache: seen.append(type(cache)))
    next(models.stream(decoder(), RAGGED[2:, :30], **settings | asked))
    assert set(seen) == {kvjax.KVCache if each_way == "one program" else layer_caches.LayerCaches}


def compiled_step(select, budget, *, config=CONFIG, slots=PROMPT, butler=None):
    model, tokens = reference.decoder(config, reference.parameters(config)), np.zeros((1, slots), np.int32)
    run, _ = prepared(model, tokens, select, budget, butler=butler, answer=3)
    state = states.start(run, 1)
    token, finished = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    return engine.token_step.lower(
        run, state, token, finished, None, steps.decode_phase(run.plan, 1), Sampling()
    ).compile(), state


@pytest.mark.parametrize("select", tiered(0, 1, ["butler", "quest"]))
def test_a_step_donates_the_cache_and_all_that_lies_beside_it(select):
    compiled, held = compiled_step(select, 0.3, butler=butler_for(select))
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(held))


WIDE = Config(V, 32, 48, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=64, max_positions=4096)


@pytest.mark.matrix
def test_the_bytes_that_a_step_reads_fall_with_the_budget():
    """Over 2,048 slots, of which it reads so many."""
    many, few = (
        compiled_step("streaming", budget, config=WIDE, slots=2045)[0].cost_analysis()["bytes accessed"]
        for budget in (1024, 128)
    )
    row = 4 * (64 + 64) * 4  # key and value of four heads
    assert many - few >= (1024 - 128) * row  # in one layer: the compiler counts a loop's body once


ERRORS = [
    (dict(select="oracle"), r"select='oracle' needs a budget"),
    (dict(select="oracle", budget=1.5), "budget is 1.5; expected tokens per head"),
    (dict(select="oracle", budget=0), r"budget is 0; expected tokens per head"),
    (dict(select="oracle", budget=500), r"budget of 500 tokens .* more than the 51 .*43 in"),
    (dict(select="oracle", budget=8, sinks=-1), r"sinks is -1"),
    (dict(select="oracel", budget=8), r"unknown source 'oracel'"),
    (dict(select=3, budget=8), r"select is 3; give a source"),
    (dict(select="butler", budget=8), r"load_butler\(folder, model\).*python -m train.butler"),
    (dict(select="oracle", policy="h2o", budget=8), r"both policy='h2o' and select='oracle'"),
    (dict(policy="butler+caote", budget=8), r"policy 'butler\+caote' needs a predictor"),
]


@pytest.mark.parametrize(("settings", "sentence"), ERRORS)
@pytest.mark.parametrize("run", [models.generate, models.stream])
def test_bad_input_ends_in_one_sentence(settings, sentence, run):
    with pytest.raises(ValueError, match=sentence):
        run(decoder(), TOKENS, max_new_tokens=8, **settings)


def test_a_predictor_that_nothing_asks_for_is_refused():
    with pytest.raises(ValueError, match="a predictor was given, but nothing asks for it"):
        models.generate(decoder(), TOKENS, select="oracle", budget=8, butler=predictor())


def test_a_predictor_of_another_shape_is_refused():
    other = Butler(ButlerConfig(32, num_layers=4, num_heads=4, hidden=16, dim=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"of another model, with E, L, N = \(32, 4, 4\); this one has \(32, 3, 4\)"):
        models.generate(decoder(), TOKENS, select="butler", budget=8, butler=other)


@pytest.mark.matrix
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_a_mesh_gives_the_tokens_of_one_device():
    settings = dict(select="butler", budget=0.3, butler=predictor(), block=16, max_new_tokens=5, end=())
    one, many = (
        models.generate(model, np.tile(TOKENS, (2, 1)), lengths=np.array([43, 20]), **settings)
        for model in (decoder(), tiny.on_mesh(CONFIG))
    )
    np.testing.assert_array_equal(many.tokens, one.tokens)


def test_without_a_selection_or_a_predictor_nothing_lies_beside_the_cache():
    options = Options("h2o", 16, 16, evict_every=1)
    run, _ = engine.prepare(decoder(), check_prompt(decoder(), TOKENS, None, None), options, None, None)
    state = states.start(run, 1)
    assert isinstance(state.cache, kvjax.KVCache) and state.predictor is None and state.source == ()


def test_one_token_is_not_a_share_of_one():
    """Programs are found by equality, and 1 == 1.0."""
    source = kvjax.parse_source("streaming")
    assert selecting.Selection(source, 1, sinks=4) != selecting.Selection(source, 1.0, sinks=4)
