"""Metrics here and in lm-evaluation-harness, whose tasks came from the published scripts, on random answers."""

import difflib
import importlib
import sys
import types

import numpy as np
import pytest

from evals import metrics, ruler

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def string_libraries(monkeypatch):
    """Stand-ins for what LongBench's Chinese tasks need, and for what the standard library does here."""
    ratio = lambda one, other: round(100 * difflib.SequenceMatcher(None, one, other).ratio())  # noqa: E731
    found = types.SimpleNamespace(ratio=ratio)
    for name, more in (("jieba", {}), ("fuzzywuzzy", {"fuzz": found})):
        module = types.ModuleType(name)
        vars(module).update(more)
        monkeypatch.setitem(sys.modules, name, module)


def test_metrics_agree_on_random_answers():
    theirs = importlib.import_module("lm_eval.tasks.longbench.metrics")
    rng = np.random.default_rng(0)
    words = "The a cat dog. River River-name name Paragraph 3 12 , . x=1 `x` # // \n".split(" ")
    draw = lambda most: " ".join(rng.choice(words, rng.integers(1, most)))  # noqa: E731
    classes = ["River", "name", "River-name", "cat"]
    for _ in range(500):
        answer, reference, right = draw(9), draw(5), str(rng.choice(classes))
        assert metrics.f1(answer, reference) == pytest.approx(theirs.qa_f1_score(answer, reference))
        assert metrics.longbench_rouge_l(answer, reference) == theirs.rouge_score(answer, reference)
        assert metrics.right_numbers(answer, "12") == theirs.count_score(answer, "12")
        assert metrics.right_numbers(answer, "Paragraph 3") == theirs.retrieval_score(answer, "Paragraph 3")
        found = theirs.classification_score(answer, right, all_classes=classes)
        assert metrics.classification(answer, right, classes) == found
        code = "\n".join(line for line in answer.split("\n") if line.strip())  # it leaves empty lines out as well
        assert metrics.edit_similarity(code, reference) == theirs.code_sim_score(code, reference)


def test_rulers_recall_agrees_on_random_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=None))  # to make samples with
    theirs = importlib.import_module("lm_eval.tasks.ruler.common_utils")
    rng = np.random.default_rng(0)
    draw = lambda most: rng.choice(["Amber", "amber", "12", "1234", "\t", "x"], rng.integers(1, most)).tolist()  # noqa: E731
    for _ in range(200):
        answer, references = "".join(draw(6)), [part for part in draw(4) if part.strip()] or ["y"]
        said = theirs.postprocess_pred([answer])
        assert ruler.recall(answer, references) == pytest.approx(theirs.string_match_all(said, [references]))
