"""Questions about long texts: rows that fit, whose answer is in the text, in sentences that no evaluation uses."""

import json

import pytest

import models
from evals import prose
from papers.__main__ import main
from papers.answers import questions
from train import answers

LENGTH = 420
TEXT = "In the beginning the earth was without form and void, and darkness was upon the deep. " * 2


@pytest.fixture(scope="module")
def tokenizer():
    return models.load("retriever")[1]


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [questions.row(0, number, tokenizer, LENGTH) for number in range(60)]


def turns(row):
    """The questions of a row, and their answers."""
    return [(row.prompt, row.answer), *row.more]


def test_rows_fit_and_hold_their_answers(rows, tokenizer):
    assert {row.family for row in rows} == set(questions.FAMILIES)
    assert max(len(row.more) for row in rows) == LENGTH // questions.TOKENS - 1
    for row in rows:
        rest = [tokenizer.encode(text, add_special_tokens=False) for turn in turns(row) for text in turn][1:]
        assert 300 < len(tokenizer.encode(row.prompt)) + sum(map(len, rest)) + 1 <= LENGTH
        for prompt, answer in turns(row):
            assert answer.startswith(" ")
            context = row.prompt.rpartition("How many" if row.family == "counts" else "\n")[0]
            if row.family == "counts":
                assert questions.COUNTS[context.count(prompt.rsplit('"', 2)[1])] == answer[1:]
            else:
                assert answer[1:] in context


def test_a_chain_leads_to_its_answer(rows):
    for row in (row for row in rows if row.family == "chains"):
        set_to = dict(line.split(" be ") for line in questions.re.findall(r"Let (\w+ be \w+)\.", row.prompt))
        for prompt, answer in turns(row):
            name = prompt.split()[-2]
            while name in set_to:
                name = set_to[name]
            assert f" {name}" == answer


def test_a_row_follows_from_seed_and_number_alone(rows, tokenizer):
    assert questions.row(0, 7, tokenizer, LENGTH) == rows[7] != questions.row(1, 7, tokenizer, LENGTH)


def test_no_sentence_of_an_evaluation_is_learned(rows):
    texts = "".join(row.prompt for row in rows)
    assert not [sentence for sentence in prose.sentences("test") if sentence in texts]
    assert [sentence for sentence in prose.sentences("train") if sentence in texts]


def test_the_command_writes_rows_that_training_reads(tmp_path, tokenizer, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text(TEXT)
    line = ["--tokenizer", "retriever", "--rows", "40", "--lengths", "200,260", "--text", str(text), "--out", str(out)]
    assert main(["questions", *line]) == 0
    read = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(read) == 40 and "continuations" in {row["family"] for row in read}
    continued = next(row for row in read if row["family"] == "continuations")
    begun = continued["prompt"].rsplit('"', 2)[1]
    assert f"{begun}{continued['answer']}" in TEXT
    assert all(len(tokenizer.encode(row["prompt"] + row["answer"])) <= 260 for row in read)
    data = answers.open_answers([str(out)], tokenizer, 264, eval_rows=2)
    assert answers.model_batch(data.held_out).answers.min() > 0
