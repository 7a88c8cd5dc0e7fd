"""What the simulation reads, against each selection's rule written out in NumPy on tiny random models."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import models
from evals import selections, simulator
from tests.models import reference
from tests.models.reference import selections as rules
from tests.models.test_engine_select import foreseen
from tests.models.tiny import CONFIG, config, decoder
from tests.tiers import first, matrix

T, N, K, D, LAYERS = 13, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.num_layers


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.fixture(scope="module")
def butler(model):
    return reference.butler(model.config)


@pytest.fixture(scope="module", autouse=True)
def some_queries_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "QUERIES_AT_ONCE", 5)
        yield


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 64, (2, T))


def forward(model, tokens, read):
    return rules.forward(model.config, reference.parameters(model.config), tokens, read)


def simulate(model, tokens, name, sparsity, **options):
    return _logits(model, simulator.Simulation(name, sparsity, **options).hidden_states(model, tokens))


_logits = jax.jit(lambda model, hidden: model.logits(hidden))


def left(sparsity):
    """The share that is read."""
    return 1 - Fraction(str(sparsity))


CHOSEN = [("butler", 0.7), ("quest(page_size=4)", 0.7), ("oracle(group='max')", 0.7), ("oracle", 0.3)]


@pytest.mark.parametrize(
    ("name", "sparsity"), first(3, [*CHOSEN, *((name, 0.7) for name in rules.RULES if (name, 0.7) not in CHOSEN)])
)
def test_a_source_reads_what_its_rule_says(model, butler, tokens, name, sparsity):
    got = np.asarray(simulate(model, tokens, name, sparsity, networks=butler, sinks=2))
    for row in range(2):
        rule = foreseen(model, butler, tokens[row : row + 1]) if name == "butler" else rules.RULES[name]
        read = rules.by_importance(rule, left(sparsity), 2, range(T))
        wanted, _, masks = forward(model, tokens[row], read)
        np.testing.assert_allclose(got[row], wanted, rtol=1e-3, atol=2e-4)
        assert all(mask.sum(axis=-1).max() < T for mask in masks[1:])  # something was left out


def kept(row, sparsity):
    return math.ceil((row + 1) * left(sparsity))


def test_decode_steps_read_the_same(model, tokens):
    steps = models.teacher_forced(model, tokens, select="quest(page_size=4)", budget=0.3, sinks=2)
    got = simulate(model, tokens, "quest(page_size=4)", 0.7, sinks=2)
    np.testing.assert_allclose(_logits(model, steps.hidden), got, rtol=1e-3, atol=2e-4)


def evicted(scores_of, sparsity, sinks, *, before=True, group=1):
    """A reader under permanent eviction: ``scores_of(history, live)`` ranks the live tokens of a head.

    ``history`` are the rows of attention so far, [G, T] each. A row reads what is left ``before`` it evicts, or after.
    """

    def read(layer, logits, query, key, visible):
        mask = np.zeros((N, T, T), bool)
        for start in range(0, N, group):
            heads, live, history = range(start, start + group), set(), []
            for row in range(T):
                live.add(row)
                weights = np.zeros((group, T))
                for g, head in enumerate(heads):
                    of_live = reference.softmax(logits[layer][head, row, sorted(live)])
                    weights[g, sorted(live)] = of_live
                history.append(weights)
                read_now = set(live)
                scores = scores_of(history, sorted(live))
                if before:  # the library's policies: sinks are protected, and the budget holds them
                    extra = {j: np.inf if j < sinks else scores[j] for j in live}
                    live = rules.best(extra, live, kept(row, sparsity) + sinks, 0)
                else:
                    live = read_now = rules.best(scores, live, kept(row, sparsity), sinks)
                for head in heads:
                    mask[head, row, list(read_now)] = True
        return mask

    return read


def summed(history, live):
    return np.mean(np.sum(history, axis=0), axis=0)


def now(history, live):
    return np.mean(history[-1], axis=0)


def rolling(window, kernel):
    def score(history, live):
        mean = np.sum(history[-window:], axis=0)[0] / min(len(history), window)
        pooled = {}
        for place, j in enumerate(live):
            near = live[max(place - kernel // 2, 0) : place + kernel // 2 + 1]
            pooled[j] = max(mean[near])
        return pooled

    return score


@pytest.mark.parametrize(
    ("name", "heads", "read"),
    first(
        3,
        [
            ("h2o+protect(recent=0)", "group", evicted(summed, 0.7, 2, group=N // K)),
            ("rolling_snapkv(window=3,kernel=3)", "query", evicted(rolling(3, 3), 0.7, 2)),
            ("oracle_eviction", "query", evicted(now, 0.7, 2, before=False)),
            ("tova(heads='group')", "query", evicted(now, 0.7, 2)),
        ],
    ),
)
def test_eviction_is_permanent_and_token_by_token(model, tokens, name, heads, read):
    got = np.asarray(simulate(model, tokens, name, 0.7, sinks=2, heads=heads))
    for row in range(2):
        wanted, _, masks = forward(model, tokens[row], read)
        np.testing.assert_allclose(got[row], wanted, rtol=1e-3, atol=2e-4)
        assert all(mask.sum(axis=-1).max() < T for mask in masks[1:])


@matrix
def test_a_policy_knows_its_layer_and_its_predictor(model, butler, tokens):
    butlers = np.asarray(simulate(model, tokens, "butler+caote", 0.7, networks=butler))
    plain = np.asarray(simulate(model, tokens, "tova(heads='group')+caote", 0.7))
    assert np.abs(butlers - plain).max() > 1e-3  # in layer 0, or without it, the two would be the same


@pytest.mark.matrix
def test_padding_behind_a_sequence_changes_nothing_before_it(model, tokens):
    longer = np.concatenate([tokens, np.zeros((2, 4), int)], axis=1)
    short, padded = (np.asarray(simulate(model, x, "h2o", 0.5)) for x in (tokens, longer))
    np.testing.assert_allclose(padded[:, :T], short, atol=1e-5)


def test_sliding_windows_hold(tokens):
    windowed = decoder(config(sliding_windows=(4, 4)))
    dense = jax.jit(lambda tokens: windowed(tokens))(tokens)
    for name in ("oracle", "oracle_eviction", "h2o"):
        np.testing.assert_allclose(simulate(windowed, tokens, name, 0.0), dense, atol=1e-5)


def test_one_compilation_serves_all_sparsities(model, tokens):
    simulate(model, tokens, "streaming", 0.5)
    before = simulator._one_layer._cache_size()
    simulate(model, tokens, "streaming", 0.25)
    assert simulator._one_layer._cache_size() == before


def test_hits_are_the_share_of_the_oracles_tokens(model, butler, tokens):
    found = simulator.hits(model, tokens, "streaming", 0.7)
    for row in range(2):
        _, logits, _ = forward(model, tokens[row], lambda *given: given[-1])
        for layer in range(LAYERS):
            for i in range(T):
                share, mass = [], []
                for head in range(N):
                    wanted = rules.best(logits[layer][head, i], range(i + 1), left(0.7), 0)
                    recent = rules.best(np.arange(T), range(i + 1), left(0.7), 0)
                    share.append(len(wanted & recent) / len(wanted))
                    mass.append(reference.softmax(logits[layer][head, i, : i + 1])[list(recent)].sum())
                assert found.share[layer, row, i] == pytest.approx(np.mean(share), abs=1e-5)
                assert found.mass[layer, row, i] == pytest.approx(np.mean(mass), abs=1e-4)
    assert simulator.hits(model, tokens, "butler", 0.7, networks=butler).share.min() < 1


def test_last_logits_are_those_of_the_last_query(model, tokens):
    got = simulator.last_logits(model, tokens)
    _, logits, _ = forward(model, tokens[1], lambda *given: given[-1])
    np.testing.assert_allclose(got[:, 1], np.stack(logits)[:, :, -1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0,0.1,...,0.7", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        ("0.3, 0.5,0.7", [0.3, 0.5, 0.7]),
        ("0.9,0.6,...,0", [0.9, 0.6, 0.3, 0]),
        ("0,0.2,...,0.6,0.9", [0, 0.2, 0.4, 0.6, 0.9]),
        ("0.5,0.5", [0.5]),
    ],
)
def test_sparsities_are_lists_and_ranges(text, wanted):
    assert selections.parse_sparsities(text) == wanted


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.29, 0.5, 0.7, 0.9])
def test_kept_tokens_are_rounded_up_exactly(sparsity):
    assert selections.kept_tokens(200, sparsity).tolist() == [kept(row, sparsity) for row in range(200)]


@pytest.mark.parametrize(
    ("name", "resolved"),
    [
        ("quest", "quest(page_size=4)"),
        ("quest(page_size=16)", "quest"),
        ("snapkv", "rolling_snapkv"),
        ("snapkv(window=8)", "snapkv(window=8)"),
        ("streaming", "streaming"),
    ],
)
def test_names_are_resolved(name, resolved):
    assert str(selections.parse_selection(name, page_size=4)) == resolved
