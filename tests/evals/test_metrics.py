"""Metrics against cases worked out by hand and published values (test_protocols.py: against another implementation)."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # Lin (2004), section 3: 3 and 2 of 4 words are in common, in order.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        # Lin's union: w1 w2 of one sentence and w1 w3 w5 of the other are 4 words, of 5 and of 8 different ones.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / (5 + 8)),
        ("the cat sat on the mat", "the cat lay on the mat", 2 * 4 / (5 + 5)),  # "the" counts once: not 5 of 6
        ("one two. three four.", "three four. one two.", 1.0),  # sentences are matched in any order
        ("The cat", "the cat", 1 / 2),  # as they are written
        ("the cat.", "the cat", 1.0),  # a full stop ends a sentence and is no part of a word
        ("the cat!", "the cat", 1 / 2),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("...", "cat", 0.0),
        ("cat", "", 0.0),
        (" ".join(map(str, range(1200))), " ".join(map(str, range(1200))), 0.0),  # too deep for its recursion
    ],
)
def test_longbenchs_rouge_l_by_hand(answer, reference, expected):
    assert metrics.longbench_rouge_l(answer, reference) == pytest.approx(expected, abs=1e-7)


texts = st.lists(st.sampled_from(["the", "The", "cat", "dog.", ".", "x=1", "12"]), max_size=12).map(" ".join)


@given(texts, texts)
def test_metrics_are_between_0_and_1_and_nothing_is_worth_nothing(answer, reference):
    for metric in (metrics.longbench_rouge_l, metrics.rouge_l, metrics.edit_similarity, metrics.f1):
        assert 0 <= metric(answer, reference) <= 1
    assert metrics.longbench_rouge_l("", reference) == metrics.longbench_rouge_l(answer, "") == 0


@given(st.lists(st.sampled_from(["the", "The", "cat", "dog"]), min_size=1, max_size=12).map(" ".join))
def test_the_same_text_is_right(text):
    assert metrics.longbench_rouge_l(text, text) == pytest.approx(1, abs=1e-7)
    assert metrics.edit_similarity(text, text) == 1


def test_what_is_missing_is_named(monkeypatch):
    metrics._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ImportError, match=r"needs rouge; install it with: pip install 'kvjax\[eval\]'"):
        metrics.longbench_rouge_l("x", "x")


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
        ("abcd", "abxd", 2 * 3 / 8),  # ab, then d: 3 of 4 characters each
        ("# all comments", "x", 0.0),
        ("", "", 1.0),
        # What fuzzywuzzy 0.18 gives without python-Levenshtein; the first is in its documentation.
        ("this is a test", "this is a test!", 0.97),
        ("x = foo(bar)", "x = foo(baz)", 0.92),
        ("    return self.a + self.b", "return self.b", 0.67),
        ("tide", "diet", 0.25),  # blocks that match, the longest first: by edit distance it would be 0.5
    ],
)
def test_edit_similarity_of_the_first_line_of_code(answer, reference, expected):
    assert metrics.edit_similarity(answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Currency name", 1.0), ("Currency name or City", 0.5), ("Other", 0.0), ("name", 0.0), ("currency name", 0.0)],
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
        ("It is AB or B", 0.0),  # the first word that is a part of "ABCD" is read, as published
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


def test_a_class_behind_one_that_is_taken_out_stays_as_published():
    # "River" goes, so that "name" takes its place and is passed over; "cat" is not in the answer.
    assert metrics.classification("River-name", "River-name", ["River", "name", "River-name", "cat"]) == 1 / 2
