"""The picture of all methods reads bytes and recall as the studies wrote them."""

import json

from evals.__main__ import main
from evals.experiments.field import Place, best, places

FULL = dict(policy="full", budget=None, question="known", cache_bytes=1000, recall=0.9)


def run(policy, share, recall, question="known", dtype=None):
    return dict(policy=policy, budget=8, question=question, cache_bytes=1000 * share, recall=recall, cache_dtype=dtype)


def test_bytes_are_shares_of_the_full_cache_of_floats():
    full = {"float32": 2000, "bfloat16": 1000, "int8": 530}
    study = {"results": [FULL | {"cache_dtype": dtype, "cache_bytes": size} for dtype, size in full.items()]}
    study["results"][0]["cache_dtype"] = None  # the model's own
    study["results"].append(run("h2o", 0.14, 0.5, dtype="int8"))
    assert places(study) == [
        Place("full", "known", 0.53, 0.9, True), Place("h2o", "known", 0.14, 0.5, True)
    ]  # fmt: skip


def test_the_best_places_are_those_that_fewer_bytes_do_not_reach():
    found = [Place(name, "known", share, recall, False) for name, share, recall in
             (("a", 0.1, 0.2), ("b", 0.1, 0.3), ("c", 0.2, 0.3), ("d", 0.4, 0.8), ("e", 0.5, 0.7))]  # fmt: skip
    assert [place.method for place in best(found)] == ["b", "d"]


def test_the_command_reads_several_studies_and_draws_them(tmp_path, capsys):
    unknown = FULL | {"question": "unknown"}
    measured = run("duo(file='a/b.npy',sinks=4)", 0.2, 0.1, "unknown")
    one = {"study": "methods", "results": [FULL, unknown, run("h2o", 0.2, 0.4), measured]}
    other = {
        "study": "eight-bits",
        "results": [FULL | {"cache_dtype": "bfloat16"}, run("tova", 0.1, 0.6, dtype="int8")],
    }
    for name, study in (("one", one), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(study))
    picture = tmp_path / "field.png"
    files = [str(tmp_path / "one.json"), str(tmp_path / "other.json")]
    assert main(["field", *files, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed[2:4]] == [
        ["question", "known", "10%", "0.60", "tova,", "eight", "bits"],
        ["question", "unknown", "20%", "0.10", "duo(file,sinks=4)"],
    ]
    assert picture.stat().st_size > 10_000
