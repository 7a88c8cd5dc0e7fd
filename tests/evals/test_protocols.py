"""LongBench's protocol here and in lm-evaluation-harness, whose tasks came from the published script: metrics on random
answers, and whole tasks on the same ten samples under the same policy.
"""

import difflib
import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml

from evals import harness, metrics, ruler
from evals.__main__ import main
from evals.evaluator import RECENCY
from evals.results import read_records

lm_eval = pytest.importorskip("lm_eval")
SHIPPED = Path(lm_eval.__file__).parent / "tasks" / "longbench"
COLOURS = ["amber", "bold", "calm", "dusty", "eager"]
ANIMALS = ["falcon", "harp", "otter", "baker", "stone"]


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


def records(task: str) -> list[dict]:
    """Ten samples; the question stands under LongBench's name of it, and under that of the harness's copy."""
    rng = np.random.default_rng(sorted(TASKS).index(task))
    made = []
    for number in range(10):
        names = [f"{COLOURS[i]} {ANIMALS[j]}" for i, j in zip(rng.permutation(5), rng.permutation(5), strict=True)]
        codes = [str(code) for code in rng.integers(1000, 10_000, 5)]
        facts = [f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
        asked = number % 5
        question = f"Question: what is the code of {names[asked]}?\nAnswer: the code of {names[asked]} is"
        made.append(
            {
                "context": " The river was calm and the baker counted steps. ".join(facts),
                "input": question,
                "question": question,
                "answers": [codes[asked], f"{codes[asked]}."],
                "all_classes": codes,
            }
        )
    return made


# Of each the metric's name there.
TASKS = {"triviaqa": "qa_f1_score", "trec": "classification_score", "samsum": "rouge_score"}
NEW_TOKENS = 12  # of each, so that the test is quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The samples; the harness's tasks with them for data; and its prompts, as LongBench publishes prompts."""
    folder = tmp_path_factory.mktemp("longbench")
    prompts, lengths = {}, {}
    for task in TASKS:
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records(task)))
        shipped = yaml.load((SHIPPED / f"{task}.yaml").read_text(), _Loader)
        prompts[task] = shipped["doc_to_text"].replace("{{context}}", "{context}").replace("{{question}}", "{input}")
        lengths[task] = NEW_TOKENS
        local = {
            "include": str(SHIPPED / f"{task}.yaml"),
            "task": f"local_{task}",
            "tag": [],
            "dataset_path": "json",
            "dataset_name": None,
            "generation_kwargs": {**shipped["generation_kwargs"], "max_gen_toks": NEW_TOKENS},
            "dataset_kwargs": {
                "data_files": {"test": str(folder / f"{task}.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
        }
        (folder / f"local_{task}.yaml").write_text(yaml.safe_dump(local))
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "dataset2maxlen.json").write_text(json.dumps(lengths))
    return folder


class _Loader(yaml.SafeLoader):
    """Leaves the harness's !function tags alone."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


@pytest.mark.nightly  # 18 s, for a protocol that seldom changes; by default its metrics are compared
def test_ten_samples_of_each_task_score_the_same_under_a_policy(folder, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = harness.model_class()(policy="snapkv(kernel=5)+caote", budget=64, block=32, when="prompt", batch_size=10)
    found = simple_evaluate(
        model=model,
        tasks=[f"local_{task}" for task in TASKS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),  # which are 14,000 files
        log_samples=True,
        bootstrap_iters=0,
    )
    theirs = {
        (task, sample["doc_id"]): sample[metric]
        for task, metric in TASKS.items()
        for sample in found["samples"][f"local_{task}"]
    }
    line = (
        f"longbench --data {folder} --tasks {','.join(TASKS)} --policies snapkv(kernel=5)+caote --budgets 64 --block 32"
    )
    assert main([*line.split(), "--batch", "10", "--out", str(tmp_path / "out")]) == 0
    assert "dataset2prompt.json, found with the data" in capsys.readouterr().out
    ours = {(r["task"], r["sample"]): r["score"] for r in read_records(tmp_path / "out") if r["policy"] != RECENCY}
    assert len(ours) == 10 * len(TASKS) and ours == pytest.approx(theirs)
    for task in TASKS:
        scores = [score for (name, _), score in ours.items() if name == task]
        assert min(scores) < max(scores), "the policy forgets in some samples and not in others"
