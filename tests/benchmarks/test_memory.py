"""The memory benchmark counts what it says."""

import json

import pytest

from benchmarks import memory
from benchmarks.__main__ import main
from tests.tiers import matrix


@matrix
def test_uniform_slots_are_the_counted_bytes_and_pages_come_close():
    uniform = memory.compiled_bytes("tova", 1_024, 0.25, 64, 16)
    assert uniform["ratio"] == pytest.approx(1, abs=1e-3)
    assert uniform["slots"] == 16 * 8 * 256
    pages = memory.compiled_bytes("tova(heads='group')@model", 1_024, 0.25, 64, 16)
    assert uniform["ratio"] < pages["ratio"] < 1.1
    assert pages["decode_cache_bytes"] == pytest.approx(pages["array_bytes"], rel=1e-3)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "memory.json"
    arguments = ["--policies", "streaming", "--shares", "0.5", "--prompt", "256", "--block", "32", "--json", str(out)]
    assert main(["memory", *arguments]) == 0
    result = json.loads(out.read_text())["results"][0]
    assert result["budget"] == 128 and f"{result['slots']:,}" in capsys.readouterr().out


def test_a_bad_share_is_one_sentence(capsys):
    assert main(["memory", "--shares", "2.5"]) == 2
    assert "2.5" in capsys.readouterr().err
