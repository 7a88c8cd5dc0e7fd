"""Choices made from a text: what a sample is made of, what is scored, and what the command writes and refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from evals import loglikelihood, texts
from evals.answering import Feed
from evals.run_settings import Setting
from models import fingerprints
from papers.choices import command
from papers.choices import tasks as choices
from papers.retriever.data import template_sentence
from tests.tiers import first, nightly

RNG = np.random.default_rng(0)
SENTENCES = list(dict.fromkeys(template_sentence(RNG) for _ in range(600)))
PARTS = {"One": SENTENCES[:300], "Two": SENTENCES[300:]}
TEXT = "".join(f"== {name} ==\n\n{' '.join(part)}\n\n" for name, part in PARTS.items())
WHOLE = " ".join(SENTENCES)
TOKENIZER = models.load("retriever")[1]
CORPUS = choices.read_corpus(TEXT)
FULL = Setting("full", None, "block", "known", 0)


def parts(sample):
    """Passage, question, and choices as text."""
    shown = [sample.tokens[: sample.context_end], sample.tokens[sample.context_end :], *sample.choices]
    return [TOKENIZER.decode(tokens) for tokens in shown]


def drawn(task, index=0, length=200):
    return choices.draw(task, index, CORPUS, TOKENIZER, length)


@pytest.mark.parametrize("task", choices.TASKS)
@given(index=st.integers(0, 50), length=st.integers(160, 400))
def test_a_sample_fits_its_length_and_comes_again(task, index, length):
    sample = drawn(task, index, length)
    assert sample == choices.draw(task, index, CORPUS, TOKENIZER, length)
    assert len(sample.tokens) + max(map(len, sample.choices)) <= length
    assert 0 < sample.context_end < len(sample.tokens)
    assert len({tuple(choice) for choice in sample.choices}) == (2 if task == "section" else 4)


def test_samples_differ_by_number_and_seed():
    one = drawn("recall")
    assert one != drawn("recall", 1) and one != choices.draw("recall", 0, CORPUS, TOKENIZER, 200, seed=1)


@pytest.mark.parametrize("index", range(5))
def test_of_continuations_only_the_right_one_follows(index):
    sample = drawn("continuation", index)
    passage, question, *given = parts(sample)
    follows = [(passage + question + choice).strip() in WHOLE for choice in given]
    assert follows == [place == sample.right for place in range(4)]
    assert question.strip() in SENTENCES and sample.sizes == tuple(len(choice.encode()) for choice in given)


@pytest.mark.parametrize("index", range(5))
def test_of_sections_the_right_title_has_the_sentence(index):
    sample = drawn("section", index)
    passage, question, *given = parts(sample)
    sentence = question.strip().removesuffix(" --")
    assert sentence not in passage and passage.count("-- One") == passage.count("-- Two") >= 2
    assert given[sample.right].strip() == ("One" if sentence in PARTS["One"] else "Two")
    for line in passage.split("\n\n")[:-1]:
        known, title = line.rsplit(" -- ", 1)
        assert title == ("One" if known.strip() in PARTS["One"] else "Two")


@pytest.mark.parametrize("index", range(5))
def test_of_words_to_recall_the_right_one_stands_in_the_passage(index):
    sample = drawn("recall", index)
    passage, question, *given = parts(sample)
    cue = question.strip().removeprefix("As it is written above: ")
    assert len(cue.split()) == 3 and f" {cue} " in passage
    assert [f"{cue}{choice}" in passage for choice in given] == [place == sample.right for place in range(4)]
    assert all(choice in passage for choice in given)


@pytest.mark.parametrize("task", first(1, choices.TASKS, rest=nightly))
def test_the_full_cache_chooses_the_likeliest_of_the_whole_sequences(tiny, task):
    model = tiny[0]
    samples = [drawn(task, index) for index in range(3)]
    found = {row: record for _, row, record in command.answer(model, samples, [FULL], [2, 0], Feed(64, 2))}
    assert set(found) == {0, 2}
    for row, record in found.items():
        sample = samples[row]
        rows = loglikelihood.predict(model, [sample.tokens + choice for choice in sample.choices], block=64)
        sums = [row.log_probability[-len(own) :].sum() for row, own in zip(rows, sample.choices, strict=True)]
        assert record["log_probability"] == pytest.approx(sums, abs=1e-3)
        assert record["chosen"] == np.argmax(np.array(sums) / sample.sizes)
        assert record["score"] == (record["chosen"] == sample.right)


def test_the_command_writes_table_json_and_picture(tiny_folder, text_file, run_eval):
    flags = ["--model", str(tiny_folder), "--text", str(text_file), "--lengths", "200", "--samples", "2"]
    flags += ["--policies", "h2o,h2o+caote", "--budgets", "48", "--when", "prompt", "--block", "64"]
    data, printed = run_eval("choices", *flags, "--tasks", "recall", "--question", "unknown")
    assert [r["policy"] for r in data["results"]] == ["recency", "h2o", "h2o+caote"]
    for r in data["results"]:
        assert list(r["tasks"]) == ["recall"] and r["samples"] == 2
        assert r["low"] <= r["score"] <= r["high"] and r["policy"] in printed
        assert (r["evicts"], r["question"]) == (["prompt", 0], "unknown")
    assert [c["against"] for c in data["comparisons"]] == ["recency", "recency", "h2o"]
    assert data["fingerprints"]["data"] == fingerprints.digest([["recall", texts.digest(TEXT)]])


def test_sections_are_cut_at_their_titles():
    assert texts.sections("Before.\n\n== A ==\n\nOne\ntwo.\n\n\nThree.\n\n== B ==\n\n== C ==\n\n# == D ==\n") == {
        "": ["Before."],
        "A": ["One two.", "Three."],
        "C": ["# == D =="],
    }
