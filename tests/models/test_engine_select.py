"""Selection in generate and stream: what each step reads against a brute-force reading of the rules, row by row."""

import functools

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax.schedule import Phase
from models import Butler, ButlerConfig, driver, engine, selecting, steps
from models.options import Options
from models.prompts import check_prompt
from tests.models import tiny
from tests.models.reference import selections
from tests.models.test_engine_compiled import COMPILED
from tests.models.tiny import streamed

V = 64
CONFIG = tiny.config(num_layers=3, sliding_windows=(None, None, 21))  # the layers read each other's choices
PROMPT, STEPS = 37, 6
TOKENS = np.random.default_rng(0).integers(0, V, (1, PROMPT + STEPS))
weights = functools.partial(tiny.weights, CONFIG)
decoder = functools.partial(tiny.decoder, CONFIG)


@functools.cache
def predictor(num_layers=3):
    config = ButlerConfig(32, num_layers=num_layers, num_heads=4, hidden=16, dim=4)
    random = np.random.default_rng(1)
    shapes = config.shapes
    drawn = {name: random.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return Butler(config, jax.device_put(drawn))


def butler_for(select):
    return predictor() if select.startswith("butler") else None


def prepared(model, tokens, select, budget, *, block=16, sinks=4, answer=STEPS):
    """What a run that selects is made of, and its prompt in blocks."""
    options = Options(
        None, budget, block, evict_every=1, select=select, sinks=sinks, reserve=answer, networks=butler_for(select)
    )
    return engine.prepare(model, check_prompt(model, tokens, None, None), options)


@functools.cache
def forced(select, budget, *, sinks=2, block=16, layers=False):
    """Logits of a row's last prompt token and of its steps, which are told what to read next; and the slots read."""
    model, read = decoder(), {}
    run, sizes, prompt = prepared(model, TOKENS[:, :PROMPT], select, budget, block=block, sinks=sinks)
    (tokens, positions, _) = next(prompt.text).arrays
    feed = driver.Steps(run, sizes, steps.weights_of(run.model) if layers else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selecting, "_chosen", functools.partial(_recorded, read, selecting._chosen))
        for module, program, static in ((driver, "block_step", 4), (steps, "layer_step", (0, 1, 2))):
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
        slots = np.asarray(slots)[0]
        of_heads = np.repeat(slots, CONFIG.num_heads // len(slots), axis=0)  # a group may choose together
        read[max(read)][int(layer)] = [set(row[row >= 0].tolist()) for row in of_heads]

    slots = choose(selection, cache, memory, carry, query, position, context)
    jax.debug.callback(note, slots, context.layer)
    return slots


def brute_force(select, budget, sinks):
    """The whole sequence at once in float64, and what each step reads in all layers but the first."""
    rule = foreseen(decoder(), predictor(), TOKENS, select) if select.startswith("butler") else selections.RULES[select]
    steps = range(PROMPT, PROMPT + STEPS)
    read = selections.by_importance(rule, budget, sinks, steps)
    logits, _, masks = selections.forward(CONFIG, weights(), TOKENS[0], read)
    layers = range(1, CONFIG.num_layers)
    sets = {
        t: {layer: [set(np.flatnonzero(row).tolist()) for row in masks[layer][:, t]] for layer in layers} for t in steps
    }
    return logits, sets


def foreseen(model, butler, tokens, select="butler"):
    """The rule of a predictor, which is run on the whole sequence at once."""
    predict = jax.jit(lambda m, b, t: b(models.butler_input(m, t, source=b.config.source)))
    query, key = (np.array(x, np.float64)[:, 0] for x in predict(model, butler, tokens))  # [L - 1, T, N, dim]
    wanted = np.einsum("ltnd,lsnd->lnts", query, key)
    if "max" in select:
        wanted = np.stack([selections.largest_of_group(x.reshape(len(x), -1)).reshape(x.shape) for x in wanted])
    return lambda layer, t, *_: wanted[layer - 1][:, t, : t + 1]


SOURCES = ["butler", "butler(group='max')", *sorted(set(selections.RULES) - {"oracle(group='max')"})]
BUDGETS = [(0.3, 2), (7, 0)]  # of tokens, and the sinks beside them
# Each source by one program, and by layers two of those that the host hands something from layer to layer.
READS = [
    *((source, *BUDGETS[number % 2], False) for number, source in enumerate(SOURCES)),
    *((source, *BUDGETS[0], True) for source in ("first_layer", "butler")),
]
BY_DEFAULT = ("butler", "quest(page_size=4)", "random(seed=3)"), ("first_layer",)


@pytest.mark.parametrize(
    ("select", "budget", "sinks", "layers"),
    [pytest.param(*case, marks=() if case[0] in BY_DEFAULT[case[3]] else pytest.mark.matrix) for case in READS],
)
def test_a_step_reads_what_the_rule_says_and_gives_the_logits_of_that(select, budget, sinks, layers):
    logits, read = forced(select, budget, sinks=sinks, layers=layers)
    expected, expected_read = brute_force(select, budget, sinks)
    assert read == expected_read
    np.testing.assert_allclose(logits, expected[PROMPT - 1 :], atol=1e-4, rtol=0)


@pytest.mark.matrix
def test_a_given_text_is_fed_to_steps_that_read_what_the_rule_says():
    settings = dict(select="quest(page_size=4)", budget=0.3, sinks=2, block=16)
    cache, hidden = models.teacher_forced(decoder(), TOKENS, prompt=PROMPT, **settings)
    expected, _ = brute_force("quest(page_size=4)", 0.3, 2)
    np.testing.assert_allclose(decoder().logits(hidden)[0], expected[PROMPT - 1 :], atol=1e-4, rtol=0)
    assert int(cache.next_position[0]) == PROMPT + STEPS


@pytest.mark.matrix
def test_a_prompt_token_by_token_is_remembered_as_one_in_blocks():
    (one, first), (logits, read) = (forced("quest(page_size=4)", 0.3, block=block) for block in (16, 1))
    assert read == first
    np.testing.assert_allclose(logits, one, atol=1e-5, rtol=0)


RAGGED, LENGTHS = np.random.default_rng(1).integers(0, V, (3, 43)), np.array([43, 9, 30])
ANSWER = dict(budget=0.3, block=16, max_new_tokens=6, end=(5, 9, 17))


@pytest.mark.matrix
def test_a_row_gets_the_tokens_that_it_gets_alone_in_a_stream():
    settings = dict(select="butler", networks=predictor(), **ANSWER)
    batch = models.generate(decoder(), RAGGED, lengths=LENGTHS, **settings)
    alone, _ = streamed(decoder(), RAGGED[2:, : LENGTHS[2]], **settings)
    assert alone[0].tolist() == tiny.answers(batch)[2]
    assert min(map(len, tiny.held(batch.cache, 2)[0])) == LENGTHS[2] + int(batch.lengths[2]) - 1
    seen = []
    next(models.stream(decoder(), RAGGED[2:, :30], **settings, on_block=lambda *at: seen.append(type(at[-1]))))
    assert set(seen) == {kvjax.LayerCaches}, "who looks at the prompt's cache sees the cache alone"


@pytest.mark.matrix
def test_a_streamed_answer_by_layers_is_the_generated_one_and_compiles_once(run_by_layer):
    settings = dict(select="quest", budget=0.3, block=16, max_new_tokens=5, end=())
    generated = models.generate(decoder(), TOKENS, **settings)
    np.testing.assert_array_equal(streamed(decoder(), TOKENS, **settings)[0], generated.tokens)
    compiled = len(COMPILED)
    assert compiled > 0, "compilations are not counted: jax has renamed the event"
    assert streamed(decoder(), TOKENS[:, ::-1], **settings)[0].shape == (1, 5)
    assert len(COMPILED) == compiled


def test_one_token_is_not_a_share_of_one():
    """Programs are found by equality, and 1 == 1.0."""
    source = kvjax.parse_source("streaming")
    assert selecting.Selection(source, 1, sinks=4) != selecting.Selection(source, 1.0, sinks=4)
