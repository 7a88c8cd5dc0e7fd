"""Mathematics from a user's file: the answer in the last box, its normalisation, and the command with sampling."""

import json
from pathlib import Path

import pytest

from evals import mathematics
from evals.__main__ import main
from evals.results import read_records

# Each line: two answers that are equal.
SAME = [line.split(" == ") for line in Path(__file__).with_name("equal_answers.txt").read_text().splitlines()]
OTHER = [("5", "-5"), (r"\frac{1}{2}", r"\frac{1}{3}"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("", "0"), ("x", "y")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_answers_are_equal_however_they_are_written(one, other):
    assert mathematics.equal(one, other) and mathematics.equal(other, one)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_answers_are_not(one, other):
    assert not mathematics.equal(one, other)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}. So \boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"It is \boxed{4} and \boxed{5", "4"),
        ("The sum is 1,024, and no more.", "1,024"),
        ("I do not know.", ""),
    ],
)
def test_the_last_whole_box_answers_or_else_the_last_number(text, answer):
    assert mathematics.last_answer(text) == answer


def test_the_command_draws_answers_and_a_killed_run_goes_on(tmp_path, capsys):
    problems = [{"problem": "What is 1 + 1?", "answer": "2"}, {"question": "What is 7 - 7?", "answer": 0}]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    arguments = f"mathematics --data {tmp_path} --tasks aime --new-tokens 6 --temperature 1 --top-p 0.9 --repeats 2"
    arguments += f" --policies full,tova --budgets 16 --block 32 --out {tmp_path / 'out'}"
    assert main(arguments.split()) == 0
    assert "2 per problem; the last box, normalised" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("samples.jsonl")
    records = read_records(tmp_path / "out")
    assert len(records) == 12 and {record["sample"] for record in records} == {0, 1, 2, 3}
    written = file.read_bytes()
    assert main(arguments.split()) == 0 and file.read_bytes() == written
