"""Metrics against cases worked out by hand and published values (test_protocols.py: against another implementation)."""

import functools
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import metrics

DEEP = " ".join(map(str, range(1200)))
BY_HAND = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BY_HAND.items() for case in cases], ids=str)
def test_by_hand(name, case):
    metric = functools.partial(metrics.word, upper=True) if name == "upper_word" else getattr(metrics, name)
    *given, expected = case
    assert metric(*given) == pytest.approx(expected, abs=1e-7)


def test_a_text_too_deep_for_rouges_recursion_scores_nothing():
    assert metrics.longbench_rouge_l(DEEP, DEEP) == 0


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
