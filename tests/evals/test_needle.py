"""The needle evaluation on the embedded model, small enough to run in seconds."""

import kvjax
from evals import needle, report, run_settings

SMALL = ["--lengths", "256", "--depths", "2", "--samples", "2", "--facts", "4", "--batch", "4", "--block", "64"]


def test_several_facts_of_a_text_are_asked_for_and_lie_near_their_depth(retriever):
    samples = needle.draw(retriever[1], 256, depths=3, samples=2, facts=4, question="unknown", asked=3)
    assert len(samples) == 3 * 2 * 3 and sorted({sample.text for sample in samples}) == list(range(6))
    assert len({tuple(sample.tokens[: sample.context_end]) for sample in samples}) == 6
    for text in range(6):
        own = [sample for sample in samples if sample.text == text]
        assert len({tuple(sample.tokens[: sample.context_end]) for sample in own}) == 1
        assert len({sample.answer for sample in own}) == 3
    for sample in samples:
        assert abs(sample.prompt.index(f" {sample.answer}.") / len(sample.prompt) - sample.depth) <= 0.25


def test_a_policy_is_compared_with_itself_without_caote_and_the_groups_mean_with_the_exact_form():
    def result(policy, correct):
        return {"policy": policy, "budget": 8, "when": "block", "correct": correct}

    rows = report.compare(
        [
            result("h2o+protect(recent=0.5)", [0] * 40),
            result("h2o+caote+protect(recent=0.5)", [1] * 40),
            result("h2o+caote(group='mean')+protect(recent=0.5)", [1] * 40),
            result("tova+fast_caote", [1] * 40),
            result("snapkv@layer", [1] * 40),
            result("snapkv+caote(target='output')@layer", [0] * 40),
        ],
        "recency",
        lambda found: found["correct"],
    )
    assert [(row["policy"], row["against"], row["better"]) for row in rows] == [
        ("h2o+caote+protect(recent=0.5)", "h2o+protect(recent=0.5)", "yes"),
        ("h2o+caote(group='mean')+protect(recent=0.5)", "h2o+protect(recent=0.5)", "yes"),
        ("h2o+caote(group='mean')+protect(recent=0.5)", "h2o+caote+protect(recent=0.5)", "within noise"),
        ("snapkv+caote(target='output')@layer", "snapkv@layer", "no"),
    ]


def test_the_command_writes_table_json_and_picture(run_eval):
    arguments = ["needle", "--policies", "full,tova,tova+caote", "--budgets", "96", "--when", "prompt", *SMALL]
    data, table = run_eval(*arguments)
    assert data["command"].startswith("python -m evals needle --policies full,tova,tova+caote --budgets 96")
    assert data["seed"] == 0 and data["seconds"] > 0 and data["versions"]["kvjax"] == kvjax.__version__
    assert sorted(data["fingerprints"]) == ["config", "kvjax", "prose", "tokenizer", "weights"]
    settings = [(r["policy"], r["budget"], r["when"]) for r in data["results"]]
    assert settings == [
        ("full", None, "block"), *((policy, 96, "prompt") for policy in (run_settings.RECENCY, "tova", "tova+caote"))
    ]  # fmt: skip
    assert {r["samples"] for r in data["results"]} == {4}
    pairs = [(row["policy"], row["against"]) for row in data["comparisons"]]
    assert pairs == [("tova", "recency"), ("tova+caote", "recency"), ("tova+caote", "tova")]
    assert all(r["policy"] in table for r in data["results"])
