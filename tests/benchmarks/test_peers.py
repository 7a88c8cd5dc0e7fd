"""The comparison with kvpress: what each side does, and what is said without an environment that has kvpress."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import models
from benchmarks import peer_timing, peers
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES
from tests.models import reference
from tests.tiers import matrix

RUN = {"prefill_seconds": 0.2, "decode_seconds": 0.02, "prefill_work": 0.3, "decode_work": 0.01}
RUN |= {"tokens": [1, 2, 3], "held": 8, "peak_bytes": 2**20}


@pytest.mark.parametrize("python", [None, sys.executable, "no/such/python"], ids=["none", "no kvpress", "no file"])
def test_without_kvpress_the_commands_that_make_its_environment_are_printed(python, monkeypatch, capsys):
    monkeypatch.delenv(peers.KVPRESS.variable, raising=False)
    assert main(["peers", *([] if python is None else ["--environment", python])]) == 2
    error = capsys.readouterr().err
    assert "`python3.11 -m venv peers && peers/bin/pip install torch transformers" in error
    assert "Traceback" not in error


def test_an_interpreter_without_llama_cpp_is_refused_with_what_makes_one():
    with pytest.raises(ValueError, match=r"cannot import llama_cpp .*install llama-cpp-python` .*--llama-cpp"):
        peers.checked_environment(sys.executable, peers.LLAMA_CPP)


def test_nobody_evicts_at_the_full_cache_and_llama_cpp_is_asked_there_alone():
    given = {"folder": "folder", "budget": None}
    found = peers.sides(given, "kvpress's python", "llama.cpp's python")
    assert list(found) == ["transformers", "ours", "llama.cpp", "llama.cpp, as stored"]
    assert [json.loads(arguments[-1])["budget"] for arguments in found.values()] == [None] * 4
    assert [json.loads(found[name][-1])["wide"] is None for name in list(found)[2:]] == [False, True]
    assert list(peers.sides({**given, "budget": 80}, "a", "b")) == [peers.PEER, *peers.OURS]


def test_rows_hold_medians_ratios_and_the_first_token_that_differs():
    ours = {"prefill_seconds": 0.1, "decode_seconds": 0.04, "tokens": [1, 2, 4]}
    runs = [{**RUN, **ours, "decode_seconds": seconds} for seconds in (0.03, 0.04, 0.09)]
    found = {peers.PEER: {"versions": {}, "runs": [RUN]}, "ours": {"versions": {}, "runs": runs}}
    first, second = peers.summary(found, prompt=50)
    assert first["prefill_ratio"] is None and first["same_tokens"] == 3
    assert (second["prefill_ratio"], second["decode_ratio"]) == pytest.approx((2, 0.5))
    assert second["decode"]["milliseconds"] == pytest.approx(40) and second["decode"]["lowest"] == pytest.approx(30)
    assert (second["prefill"]["tokens_a_second"], second["decode"]["tokens_a_second"]) == pytest.approx((500, 25))
    assert (second["same_tokens"], second["tokens"]) == (2, 3)
    assert "2 of 3" in peers.table([{"threads": 1, **row} for row in (first, second)], "decode")


@matrix
def test_our_side_answers_each_line(tmp_path, monkeypatch, capsys):
    config = SHAPES["tiny"]
    models.save(tmp_path, reference.decoder(config))
    given = {"folder": str(tmp_path), "prompt": [*range(100)], "budget": 70, "block": 64, "window": 64, "threads": 1}
    given |= {"new_tokens": 4, "device": "cpu", "dtype": "float32", **next(iter(peers.OURS.values()))}
    monkeypatch.setattr(sys, "argv", ["peers", json.dumps(given)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("run\nrun\n"))
    monkeypatch.setattr(peers, "keep_to", lambda cores: None)
    peers._work()
    ready, first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(ready["versions"]) == {"kvjax", "jax"}
    assert first["tokens"] == second["tokens"] and len(first["tokens"]) == 4
    assert first["held"] == 70 and first["prefill_seconds"] > 0 and first["decode_seconds"] > 0


NO_KVPRESS = f"{peers.KVPRESS.variable} names no environment with kvpress"


@pytest.mark.skipif(peers.KVPRESS.variable not in os.environ, reason=NO_KVPRESS)
def test_kvpress_holds_what_we_hold_and_says_what_we_say(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--shape", "tiny", "--prompt", "200", "--budget", "80,full", "--new-tokens", "4", "--repetitions", "1"]
    assert main(["peers", *sizes, "--threads", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["side"] for row in rows] == [peers.PEER, *peers.OURS, peers.FULL_PEER, peers.FULL_OURS]
    assert [row["held"] for row in rows] == [80] * 3 + [200] * 2
    assert all(row["same_tokens"] == row["tokens"] for row in (rows[1], rows[4]))


def test_times_are_those_of_the_prompt_and_of_a_step(monkeypatch):
    clock = iter([0.0, 2.0, 8.0])
    monkeypatch.setattr(peer_timing.time, "perf_counter", lambda: next(clock))
    found = peer_timing.timing(lambda: 1, lambda token: token + 1, steps=3)
    assert (found["prefill_seconds"], found["decode_seconds"], found["tokens"]) == (2.0, 2.0, [1, 2, 3, 4])


def test_the_most_that_a_process_held_is_not_that_of_the_one_that_started_it():
    held = np.ones(1 << 26)  # 512 MiB
    code = "from benchmarks.peer_timing import peak_resident; print(peak_resident())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=peers.ROOT, check=True)
    assert int(found.stdout) < held.nbytes <= peer_timing.peak_resident()
