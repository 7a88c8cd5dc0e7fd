"""The co-reference evaluation: its samples, accuracy and coverage by hand, both modes against the model itself."""

import types

import jax
import numpy as np
import pytest

import models
from evals import answering, simulator
from papers.predictor import coref, coref_task
from papers.predictor.coref_task import CorefSample
from tests.tiers import matrix


def setting(name, sparsity=0.5, mode="teacher"):
    (made,) = coref.make_settings(name, [sparsity], [mode])
    return made


def test_outcomes_by_hand():
    assert coref.outcomes([5, 6, 7, 8], [5, 6, 7, 8]) == (True, 1.0)
    assert coref.outcomes([5, 4, 7, 8], [5, 6, 7, 8]) == (False, 0.75)
    assert coref.outcomes([6, 5], [5, 6]) == (False, 0.0)


def test_accuracy_and_coverage_by_hand(monkeypatch):
    rows = [([1, 2, 3], [4, 5]), ([1, 2], [6, 7, 8, 9]), ([1, 2, 3, 4], [5])]
    samples = [CorefSample("", "", prompt, answer) for prompt, answer in rows]

    def next_tokens(simulation, model, tokens):  # says the token that follows, but for 8 and 9, which it never says
        following = np.roll(tokens, -1, axis=1)
        return np.where(following >= 8, 0, following)

    monkeypatch.setattr(simulator.Simulation, "hidden_states", next_tokens)
    monkeypatch.setattr(coref, "_likeliest", lambda model, found, places: np.take_along_axis(found, places, axis=1))
    model = types.SimpleNamespace(embedding=jax.device_put(np.zeros(1)))
    result = coref.measure(model, samples, setting("h2o"), batch=2)
    assert result["correct"] == [1, 0, 1]
    assert result["covered"] == [1.0, 0.5, 1.0]
    assert result["guessed"] == [[4, 5], [6, 7, 0, 0], [5]]
    assert (result["accuracy"], result["coverage"]) == (pytest.approx(2 / 3), pytest.approx(2.5 / 3))
    assert result["low"] < 2 / 3 < result["high"]
    assert 0 <= result["coverage_low"] < 2.5 / 3 < result["coverage_high"] <= 1


def test_teacher_forcing_takes_the_likeliest_token_at_each_place_of_the_name(tiny):
    model, tokenizer, _ = tiny
    samples = [coref_task.sample(seed, tokenizer) for seed in range(3)]
    result = coref.measure(model, samples, setting("full"), batch=2)
    rows = [sample.tokens + sample.answer_tokens for sample in samples]
    likeliest = np.asarray(jax.jit(lambda tokens: model(tokens))(answering.padded(rows))).argmax(-1)
    for sample, row, guessed, places in zip(samples, rows, result["guessed"], likeliest, strict=True):
        assert guessed == places[len(sample.tokens) - 1 : len(row) - 1].tolist()


@matrix
@pytest.mark.filterwarnings("ignore:.* sums attention over all queries")  # the paper's H2O protects none
@pytest.mark.parametrize("name", ["butler", "h2o"])
def test_generation_is_that_of_the_library_and_evicts_at_its_moments(tiny, name):
    model, tokenizer, butler = tiny
    samples = [coref_task.sample(seed, tokenizer) for seed in range(2)]
    asked = setting(name, 0.7, "generate")
    result = coref.measure(model, samples, asked, like=simulator.DENSE._replace(networks=butler), batch=2, block=64)
    given = dict(select="butler", networks=butler)
    if name == "h2o":
        given = dict(policy="h2o+protect(sinks=4)", when="block")
        assert (result["when"], result["evicts"]) == ("block", ["block", 1])
        assert "block, then every step" in coref.table([result])
    lengths = np.array([len(sample.tokens) for sample in samples])
    most = max(len(sample.answer_tokens) for sample in samples)
    tokens = np.array([sample.tokens + [0] * (max(lengths) - len(sample.tokens)) for sample in samples])
    out = models.generate(model, tokens, lengths=lengths, budget=0.3, block=64, max_new_tokens=most, end=(), **given)
    for sample, guessed, row in zip(samples, result["guessed"], out.tokens.tolist(), strict=True):
        assert guessed == row[: len(sample.answer_tokens)]


def test_comparisons_are_paired_with_the_predictor_of_the_same_mode_and_sparsity():
    def row(select, sparsity, correct, mode="teacher"):
        covered = [0.5 + x / 2 for x in correct]
        return {
            "select": select, "sparsity": sparsity, "mode": mode, "when": None, "evicts": None, "correct": correct,
            "covered": covered,
        }  # fmt: skip

    found = [
        row("full", None, [1] * 60),
        row("butler", 0.5, [1] * 60),
        row("h2o", 0.5, [0] * 40 + [1] * 20),
        row("h2o", 0.7, [0] * 60),
        row("h2o", 0.5, [0] * 60, "generate"),
    ]
    rows = coref.compare(found)
    assert [(r["against"], r["sparsity"], r["better"]) for r in rows] == [
        ("full", 0.5, "within noise"),
        ("h2o", 0.5, "yes"),
    ]
    assert rows[1]["difference"] == pytest.approx(2 / 3)
    assert rows[1]["coverage_difference"] == pytest.approx(1 / 3)


def test_the_command_writes_table_json_and_picture(tiny_folder, run_eval):
    flags = ["--model", str(tiny_folder), "--select", "full,butler", "--sparsity", "0.3,0.5"]
    data, printed = run_eval("coref", *flags, "--samples", "3", "--batch", "3")
    named = [(r["select"], r["sparsity"]) for r in data["results"]]
    assert named == [("full", None), ("butler", 0.3), ("butler", 0.5)]
    assert all(len(r["correct"]) == len(r["covered"]) == 3 for r in data["results"])
    assert len(data["comparisons"]) == 2
    assert "butler" in printed and "coverage" in printed


def test_bare_names_are_resolved_by_mode():
    titles = [setting(name, 0.5, mode).title() for name in ("snapkv", "quest") for mode in ("teacher", "generate")]
    assert titles == [
        "rolling_snapkv, sparsity 0.5, teacher",
        "snapkv(kernel=7,pooling='max'), sparsity 0.5, generate",
        "quest(page_size=4), sparsity 0.5, teacher",
        "quest(page_size=4), sparsity 0.5, generate",
    ]


TRAIN, TEST = coref_task.pools("train"), coref_task.pools("test")


@pytest.mark.parametrize("pool", coref_task.Pools._fields)
def test_a_pool_has_a_hundred_entries_and_both_splits_none_in_common(pool):
    train, test = getattr(TRAIN, pool), getattr(TEST, pool)
    assert len(set(train) | set(test)) == len(train) + len(test) >= 100
    assert len(test) >= 40


def test_names_take_several_tokens(tokenizer):
    sizes = [len(tokenizer.encode(f" {name}", add_special_tokens=False).ids) for name in TRAIN.names + TEST.names]
    assert min(sizes) >= 2


def test_a_sample_is_the_papers_template(tokenizer):
    sample = coref_task.sample(3, tokenizer)
    introduction, tie_back = next(place for place in TEST.places if sample.prompt.startswith(place[0]))
    distractions = sample.prompt.removeprefix(f"{introduction} {sample.name}. ").removesuffix(f" {tie_back}:")
    reflection = next(text for text in TEST.reflections if distractions.startswith(text))
    dish = next(text for text in TEST.dishes if f" {text} " in distractions)
    problem = next(text for text in TEST.problems if distractions.endswith(text))
    assert distractions == f"{reflection} {dish} {problem}"
    assert sample.name in TEST.names


def test_tokens_name_the_place_twice(tokenizer):
    for seed in range(30):
        sample = coref_task.sample(seed, tokenizer)
        assert sample.tokens == tokenizer.encode(sample.prompt).ids
        assert sample.prompt.count(sample.name) == 1
        assert tokenizer.encode(f"{sample.prompt} {sample.name}").ids == sample.tokens + sample.answer_tokens
        assert tokenizer.decode(sample.answer_tokens) == f" {sample.name}"
        assert 140 <= len(sample.prompt.split()) <= 220


def test_same_seed_same_sample(tokenizer):
    samples = [coref_task.sample(seed, tokenizer) for seed in range(100)]
    assert samples[7] == coref_task.sample(7, tokenizer)
    assert len({sample.prompt for sample in samples}) == 100
    assert len({sample.name for sample in samples}) > 30
