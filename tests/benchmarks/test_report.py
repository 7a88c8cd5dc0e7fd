"""The report makes the same page of the same files, and says of each target what was measured."""

import json

import pytest

from benchmarks import report
from benchmarks.__main__ import main

VERSIONS = {"python": "3.12", "jax": "0.12"}


def step(policy: str, prompt: int, milliseconds: float, *, shape: str = "llama-3.1-8b", budget: int | None = 8192):
    return {
        "name": f"{shape} {policy} {prompt}", "kind": "decode", "shape": shape, "batch": 1, "budget": budget,
        "prompt": prompt, "policy": policy, "slots": 8320 if budget else prompt, "milliseconds": milliseconds,
        "low": milliseconds, "high": milliseconds, "floor_milliseconds": 4.0,
        "compiled_bytes": 30, "weight_bytes": 20, "cache_bytes": 10, "repetitions": 3,
    }  # fmt: skip


def operation(name: str, by: str, milliseconds: float):
    return {
        "name": f"{name} {by}", "operation": name, "case": "block", "shape": "llama-3.1-8b", "batch": 8,
        "implementation": by, "milliseconds": milliseconds, "low": milliseconds, "high": milliseconds,
        "floor_milliseconds": 0.09, "times_reference": 0.4 / milliseconds,
    }  # fmt: skip


def document(benchmark: str, rows: list, device: str = "NVIDIA H200"):
    limits = {"copy_bytes": 4e12, "product_flops": 8e14}
    settings = {"calls": 4, "repetitions": 3, "limits": limits}
    facts = {"device": device, "cores": 2, "versions": VERSIONS, "commit": "abc"}
    return {"benchmark": benchmark, "settings": settings, **facts, "results": rows}


STEPS = [
    step("h2o+caote", 8192, 4.4),
    step("h2o+caote", 1_048_576, 4.6),
    step("streaming", 8192, 4.35),
    step("none", 8192, 4.3),
    step("none", 131_072, 9.0, budget=None),
]
KERNELS = [operation("caote_topk", "reference", 0.4), operation("caote_topk", "pallas_gpu", 0.1)]


@pytest.fixture
def folders(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    (docs / "images").mkdir(parents=True)
    for name, rows in (("decode", STEPS), ("kernels", KERNELS)):
        (results / f"{name}.json").write_text(json.dumps(document(name, rows)))
    return results, docs


def run(folders) -> int:
    return main(["report", "--results", str(folders[0]), "--docs", str(folders[1])])


def test_the_same_files_give_the_same_page(folders):
    assert run(folders) == 0
    first = (folders[1] / "performance.md").read_text()
    assert run(folders) == 0
    assert (folders[1] / "performance.md").read_text() == first
    assert "| 4.00 | 4.40 | 1.10 | 2.3% |" in first and "NVIDIA H200" in first
    assert "| kernels.json | kernels |  |" in first
    for name in ("decode", "kernels"):
        assert f"images/performance-{name}.png" in first
        assert (folders[1] / "images" / f"performance-{name}.png").stat().st_size > 10_000


SIDE = {
    "side": "ours, once", "held": 256, "threads": 2, "peak_bytes": 2**30, "same_tokens": 33, "tokens": 33,
    "prefill": {"milliseconds": 2638.0}, "prefill_ratio": 1.38, "decode": {"milliseconds": 23.7}, "decode_ratio": 1.82,
}  # fmt: skip


def test_the_page_opens_with_the_newest_steps_on_a_gpu_then_peers_then_targets_then_all_files():
    older = [step("h2o+caote", 8192, 19.7), step("none", 131_072, 19.3, budget=None)]
    peers = document("peers", [SIDE, SIDE | {"threads": 1, "held": 11}], device="cpu")
    peers["settings"] |= {"model": "smollm2", "prompt": 2044, "policy": "snapkv", "dtype": "float32", "threads": [1, 2]}
    found = [
        document("decode", STEPS[:4]) | {"file": "new", "note": "Not timed since."},
        document("decode", older) | {"file": "old", "replaced_by": "new"},
        document("kernels", KERNELS, device="cpu") | {"file": "kernels"},
        peers | {"file": "peers"},
    ]
    text = report.page(found, [])
    told = [
        "## A decode step on a GPU", "Not timed since.", "took 19.7 ms", "19.3 ms",
        "eviction, at that time, saved memory, not time", "## Beside other libraries", "smollm2, a prompt of 2,044",
        "| ours, once | 256 | 2.64 | 1.38 | 23.7 | 1.82 | 1,024 | 33 of 33 |", "## Floors", "## Targets",
        "## All figures", "| old | decode | older than new |", "| kernels | kernels |  |",
    ]  # fmt: skip
    places = [text.index(one) for one in told]
    assert places == sorted(places) and "| 11 |" not in text


def test_show_prints_the_tables_of_a_file(folders, capsys):
    assert main(["show", str(folders[0] / "kernels.json")]) == 0
    said = capsys.readouterr().out
    assert "### Operations" in said and "4,000.0 GB/s" in said and "x reference" in said
    assert main(["show", "gpu_compile.json", "gpu_compile.json"]) == 0  # of benchmarks/results
    assert capsys.readouterr().out.count("A launch is a program of its own") == 1  # a legend is not repeated


def test_each_run_has_lines_of_its_own():
    (decode, (_, joined)) = report.plots(
        [document("decode", STEPS) | {"file": name} for name in ("first.json", "second.json")]
    ).popitem()
    assert decode == "decode" and {r["run"] for r in joined["results"]} == {"first", "second"}


def verdicts(found: list) -> dict[str, str]:
    lines = report.targets(found).splitlines()[2:]
    return {line.split("  ")[0]: " ".join(line.split()[-2:]) for line in lines}


def test_targets_are_met_missed_or_unmeasured():
    said = verdicts([document("decode", STEPS), document("kernels", KERNELS)])
    assert said["8B decode, batch 1, budget 8k: time over its floor"] == "1.100 met"
    assert said["8B decode: longest prompt over shortest"] == "1.045 missed"
    assert said["8B decode: share of scoring and eviction"] == "0.023 met"
    assert said["caote_topk, S 8k, K 8, B 8: share of copy bandwidth"] == "0.900 met"
    assert said["caote_topk, the same: times the reference"] == "4.000 met"
    assert said["8B block of 128: share of scoring and eviction"].endswith("unmeasured")


def fed(budget: int | None, milliseconds: float, prompt: int = 131_072):
    return step("none" if budget is None else "h2o", prompt, milliseconds, budget=budget) | {"kind": "feed"}


def test_targets_compare_what_they_name_and_hold_at_their_bound():
    of_one = lambda name, by, ms, case: operation(name, by, ms) | {"case": case, "batch": 1}  # noqa: E731
    rows = [fed(8192, 1.0, prompt=8192), fed(None, 900.0), fed(8192, 300.0)]
    rows += [operation("caote_topk", "pallas_gpu", 0.1) | {"times_reference": 3}]
    rows += [of_one("cache_attention", by, ms, "dense") for by, ms in (("reference", 8.0), ("pallas_gpu", 5.0))]
    rows += [of_one("select_attention", "pallas_gpu", ms, "25%, a set a KV head") for ms in (2.0, 2.5)]
    rows += [of_one("mse_logits", by, ms, "all pairs") for by, ms in (("materialised", 6.0), ("reference", 2.0))]
    said = verdicts([document("kernels", rows)])
    assert said["caote_topk, the same: times the reference"] == "3.000 met"
    assert said["prefill of 128k, budget 8k: full cache's time over ours"] == "3.000 met"
    assert said["select_attention at 25% of 128k: dense attention's time over ours"] == "2.500 met"
    assert said["loss at T 4k with gradients: materialised time over ours"] == "3.000 met"


def test_beside_kvpress_the_worst_number_of_threads_counts():
    rows = [{"side": "ours, once", "prefill_ratio": ratio, "decode_ratio": 2 * ratio} for ratio in (1.5, 0.9)]
    said = verdicts([document("peers", rows, device="cpu")])
    assert said["prefill, evicting once: kvpress' time over ours, 1 or 2 threads"] == "0.900 missed"
    assert said["decode after it: kvpress' time over ours, 1 or 2 threads"] == "1.800 met"


def test_a_cpu_s_figures_answer_no_target_of_a_gpu():
    said = verdicts([document("decode", STEPS, device="cpu")])
    assert all(verdict.endswith("unmeasured") for verdict in said.values())
