"""The comparison with kvpress: what each side does, and what is said without an environment that has kvpress."""

import io
import json
import os
import sys

import pytest
from flax import nnx

import models
from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES

RUN = {"prefill_seconds": 0.2, "decode_seconds": 0.02, "prefill_work": 0.3, "decode_work": 0.01}
RUN |= {"tokens": [1, 2, 3], "held": 8, "peak_bytes": 2**20}


@pytest.mark.parametrize("python", [None, sys.executable, "no/such/python"], ids=["none", "no kvpress", "no file"])
def test_without_kvpress_the_commands_that_make_its_environment_are_printed(python, monkeypatch, capsys):
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    assert main(["peers", *([] if python is None else ["--environment", python])]) == 2
    error = capsys.readouterr().err
    assert "`python3.11 -m venv peers && peers/bin/pip install torch transformers" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "100", "--budget", "100"], "a prompt of 100 tokens fits the budget of 100"),
        (["--budget", "64"], "--budget is 64; give at least 65"),
        (["--new-tokens", "1"], "--new-tokens is 1"),
        (["--shape", "gpt"], "there is no shape 'gpt'"),
        (["--threads", "1,0"], "threads"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(arguments, message, capsys):
    assert main(["peers", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_hold_medians_ratios_and_the_first_token_that_differs():
    ours = {"prefill_seconds": 0.1, "decode_seconds": 0.04, "tokens": [1, 2, 4]}
    runs = [{**RUN, **ours, "decode_seconds": seconds} for seconds in (0.03, 0.04, 0.09)]
    found = {peers.PEER: {"versions": {}, "runs": [RUN]}, "ours": {"versions": {}, "runs": runs}}
    first, second = peers.summarised(found)
    assert first["prefill_ratio"] is None and first["same_tokens"] == 3
    assert (second["prefill_ratio"], second["decode_ratio"]) == pytest.approx((2, 0.5))
    assert second["decode"]["milliseconds"] == pytest.approx(40) and second["decode"]["lowest"] == pytest.approx(30)
    assert (second["same_tokens"], second["tokens"]) == (2, 3)
    assert "2 of 3" in peers.table([{"threads": 1, **row} for row in (first, second)])


@pytest.mark.parametrize("side", peers.OURS)
def test_our_side_answers_each_line(side, tmp_path, monkeypatch, capsys):
    config = SHAPES["tiny"]
    models.save(tmp_path, models.Decoder(config, rngs=nnx.Rngs(0)))
    given = {"folder": str(tmp_path), "prompt": [*range(100)], "budget": 70, "block": 64, "window": 64, "threads": 1}
    given |= {"new_tokens": 4, "device": "cpu", "dtype": "float32", **peers.OURS[side]}
    monkeypatch.setattr(sys, "argv", ["peers", json.dumps(given)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("run\nrun\n"))
    monkeypatch.setattr(peers, "keep_to", lambda cores: None)
    peers._work()
    ready, first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(ready["versions"]) == {"kvjax", "jax"}
    assert first["tokens"] == second["tokens"] and len(first["tokens"]) == 4
    assert first["held"] == 70 and first["prefill_seconds"] > 0 and first["decode_seconds"] > 0


@pytest.mark.skipif(peers.VARIABLE not in os.environ, reason=f"{peers.VARIABLE} names no environment with kvpress")
def test_kvpress_holds_what_we_hold_and_says_what_we_say(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--shape", "tiny", "--prompt", "200", "--budget", "80", "--new-tokens", "4", "--repetitions", "1"]
    assert main(["peers", *sizes, "--threads", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["side"] for row in rows] == [peers.PEER, *peers.OURS]
    assert [row["held"] for row in rows] == [80] * 3
    assert rows[1]["same_tokens"] == rows[1]["tokens"]
