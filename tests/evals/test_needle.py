"""Needles: samples that are the same on every run and have one right answer; the evaluation on the embedded model."""

import argparse
import functools
from pathlib import Path

import numpy as np
import pytest

import kvjax
from evals import needle, prose, report, run_settings, tasks
from papers.retriever import data
from tests.evals.test_ruler import tokenizer_of

SMALL = ["--lengths", "256", "--depths", "2", "--samples", "2", "--facts", "4", "--batch", "4", "--block", "64"]


def test_several_facts_of_a_text_are_asked_for_and_lie_near_their_depth(retriever):
    samples = needle.draw(retriever[1], 256, depths=3, samples=2, facts=4, asked=3)
    assert len(samples) == 3 * 2 * 3 and sorted({sample.text for sample in samples}) == list(range(6))
    assert len({tuple(sample.tokens[: sample.context_end]) for sample in samples}) == 6
    for text in range(6):
        own = [sample for sample in samples if sample.text == text]
        assert len({tuple(sample.tokens[: sample.context_end]) for sample in own}) == 1
        assert len({sample.answer for sample in own}) == 3
    for sample in samples:
        assert abs(sample.prompt.index(f" {sample.answer}.") / len(sample.prompt) - sample.depth) <= 0.25


def test_each_length_has_texts_of_its_own(retriever):
    parser = argparse.ArgumentParser()
    needle.add_flags(parser)
    flags = parser.parse_args(["--lengths", "256,320", "--depths", "2", "--samples", "2", "--facts", "4"])
    first, second = (group.draw() for group in needle.make_groups(flags, retriever[0].config, retriever[1]))
    drawn = functools.partial(needle.draw, retriever[1], depths=2, samples=2, facts=4)
    assert first == drawn(256, seed=0) and second == drawn(320, seed=2_000)


def test_a_policy_is_compared_with_itself_without_caote_and_the_groups_mean_with_the_exact_form():
    def result(policy, correct):
        return {"policy": policy, "budget": 8, "when": "block", "correct": correct}

    rows = report.compare(
        [
            result("h2o", [0] * 40),
            result("h2o+caote", [1] * 40),
            result("h2o+caote(group='mean')", [1] * 40),
            result("tova+fast_caote", [1] * 40),
            result("snapkv@layer", [1] * 40),
            result("snapkv+caote(target='output')@layer", [0] * 40),
        ],
        "recency",
        lambda found: found["correct"],
    )
    assert [(row["policy"], row["against"], row["better"]) for row in rows] == [
        ("h2o+caote", "h2o", "yes"),
        ("h2o+caote(group='mean')", "h2o", "yes"),
        ("h2o+caote(group='mean')", "h2o+caote", "within noise"),
        ("snapkv+caote(target='output')@layer", "snapkv@layer", "no"),
    ]


def test_the_command_writes_table_json_and_picture(run_eval):
    arguments = ["needle", "--policies", "full,tova,tova+caote", "--budgets", "96", "--when", "prompt", *SMALL]
    data, table = run_eval(*arguments)
    assert data["command"].startswith("python -m evals needle --policies full,tova,tova+caote --budgets 96")
    assert data["seed"] == 0 and data["seconds"] > 0 and data["versions"]["kvjax"] == kvjax.__version__
    assert sorted(data["fingerprints"]) == ["config", "kvjax", "prose", "tokenizer", "weights"]
    settings = [(r["policy"], r["budget"], r["when"]) for r in data["results"]]
    assert settings == [
        ("full", None, "block"), *((policy, 96, "prompt") for policy in (run_settings.RECENCY, "tova", "tova+caote"))
    ]  # fmt: skip
    assert {r["samples"] for r in data["results"]} == {4}
    pairs = [(row["policy"], row["against"]) for row in data["comparisons"]]
    assert pairs == [("tova", "recency"), ("tova+caote", "recency"), ("tova+caote", "tova")]
    assert all(r["policy"] in table for r in data["results"])


PLACEMENTS = ("after", "before", "both")
GOLDEN = Path(__file__).with_name("needle.txt").read_text().removesuffix("\n")


@pytest.mark.parametrize("question", PLACEMENTS)
def test_same_seed_same_sample(tokenizer, question):
    one = tasks.needle(5, tokenizer, 300, depth=0.3, question=question)
    assert one == tasks.needle(5, tokenizer, 300, depth=0.3, question=question)
    assert one.prompt != tasks.needle(6, tokenizer, 300, depth=0.3, question=question).prompt


@pytest.mark.parametrize("question", PLACEMENTS)
@pytest.mark.parametrize("length", [200, 512, 1024])
def test_length_is_met_but_not_exceeded(tokenizer, question, length):
    for seed in range(8):
        sample = tasks.needle(seed, tokenizer, length, facts=4, question=question)
        assert length - 70 < len(sample.tokens) <= length
        assert sample.tokens == tokenizer.encode(sample.prompt).ids
        assert sample.tokens[0] == tokenizer.token_to_id(data.BOS)


@pytest.mark.parametrize("question", PLACEMENTS)
def test_the_answer_is_stated_once_and_for_the_asked_key_only(tokenizer, question):
    for seed in range(20):
        sample = tasks.needle(seed, tokenizer, 400, facts=10, question=question)
        asked = sample.prompt.split("Question: what is ")[1].split("?")[0]
        assert sample.prompt.lower().count(f"{asked} is {sample.answer}.") == 1
        assert sample.prompt.count(sample.answer) == 1
        text = tokenizer.decode(sample.tokens[: sample.context_end]).lower()
        assert f"{asked} is {sample.answer}." in text and "answer:" not in text


def test_the_continuation_is_four_digits_apart(tokenizer):
    sample = tasks.needle(0, tokenizer, 300)
    assert len(sample.answer_tokens) == 4
    assert tokenizer.decode(sample.answer_tokens).strip() == sample.answer


def test_depth_places_the_fact(tokenizer):
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        for seed in range(5):
            sample = tasks.needle(seed, tokenizer, 800, depth=depth)
            text = sample.prompt[: sample.prompt.index("\nQuestion")]
            before = len(tokenizer.encode(text[: text.index(f" is {sample.answer}.")]).ids)
            assert abs(before / sample.context_end - depth) < 0.08


def test_look_alikes_never_agree():
    rng = np.random.default_rng(0)
    facts = []
    for _ in range(60):
        facts.append(tasks.random_fact(rng, facts, alike=0.6))
    assert len({(fact.attribute, fact.key) for fact in facts}) == len(facts) == len({fact.value for fact in facts})
    words = [fact.key.split() for fact in facts]
    assert all(first in prose.ADJECTIVES and second in prose.NOUNS for first, second in words)
    assert len({first for first, _ in words}) < 50, "some share a word"


def test_a_sample_is_the_same_wherever_it_is_made():
    sample = tasks.needle(0, tokenizer_of(lambda text: [0, *map(ord, text)]), 700, depth=0.5, facts=3)
    assert sample.prompt == GOLDEN
