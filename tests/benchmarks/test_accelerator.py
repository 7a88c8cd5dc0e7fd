"""The parts of figures on a GPU or TPU: what fails stops nothing, what is done is not run again, nor lost by Ctrl-C."""

import argparse
import json
import sys
import time

import pytest

import evals.__main__
import evals.ruler
from benchmarks import __main__ as benchmarks
from benchmarks import accelerator, report
from benchmarks.accelerator import Part
from tests.benchmarks.test_report import STEPS, document
from tests.tiers import nightly

HERE = {"device": "NVIDIA H100", "platform": "gpu", "memory": 80e9, "cores": 2, "commit": "abc", "said": ""}
HERE |= {"versions": {"python": "3.12", "jax": "0.12"}}
MEASURE = "import json, sys; json.dump(json.loads(sys.argv[1]), open('decode.json', 'w')); print('a table')"


def python(name: str, code: str, *words: str, seconds: int = 60) -> Part:
    """A part that notes that it ran, and then runs the code."""
    return Part(name, seconds, [sys.executable, "-c", f"open('ran', 'a').write('{name} '); {code}", *words])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs parts, and returns the exit code and the names of those that really ran."""
    monkeypatch.setattr(accelerator, "probe", lambda: HERE)

    def of(found, *words):
        monkeypatch.setattr(accelerator, "parts", lambda here, flags: found)
        (tmp_path / "ran").unlink(missing_ok=True)
        status = benchmarks.main(["accelerator", "--out", str(tmp_path), *words])
        return status, (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []

    return of


def records(folder):
    return {r["part"]: r for r in json.loads((folder / "accelerator.json").read_text())["results"]}


def test_a_part_that_fails_or_hangs_stops_no_other_and_only_these_run_again(run, tmp_path, capsys, monkeypatch):
    measured = document("decode", STEPS, device="cpu")  # of a process that leaves the device to others
    found = [
        python("kernels", "print('no such\\rkernel'); raise SystemExit(3)"),
        python("decode", MEASURE, json.dumps(measured)),
        python("peers", "import subprocess, time; subprocess.Popen(['sleep', '77.25']); time.sleep(60)", seconds=1),
    ]
    started = time.monotonic()
    status, ran = run(found)
    assert status == 2 and ran == ["kernels", "decode", "peers"] and time.monotonic() - started < 30
    said = capsys.readouterr()
    assert "[1/3] kernels: python -c" in said.out and "a table" in said.out
    assert "not all parts are done (kernels: failed with exit code 3; peers: cut off)" in said.err
    kept = records(tmp_path)
    assert [kept[name]["result"] for name in kept] == ["failed with exit code 3", "done", "cut off"]
    assert kept["kernels"]["output"] == ["no such", "kernel"] and kept["decode"]["document"]["device"] == "NVIDIA H100"
    page = (tmp_path / "accelerator.md").read_text()
    assert "4.600" in page and "| 1.100 | met |" in page and "no such\nkernel" in page

    mended = python("kernels", "pass")
    assert run([mended, *found[1:]])[1] == ["kernels", "peers"]
    assert run([mended, found[1]]) == (0, [])
    assert "done before" in capsys.readouterr().out
    assert run([mended, found[1]], "--parts", "decode") == (0, [])
    assert set(records(tmp_path)) == {"kernels", "decode"}  # what is not asked for stays
    monkeypatch.setattr(accelerator, "code", lambda: "other")
    assert run([mended, found[1]]) == (0, ["kernels", "decode"])

    # The one file goes into docs/performance.md as each of its parts would.
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "h100.json").write_bytes((tmp_path / "accelerator.json").read_bytes())
    (own,) = report.documents(tmp_path / "results")
    assert own["file"] == "h100-decode" and "4.600" in report.section(own)


def test_ctrl_c_ends_the_part_and_keeps_what_was_done(run, tmp_path, capsys, ctrl_c):
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    found = [python("decode", "pass"), python("prefill", interrupt), python("kernels", "pass")]
    started = time.monotonic()
    assert run(found) == (130, ["decode", "prefill"]) and time.monotonic() - started < 30
    said = capsys.readouterr()
    assert "interrupted" in said.err and "[2/3] prefill: interrupted; the same command goes on" in said.out
    assert {name: r["result"] for name, r in records(tmp_path).items()} == {"decode": "done", "prefill": "interrupted"}
    assert run([found[0], python("prefill", "pass"), found[2]]) == (0, ["prefill", "kernels"])


def test_no_part_begins_when_the_time_is_over(run, tmp_path):
    found = [python("decode", "import time; time.sleep(60)"), python("prefill", "pass")]
    assert run(found, "--seconds", "1") == (2, ["decode"])
    assert [r["result"] for r in records(tmp_path).values()] == ["cut off", "not run: no time was left"]


def test_without_an_accelerator_nothing_is_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "probe", lambda: HERE | {"platform": "cpu", "said": "W: no driver"})
    assert benchmarks.main(["accelerator", "--out", str(tmp_path / "new")]) == 2
    assert "no GPU and no TPU here (W: no driver); give" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("tiny", [False, True], ids=["whole", "tiny"])
@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_every_part_s_command_has_the_flags_that_it_is_given(platform, tiny, monkeypatch, tmp_path):
    flags = argparse.Namespace(tiny=tiny, model="retriever", environment="peers/bin/python", seconds=560)
    found = accelerator.parts({**HERE, "platform": platform}, flags)
    assert len({part.name for part in found}) == len(found)
    assert ({part.seconds for part in found} == {flags.seconds}) == tiny  # each has a limit of its own but there
    seen = []
    for module in (*benchmarks.BENCHMARKS.values(), evals.ruler):
        monkeypatch.setattr(module, "command", seen.append)
    for part in found:
        main = {"benchmarks": benchmarks, "evals": evals.__main__}.get(part.words[2])
        if main is not None:
            assert main.main(part.words[3:]) == 0
            assert str(seen[-1].json) == f"{part.name}.json"
    assert len(seen) == {"gpu": 8, "tpu": 5, "cpu": 6}[platform]


@pytest.mark.parametrize(
    ("memory", "copies", "name"),
    [(80e9, 3, "llama-3.1-8b"), (48e9, 3, "llama-3.2-3b"), (48e9, 1, "llama-3.1-8b"), (20e9, 1, "llama-3.2-3b"),
     (1e9, 1, "llama-3.2-1b")],
)  # fmt: skip
def test_the_largest_shape_leaves_memory_for_its_cache(memory, copies, name):
    """8 billion parameters take 16 GB for each copy, and 4.3 GB stay free."""
    assert accelerator._largest_shape(memory, copies) == name


def test_the_last_lines_of_a_part_are_kept_without_its_bars(tmp_path):
    lines = [f"line {number}\r 50%|##" for number in range(100)]
    (tmp_path / "part.log").write_text("\n".join(lines) + "\n\n")
    kept = [f"line {number}" for number in range(100 - accelerator.LINES, 100)]
    assert accelerator._last_lines(tmp_path / "part.log") == kept
    assert accelerator._last_lines(tmp_path / "part.log", bars=True)[-2:] == ["line 99", " 50%|##"]


@nightly  # three minutes: the parts themselves, each in a process of its own
def test_all_parts_run_on_a_cpu(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("KVJAX_PEERS", raising=False)
    monkeypatch.setattr(accelerator, "with_torch", lambda: None)
    assert benchmarks.main(["accelerator", "--tiny", "--model", "retriever", "--out", str(tmp_path)]) == 0
    assert {r["result"] for r in records(tmp_path).values()} == {"done"} and len(records(tmp_path)) == 7
    assert "Whole prompts" in (tmp_path / "accelerator.md").read_text()
