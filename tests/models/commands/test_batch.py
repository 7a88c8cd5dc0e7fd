"""A file of prompts in, a file of answers out; a killed command is resumed without loss and without repetition."""

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import models
from models.commands import batch
from tests.models import reference
from tests.models.test_loading import parameters

PROMPTS = [f"The code of the {colour} lamp is {number}." for number, colour in enumerate(["red", "blue", "old"], 101)]
SETTINGS = ["--rows", "2", "--policy", "h2o", "--budget", "12", "--block", "8", "--max-new-tokens", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    lines = [json.dumps({"prompt": prompt, "id": [prompt]}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder


def run(folder, *more, out="answers.jsonl", prompts="prompts.jsonl"):
    return batch.main([str(folder / prompts), "--out", str(folder / out), *(more or SETTINGS)])


@pytest.fixture(scope="module")
def answers(folder):
    assert run(folder) == 0
    return (folder / "answers.jsonl").read_bytes()


def parsed(content: bytes) -> list[dict]:
    return sorted((json.loads(line) for line in content.splitlines()), key=lambda answer: answer["line"])


def test_each_prompt_gets_the_answer_that_it_gets_alone(answers):
    model, tokenizer = models.load("retriever")
    found = parsed(answers)
    assert [answer["line"] for answer in found] == [1, 3, 5] and [answer["id"] for answer in found] == [
        [prompt] for prompt in PROMPTS
    ]
    weights = {name: array.astype(np.float64) for name, array in parameters(model).items()}
    run = dict(policy=reference.policy("h2o"), budget=12, block=8, new_tokens=5, end=model.config.eos)
    for answer, prompt in zip(found, PROMPTS, strict=True):
        ids = tokenizer.encode(prompt)
        tokens = reference.run(weights, model.config, ids, **run).tokens
        assert answer["tokens"] == tokens and answer["text"] == tokenizer.decode(tokens)
        assert (answer["prompt_tokens"], answer["new_tokens"]) == (len(ids), len(tokens))
        assert answer["run"]["budget"] == 12 and answer["run"]["evict_every"] == 1


@hypothesis.given(share=st.floats(0, 1))
@hypothesis.settings(max_examples=5)
def test_a_run_cut_at_any_byte_is_resumed(folder, answers, share):
    (folder / "cut.jsonl").write_bytes(answers[: int(share * len(answers))])
    assert run(folder, out="cut.jsonl") == 0
    assert parsed((folder / "cut.jsonl").read_bytes()) == parsed(answers)


def test_a_prompt_that_fails_is_said_and_the_others_are_answered(folder, capsys):
    settings = [*SETTINGS[:2], "--max-new-tokens", "3", "--longest-prompt"]  # of a full cache
    assert run(folder, *settings, "12", out="short.jsonl") == 2
    assert "3 of 3 prompts failed; the 'error' in their lines says why" in capsys.readouterr().err
    found = parsed((folder / "short.jsonl").read_bytes())
    assert [answer["line"] for answer in found] == [1, 3, 5]
    assert all("longest_prompt" in answer["error"] for answer in found)
    assert run(folder, *settings, "12", out="short.jsonl") == 2
    assert parsed((folder / "short.jsonl").read_bytes()) == found, "the same failures are said once"
    assert run(folder, *settings, "64", out="short.jsonl") == 0
    assert len(parsed((folder / "short.jsonl").read_bytes())) == 6


@pytest.mark.matrix
def test_answers_are_those_of_the_cache_dtype_and_of_the_words_that_kvzip_repeats(folder):
    settings = ["--policy", "kvzip(chunk=16)@uniform", "--budget", "12", "--when", "prompt", "--cache-dtype", "int8"]
    assert run(folder, *settings, "--block", "16", "--max-new-tokens", "3", out="kvzip.jsonl") == 0
    model, tokenizer = models.load("retriever")
    policy = models.with_repeat_prompt("kvzip(chunk=16)@uniform", tokenizer)
    for answer, prompt in zip(parsed((folder / "kvzip.jsonl").read_bytes()), PROMPTS, strict=True):
        made = models.stream(
            model, [tokenizer.encode(prompt)], policy=policy, budget=12, when="prompt", cache_dtype="int8", block=16,
            max_new_tokens=3,
        )  # fmt: skip
        assert answer["tokens"] == [int(token[0]) for token, _ in made]


def test_other_answers_are_never_mixed_nor_overwritten(folder, answers, capsys):
    assert run(folder, *SETTINGS[:-1], "6") == 2
    assert "is of another run (other max_new_tokens); name another --out" in capsys.readouterr().err
    assert run(folder, *SETTINGS, "--dtype", "bfloat16") == 2
    assert "is of another run (other dtype); name another --out" in capsys.readouterr().err
    (folder / "other.jsonl").write_text(json.dumps({"prompt": "Another one."}) + "\n")
    assert run(folder, prompts="other.jsonl") == 2
    assert "answers another prompt than line" in capsys.readouterr().err
    (folder / "mine.txt").write_text("my own words\n")
    assert run(folder, out="mine.txt") == 2
    assert "line 1, is no answer of models.batch" in capsys.readouterr().err
    (folder / "mine.json").write_text('{"mine": 1}')
    assert run(folder, out="mine.json") == 2
    assert "does not end in an answer of models.batch" in capsys.readouterr().err
    assert (folder / "mine.txt").read_text() == "my own words\n" and (folder / "mine.json").read_text() == '{"mine": 1}'
    assert (folder / "answers.jsonl").read_bytes() == answers


def test_a_prompt_that_is_no_text_does_not_end_the_others(folder, capsys):
    lines = [json.dumps({"prompt": text}) for text in ("The sky is", "half \ud800", "The river was")]
    (folder / "surrogate.jsonl").write_text("\n".join(lines))
    assert run(folder, prompts="surrogate.jsonl", out="surrogate-answers.jsonl") == 2
    assert "1 of 3 prompts failed; the 'error' in their lines says why." in capsys.readouterr().err
    found = {answer["line"]: answer for answer in parsed((folder / "surrogate-answers.jsonl").read_bytes())}
    assert "lone surrogate at character 5" in found[2]["error"] and found[1]["tokens"] and found[3]["tokens"]


def test_drawn_answers_are_those_of_the_seed(folder):
    settings = [*SETTINGS, "--temperature", "50", "--seed"]
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        assert run(folder, *settings, seed, out=f"drawn-{name}.jsonl") == 0
    one, again, two = (
        [answer["tokens"] for answer in parsed((folder / f"drawn-{name}.jsonl").read_bytes())]
        for name in ("one", "again", "two")
    )
    assert one == again != two
