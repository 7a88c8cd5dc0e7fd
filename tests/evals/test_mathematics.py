"""Mathematics from a user's file: the answer in the last box, its normalisation, and the command with sampling."""

import concurrent.futures
import json
from pathlib import Path

import pytest

from evals import judge, mathematics
from evals.__main__ import main
from evals.results import read_records
from models import limited
from tests.tiers import matrix

# Each line: two answers that are equal.
SAME = [line.split(" == ") for line in Path(__file__).with_name("equal_answers.txt").read_text().splitlines()]
# Likewise: two that are not.
OTHER = [("5", "-5"), (r"\frac{1}{2}", r"\frac{1}{3}"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("", "0"), ("x", "y")]
OTHER += [("5m", "5"), ("2516_7", "2516_8"), ("a + b c", "a + b d"), ("C", r"\text{(B)}"), ("June 20", "June 21")]
# Reported of math-verify (huggingface/Math-Verify#14): it rounds, cuts at \\mathrm, and reads a number out of a list.
OTHER += [
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}"),
]
OTHER += [
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    (r"1, 2, \ldots, n", r"1, 3, \ldots, n"),
    ("1.00001", "1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_answers_are_equal_however_they_are_written(one, other):
    assert mathematics.right(f"So \\boxed{{{one}}}.", other) and mathematics.right(f"\\boxed{{{other}}}", one)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_answers_are_not(one, other):
    assert not mathematics.right(f"So \\boxed{{{one}}}.", other) and not mathematics.right(f"\\boxed{{{other}}}", one)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}. So \boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"It is \boxed{4} and \boxed{5", "4"),
        ("The sum is 1,024, and no more.", "1024"),
        (r"The answer is $\frac{1}{2}$.", "0.5"),
    ],
)
def test_the_last_whole_box_answers_or_else_what_the_text_states(text, answer):
    assert mathematics.right(text, answer)
    assert not mathematics.right(text, "3") and not mathematics.right("I do not know.", answer)


def test_any_thread_may_judge():
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(mathematics.right, r"\boxed{7}", "7").result()


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_judged(monkeypatch):
    impatient = limited.Limited(judge.__file__, "equal", seconds=2, gib=2)
    monkeypatch.setattr(mathematics, "_judge", lambda: impatient)
    assert not mathematics.right(r"\boxed{9^{9^{9^9}}}", "5")
    assert mathematics.right(r"\boxed{5}", "5")
    impatient.close()


@matrix
def test_the_command_draws_answers_and_a_killed_run_goes_on(tmp_path, capsys):
    problems = [{"problem": "What is 1 + 1?", "answer": "2"}, {"question": "What is 7 - 7?", "answer": 0}]
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    arguments = f"mathematics --data {tmp_path} --tasks aime --new-tokens 6 --temperature 1 --top-p 0.9 --repeats 2"
    arguments += f" --policies full,tova --budgets 16 --block 32 --out {tmp_path / 'out'}"
    assert main(arguments.split()) == 0
    assert "2 per problem; the last box, by math-verify" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("samples.jsonl")
    records = read_records(tmp_path / "out")
    assert len(records) == 12 and {record["sample"] for record in records} == {0, 1, 2, 3}
    written = file.read_bytes()
    assert main(arguments.split()) == 0 and file.read_bytes() == written
