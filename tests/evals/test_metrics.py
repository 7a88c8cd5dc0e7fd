"""Metrics against cases worked out by hand, and ROUGE and edit similarity against what they are made of."""

import importlib
import sys
import types

import numpy as np
import pytest

from evals import metrics


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("in Paris, France", "Paris", 2 * 1 / (3 + 1)),
        ("a b b", "b c", 2 * 1 / (2 + 2)),  # the article goes; one b is shared
        ("x y y", "y y z", 2 * 2 / (3 + 3)),
        ("", "Paris", 0.0),
        ("the", "the", 0.0),  # nothing is left of either
    ],
)
def test_f1_of_words(answer, reference, expected):
    assert metrics.f1(answer, reference) == pytest.approx(expected)


def test_rouge_l_is_the_f_of_the_longest_common_subsequence():
    # "the cat on mat" against "the cat sat on the mat": 4 words in common, in order.
    assert metrics.rouge_l("the cat on mat", "the cat sat on the mat") == pytest.approx(2 * 1 * (4 / 6) / (1 + 4 / 6))
    assert metrics.rouge_l("", "the cat") == 0.0


def test_rouge_l_sum_takes_lines_as_sentences():
    one, other = "first line\nsecond line", "second line\nfirst line"
    assert metrics.rouge_l_sum(one, other) == pytest.approx(1.0)
    assert metrics.rouge_l(one, other) < 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("x = 1", "x = 1", 1.0),
        ("# no\n```python\n// no\nx = 1\ny = 2", "x = 1", 1.0),
        ("abcd", "abxd", 2 * 3 / 8),  # insertions and deletions only: 3 of 4 characters are shared
        ("# all comments", "x", 0.0),
    ],
)
def test_edit_similarity_of_the_first_line_of_code(answer, reference, expected):
    assert metrics.edit_similarity(answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Currency name", 1.0), ("Currency name or City", 0.5), ("Other", 0.0), ("name", 0.0)],
)
def test_classes_share_the_point_and_parts_of_the_right_one_do_not_count(answer, expected):
    assert metrics.classification(answer, "Currency name", ["Currency name", "name", "City", "Other"]) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("7", "7", 1.0),
        ("7 of 14", "7", 0.5),
        ("Paragraph 12", "Paragraph 12", 1.0),
        ("none", "7", 0.0),
        ("17", "7", 0.0),
    ],
)
def test_right_numbers(answer, reference, expected):
    assert metrics.right_numbers(answer, reference) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [(" is 0042.", "0042", 1.0), ("is 42", "0042", 0.0), ("3.0, I say", 3, 1.0), ("2.5", 2.5, 1.0), ("no", "1", 0.0)],
)
def test_first_number(answer, reference, expected):
    assert metrics.first_number(answer, reference) == expected


@pytest.mark.parametrize(("answer", "expected"), [("it is -7", 1.0), ("-7 or 8", 0.0), ("", 0.0), ("seven", 0.0)])
def test_last_integer(answer, expected):
    assert metrics.last_integer(answer, -7) == expected


def test_words_and_names():
    assert metrics.word('{"key": "ab-12"}', "ab-12") == 1.0
    assert metrics.word("Harry said", "HARRY", upper=True) == 1.0
    assert metrics.word("HARRYS", "HARRY", upper=True) == 0.0


def test_values_count_up_to_the_first_mistake():
    assert metrics.leading_values("[1, 4, 9]", [1, 4, 8, 9]) == 0.5
    assert metrics.leading_values("", [1]) == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("B", 1.0),
        ("B. a fox", 1.0),
        ("A", 0.0),
        ("a fox", 1.0),
        ("The answer is B", 1.0),
        ("the answer is: C, not B", 0.0),
        ("Between A and C", 1.0),  # its first letter is read, as published
        ("It may be A or B", 0.0),
        ("", 0.0),
    ],
)
def test_choices(answer, expected):
    assert metrics.choice(answer, "B", "a fox") == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("B. fox", 1.0), ("B: fox", 1.0), ("B", 0.0), ("The answer is: fox", 1.0), ("It is: A", 0.0), ("", 0.0)],
)
def test_choices_about_code_are_read_more_strictly(answer, expected):
    assert metrics.named_choice(answer, "B", "fox") == expected


def test_agrees_with_lm_evaluation_harness_on_random_answers(monkeypatch):
    pytest.importorskip("lm_eval")
    from rapidfuzz import fuzz

    for name in ("jieba", "rouge", "fuzzywuzzy"):  # what its Chinese tasks need, and two string libraries
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["rouge"], "Rouge", object, raising=False)
    whole_percent = types.SimpleNamespace(ratio=lambda one, other: round(fuzz.ratio(one, other)))
    monkeypatch.setattr(sys.modules["fuzzywuzzy"], "fuzz", whole_percent, raising=False)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    theirs = importlib.import_module("lm_eval.tasks.longbench.metrics")
    rng = np.random.default_rng(0)
    words = "The a cat dog River River-name name Paragraph 3 12 , . x=1 `x` # // \n".split(" ")
    draw = lambda most: " ".join(rng.choice(words, rng.integers(1, most)))  # noqa: E731
    classes = ["River", "River-name", "name", "cat"]
    for _ in range(500):
        answer, reference, right = draw(9), draw(5), str(rng.choice(classes))
        assert metrics.f1(answer, reference) == pytest.approx(theirs.qa_f1_score(answer, reference))
        assert metrics.right_numbers(answer, "12") == theirs.count_score(answer, "12")
        assert metrics.right_numbers(answer, "Paragraph 3") == theirs.retrieval_score(answer, "Paragraph 3")
        found = theirs.classification_score(answer, right, all_classes=classes)
        assert metrics.classification(answer, right, classes) == found
        code = "\n".join(line for line in answer.split("\n") if line.strip())  # it leaves empty lines out as well
        assert metrics.edit_similarity(code, reference) == pytest.approx(
            theirs.code_sim_score(code, reference), abs=0.0051
        )
