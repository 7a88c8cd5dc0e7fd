"""Metrics against cases worked out by hand, and ROUGE and edit similarity against what they are made of."""

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
