"""Selection in generate and stream: what each step reads against a brute-force reading of the rules, row by row."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import Phase
from models import Butler, ButlerConfig, Config, by_layer, engine, selecting, states, steps
from models.butler import parameter_shapes as butler_shapes
from models.plan import Options, check_prompt
from models.sampling import Sampling
from tests.models import reference, tiny
from tests.models.test_engine_compiled import COMPILED
from tests.models.tiny import streamed

V = 64
CONFIG = Config(V, 32, 48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, sliding_windows=(None, None, 21))
PROMPT, STEPS = 37, 6
TOKENS = np.random.default_rng(0).integers(0, V, (1, PROMPT + STEPS))
weights = functools.partial(tiny.weights, CONFIG)
decoder = functools.partial(tiny.decoder, CONFIG)


@functools.cache
def predictor(num_layers=3):
    config = ButlerConfig(32, num_layers=num_layers, num_heads=4, hidden=16, dim=4)
    random = np.random.default_rng(1)
    shapes = butler_shapes(config)
    drawn = {name: random.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return Butler(config, jax.device_put(drawn))


def butler_for(select):
    return predictor() if select.startswith("butler") else None


def prepared(model, tokens, select, budget, *, block=16, sinks=4, answer=STEPS):
    """What a run that selects is made of, and its prompt in blocks."""
    options = Options(None, budget, block, evict_every=1, select=select, sinks=sinks, reserve=answer)
    return engine.prepare(model, check_prompt(model, tokens, None, None), options, None, butler_for(select))


@functools.cache
def forced(select, budget, *, sinks=2, block=16, way=engine.ProgramSteps):
    """Logits of a row's last prompt token and of its steps, which are told what to read next; and the slots read."""
    model, read = decoder(), {}
    run, prompt = prepared(model, TOKENS[:, :PROMPT], select, budget, block=block, sinks=sinks)
    (tokens, positions, _), feed = next(prompt.text).arrays, way(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selecting, "_chosen", functools.partial(_recorded, read, selecting._chosen))
        for module, program, static in ((engine, "block_step", 4), (by_layer, "_run_layer", (0, 1, 2))):
            patch.setattr(module, program, traced_anew(getattr(module, program), static))
        state, logits = feed.start(1), []
        for number in range(-(-PROMPT // block)):
            hidden, state = feed.block(state, tokens[number], positions[number], Phase(evicts=False))
        logits.append(last_logits(model, hidden))
        for number in range(PROMPT, PROMPT + STEPS):
            read[number] = {}
            token, position = TOKENS[:, number : number + 1], np.array([[number]], np.int32)
            hidden, state = feed.block(state, token, position, steps.decode_phase(run.plan, 1))
            logits.append(last_logits(model, hidden))
            jax.effects_barrier()
    return np.concatenate(logits), read


@jax.jit
def last_logits(model, hidden):
    return model.logits(hidden[:, -1])


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
def foreseen():
    """Importance logits of the predictor, [layer, N, query, key], run on the whole sequence at once."""
    said = jax.jit(lambda tokens: predictor()(models.butler_input(decoder(), tokens)))(TOKENS)
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


BUDGETS = [(0.3, 2), (7, 0)]  # of tokens, and the sinks beside them
# Each source by one program, and by layers two of those that the host hands something from layer to layer.
READS = [
    *((source, *BUDGETS[number % 2], engine.ProgramSteps) for number, source in enumerate(RULES)),
    *((source, *BUDGETS[0], by_layer.LayerSteps) for source in ("first_layer", "butler")),
]
BY_DEFAULT = ("butler", "quest(page_size=4)", "random(seed=3)"), ("first_layer",)


@pytest.mark.parametrize(
    ("select", "budget", "sinks", "way"),
    [
        pytest.param(*case, marks=() if case[0] in BY_DEFAULT[case[3] is by_layer.LayerSteps] else pytest.mark.matrix)
        for case in READS
    ],
)
def test_a_step_reads_what_the_rule_says_and_gives_the_logits_of_that(select, budget, sinks, way):
    logits, read = forced(select, budget, sinks=sinks, way=way)
    expected, expected_read = brute_force(RULES[select], budget, sinks)
    assert read == expected_read
    np.testing.assert_allclose(logits, expected[PROMPT - 1 :], atol=1e-4, rtol=0)


@pytest.mark.matrix
def test_a_prompt_token_by_token_is_remembered_as_one_in_blocks():
    (one, first), (logits, read) = (forced("quest(page_size=4)", 0.3, block=block) for block in (16, 1))
    assert read == first
    np.testing.assert_allclose(logits, one, atol=1e-5, rtol=0)


RAGGED, LENGTHS = np.random.default_rng(1).integers(0, V, (3, 43)), np.array([43, 9, 30])
ANSWER = dict(budget=0.3, block=16, max_new_tokens=6, end=(5, 9, 17))


def test_a_row_gets_the_tokens_that_it_gets_alone_in_a_stream():
    settings = dict(select="butler", butler=predictor(), **ANSWER)
    batch = models.generate(decoder(), RAGGED, lengths=LENGTHS, **settings)
    alone, _ = streamed(decoder(), RAGGED[2:, : LENGTHS[2]], **settings)
    assert alone[0].tolist() == tiny.answers(batch)[2]
    assert np.asarray(batch.cache.num_live)[:, 2].min() == LENGTHS[2] + batch.lengths[2] - 1
    seen = []
    next(models.stream(decoder(), RAGGED[2:, :30], **settings, on_cache=lambda cache: seen.append(type(cache))))
    assert set(seen) == {kvjax.KVCache}, "who looks at the prompt's cache sees the cache alone"


@pytest.mark.matrix
def test_a_streamed_answer_by_layers_is_the_generated_one_and_compiles_once(run_by_layer):
    settings = dict(select="quest", budget=0.3, block=16, max_new_tokens=5, end=())
    generated = models.generate(decoder(), TOKENS, **settings)
    np.testing.assert_array_equal(streamed(decoder(), TOKENS, **settings)[0], generated.tokens)
    compiled = len(COMPILED)
    assert compiled > 0, "compilations are not counted: jax has renamed the event"
    assert streamed(decoder(), TOKENS[:, ::-1], **settings)[0].shape == (1, 5)
    assert len(COMPILED) == compiled


def compiled_step(select, budget, *, config=CONFIG, slots=PROMPT):
    model, tokens = reference.decoder(config, reference.parameters(config)), np.zeros((1, slots), np.int32)
    run, _ = prepared(model, tokens, select, budget, answer=3)
    state = states.start(run, 1)
    token, finished = jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    return engine.token_step.lower(
        run, state, token, finished, None, steps.decode_phase(run.plan, 1), Sampling()
    ).compile(), state


@pytest.mark.matrix
def test_a_step_donates_the_cache_and_all_that_lies_beside_it():
    compiled, held = compiled_step("butler", 0.3)
    assert compiled.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(held))


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
    (dict(select="oracle", budget=8, butler=predictor), "a predictor was given, but nothing asks for it"),
    (
        dict(select="butler", budget=8, butler=functools.partial(predictor, num_layers=4)),
        r"of another model, with E, L, N = \(32, 4, 4\); this one has \(32, 3, 4\)",
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), ERRORS)
def test_bad_input_ends_in_one_sentence(settings, sentence):
    given = settings["butler"]() if "butler" in settings else None
    with pytest.raises(ValueError, match=sentence):
        models.stream(decoder(), TOKENS, max_new_tokens=8, **settings | dict(butler=given))


@pytest.mark.nightly  # of 6 s; test_engine_mesh.py has the mesh, and a selection adds no communication of its own
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices; conftest.py forces them on a CPU")
def test_a_mesh_gives_the_tokens_of_one_device():
    settings = dict(select="butler", budget=0.3, butler=predictor(), block=16, max_new_tokens=5, end=())
    one, many = (
        models.generate(model, np.tile(TOKENS, (2, 1)), lengths=np.array([43, 20]), **settings)
        for model in (decoder(), tiny.on_mesh(CONFIG))
    )
    np.testing.assert_array_equal(many.tokens, one.tokens)


def test_one_token_is_not_a_share_of_one():
    """Programs are found by equality, and 1 == 1.0."""
    source = kvjax.parse_source("streaming")
    assert selecting.Selection(source, 1, sinks=4) != selecting.Selection(source, 1.0, sinks=4)
