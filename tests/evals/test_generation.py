"""Generations longer than the cache: the texts, what they are asked, and the command."""

import argparse
import json

import numpy as np
import pytest

from evals import answering, generation
from evals.__main__ import main
from evals.run_settings import Setting
from tests.models import reference
from tests.models.tiny import decoder, run
from tests.tiers import matrix


def test_facts_and_results_lie_in_the_first_half_and_are_asked_at_the_end(retriever):
    _, tokenizer = retriever
    drawn = generation.draw(3, tokenizer, 600, facts=3)
    text = drawn[0].prompt[: drawn[0].prompt.index("\nQuestion")]
    assert len(drawn) == 6 and 560 < drawn[0].context_end <= 600
    for number, sample in enumerate(drawn):
        assert (
            sample.prompt.startswith(text)
            and sample.tokens[: sample.context_end] == drawn[0].tokens[:600][: sample.context_end]
        )
        assert text.count(sample.answer) == 1 + number % 2 and text.index(sample.answer) < 0.55 * len(text)
    words = text[text.index("Since") :].split()
    assert int(words[1]) + int(words[3]) == int(words[5].rstrip(","))


def test_facts_and_results_are_groups_of_the_same_texts(retriever):
    flags = argparse.Namespace(lengths="200,300", samples=2, facts=2, seed=5)
    groups = generation.make_groups(flags, retriever[0].config, retriever[1])
    assert [(group.task, group.length, group.size) for group in groups] == [
        (task, length, 4) for length in (200, 300) for task in ("facts", "results")
    ]
    for task, drawn in ((group.task, group.draw()) for group in groups):
        assert [sample.text for sample in drawn] == [0, 0, 1, 1] and len({sample.answer for sample in drawn}) == 4
        assert [f"make {sample.answer}," in sample.prompt for sample in drawn] == [task == "results"] * 4
    facts, results = (group.draw() for group in groups[:2])
    for one, other in zip(facts, results, strict=True):
        assert one.tokens[: one.context_end] == other.tokens[: other.context_end]


@matrix
def test_a_full_budget_predicts_a_text_as_the_full_cache_does():
    texts = [np.random.default_rng(row).integers(0, 256, 60 - row).tolist() for row in range(2)]
    feed = answering.Feed(block=8)
    full, ample, tight = (
        generation.read(decoder(), texts, Setting(policy, budget, "block", "unknown"), feed)[1]
        for policy, budget in (("full", None), ("tova", 64), ("tova", 16))
    )
    for text, loss in zip(texts, full, strict=True):
        said = reference.softmax(run(text).logits)[np.arange(len(text) - 1), text[1:]]
        assert loss == pytest.approx(-np.log(said).mean(), rel=1e-5)
    np.testing.assert_allclose(ample, full, rtol=1e-5)
    assert (abs(tight - full) > 1e-4).all()


@matrix
def test_the_command_asks_about_a_text_that_it_has_read_once(tmp_path, capsys):
    arguments = "generation --lengths 200 --facts 1 --samples 2 --batch 2 --budgets 64 --policies full,tova --block 32"
    arguments += f" --out {tmp_path / 'out'} --json {tmp_path / 'out.json'}"
    assert main(arguments.split()) == 0
    told = capsys.readouterr().out
    assert "2 texts of 200 tokens, 1 facts and 1 results each" in told and "against full" in told
    rows = {row["policy"]: row for row in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert set(rows) == {"full", "recency", "tova"} and rows["full"]["score"] == 1.0
    assert "increase" not in rows["full"]
    np.testing.assert_allclose(rows["tova"]["increase"], rows["tova"]["perplexity"] / rows["full"]["perplexity"] - 1)
    written = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert main(arguments.split()) == 0 and (tmp_path / "out" / "samples.jsonl").read_bytes() == written
