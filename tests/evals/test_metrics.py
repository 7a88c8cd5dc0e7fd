"""Metrics against cases worked out by hand and published values (test_protocols.py: against another implementation)."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import metrics

DEEP = " ".join(map(str, range(1200)))
CLASSES = ["Currency name", "name", "City", "Other"]
TWO_LINES, UPSIDE_DOWN = "second line\nfirst line", "first line\nsecond line"
BY_HAND = {
    metrics.f1: [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("in Paris, France", "Paris", 2 * 1 / (3 + 1)),
        ("a b b", "b c", 2 * 1 / (2 + 2)),  # the article goes; one b is shared
        ("", "Paris", 0.0),
        ("the", "the", 0.0),  # nothing is left of either
    ],
    metrics.longbench_rouge_l: [
        # Lin (2004), section 3: 3 and 2 of 4 words are in common, in order.
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        # Lin's union: w1 w2 of one sentence and w1 w3 w5 of the other are 4 words, of 5 and of 8 different ones.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / (5 + 8)),
        ("the cat sat on the mat", "the cat lay on the mat", 2 * 4 / (5 + 5)),  # "the" counts once: not 5 of 6
        ("the cat.", "the cat", 1.0),  # a full stop ends a sentence and is no part of a word
        (DEEP, DEEP, 0.0),  # too deep for its recursion
    ],
    # "the cat on mat" against "the cat sat on the mat": 4 words in common, in order.
    metrics.rouge_l: [("the cat on mat", "the cat sat on the mat", 8 / 10), ("", "the cat", 0.0),
                      (UPSIDE_DOWN, TWO_LINES, 2 / 4)],
    metrics.rouge_l_sum: [(UPSIDE_DOWN, TWO_LINES, 1.0)],  # of which lines are sentences
    metrics.edit_similarity: [  # of the first line of code
        ("x = 1", "x = 1", 1.0),
        ("# no\n```python\n// no\nx = 1\ny = 2", "x = 1", 1.0),
        ("# all comments", "x", 0.0),
        ("", "", 1.0),
        # What fuzzywuzzy 0.18 gives without python-Levenshtein; the first is in its documentation.
        ("this is a test", "this is a test!", 0.97),
        ("x = foo(bar)", "x = foo(baz)", 0.92),
        ("tide", "diet", 0.25),  # blocks that match, the longest first: by edit distance it would be 0.5
    ],
    metrics.classification: [  # the point is shared, and parts of the right one do not count
        ("Currency name", "Currency name", CLASSES, 1.0),
        ("Currency name or City", "Currency name", CLASSES, 0.5),
        ("currency name", "Currency name", CLASSES, 0.0),
        # "River" goes, so that "name" takes its place and is passed over; "cat" is not in the answer.
        ("River-name", "River-name", ["River", "name", "River-name", "cat"], 1 / 2),
    ],
    metrics.right_numbers: [
        ("7", "7", 1.0),
        ("7 of 14", "7", 0.5),
        ("Paragraph 12", "Paragraph 12", 1.0),
        ("none", "7", 0.0),
    ],
    metrics.first_number: [
        (" is 0042.", "0042", 1.0), ("is 42", "0042", 0.0), ("3.0, I say", 3, 1.0), ("2.5", 2.5, 1.0), ("no", "1", 0.0)
    ],
    metrics.last_integer: [("it is -7", -7, 1.0), ("-7 or 8", -7, 0.0), ("", -7, 0.0), ("seven", -7, 0.0)],
    metrics.word: [('{"key": "ab-12"}', "ab-12", 1.0)],
    functools.partial(metrics.word, upper=True): [("Harry said", "HARRY", 1.0), ("HARRYS", "HARRY", 0.0)],
    metrics.leading_values: [("[1, 4, 9]", [1, 4, 8, 9], 0.5), ("", [1], 0.0)],  # up to the first mistake
    metrics.choice: [
        ("B", "B", "a fox", 1.0),
        ("B. a fox", "B", "a fox", 1.0),
        ("A", "B", "a fox", 0.0),
        ("a fox", "B", "a fox", 1.0),
        ("the answer is: C, not B", "B", "a fox", 0.0),
        ("Between A and C", "B", "a fox", 1.0),  # its first letter is read, as published
        ("It is AB or B", "B", "a fox", 0.0),  # the first word that is a part of "ABCD" is read, as published
    ],
    metrics.named_choice: [  # of code: read more strictly
        ("B. fox", "B", "fox", 1.0),
        ("B", "B", "fox", 0.0),
        ("The answer is: fox", "B", "fox", 1.0),
        ("It is: A", "B", "fox", 0.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "given", "expected"),
    [(metric, given, expected) for metric, cases in BY_HAND.items() for *given, expected in cases],
)
def test_by_hand(metric, given, expected):
    assert metric(*given) == pytest.approx(expected, abs=1e-7)


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
