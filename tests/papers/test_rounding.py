"""Ways of rounding, by hand; the perplexity of the library's own, against a cache; what the command writes."""

import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from evals import answering, perplexity, run_settings
from papers.__main__ import main
from papers.kivi import rounding
from papers.kivi.rounding import PAIRS, PLAIN, ROUNDINGS
from tests.evals.conftest import TEXT
from tests.models.tiny import decoder
from tests.tiers import nightly

ROOT = Path(__file__).resolve().parents[2]


def test_bytes_are_those_of_numbers_and_scales():
    sizes = [sum(ROUNDINGS[name].size(64) for name in pair) for pair in PAIRS]
    assert sizes == [256, 256, 136, 196, 196, 136, 196, 196, 136, 72, 80, 108, 108, 76]


@pytest.mark.parametrize("name", [name for name in ROUNDINGS if name != PLAIN])
def test_rows_move_by_half_a_step_at_most_and_zeros_stay(name):
    rounded, rows = jax.jit(ROUNDINGS[name].rounded), np.random.default_rng(0).normal(size=(1, 2, 128, 64))
    rows = rows.astype(np.float32)
    assert not np.asarray(rounded(0 * rows)).any()
    error = np.abs(np.asarray(rounded(rows)) - rows)
    if "channel" in name:
        parts = rows.reshape(1, 2, 2, 64, 64).swapaxes(3, 4)  # the numbers that share a scale, last
        error = error.reshape(1, 2, 2, 64, 64).swapaxes(3, 4)
    else:
        size = 32 if "groups" in name else 64
        parts, error = rows.reshape(-1, size), error.reshape(-1, size)
    largest, spread = np.abs(parts).max(-1, keepdims=True), np.ptp(parts, axis=-1, keepdims=True)
    if name in ("bfloat16", "float16"):
        steps = np.abs(parts) * 2.0 ** {"bfloat16": -8, "float16": -11}[name]
    elif name == "float8_e4m3fn":
        steps = np.maximum(np.abs(parts) / 16, largest / 448 / 512)
    elif "int8" in name or name == "4 bits":
        steps = largest / (127 if "int8" in name else 7) / 2
    else:
        steps = spread / 30 + largest * 2e-3  # and what float16 makes of the smallest number and of the step
    assert (error <= 1.001 * steps + 1e-7).all() and error.max() > 0.2 * steps.max()


def test_a_block_of_keys_that_is_not_full_is_read_in_bfloat16():
    arrays = np.random.default_rng(0).normal(size=(3, 1, 70, 2, 8)).astype(np.float32)
    by_channel, floats = ROUNDINGS["int8, a scale per channel and 64 slots"], ROUNDINGS["bfloat16"]
    out, plain = (
        np.asarray(jax.jit(lambda q, k, v, of_keys=of_keys: rounding.attention(q, k, v, of_keys, floats))(*arrays))
        for of_keys in (by_channel, floats)
    )
    np.testing.assert_allclose(out[:, :63], plain[:, :63], atol=1e-6)  # the query of slot 63 is the first of a block
    assert (np.abs(out[:, 63:] - plain[:, 63:]).max(axis=(0, 2, 3)) > 1e-5).all()


def test_the_last_half_of_each_chunk_is_counted_apart(monkeypatch):
    """The token at place i has the log-probability -i; the model says nothing."""
    monkeypatch.setattr(
        rounding, "_log_probabilities", lambda *given, **of: jax.numpy.outer(-np.arange(1.0, 9), np.ones(256))
    )
    chunks = np.random.default_rng(0).integers(0, 256, (2, 9))
    (plain,) = rounding.measure(decoder(), chunks, [])
    assert (plain["by_chunk"], plain["late"]["by_chunk"]) == ([4.5, 4.5], [6.5, 6.5])


def test_the_librarys_rounding_costs_what_its_cache_costs(tiny):
    model, tokenizer, _ = tiny
    chunks = perplexity.make_chunks(tokenizer, TEXT, 24, limit=3)
    plain, eight = rounding.measure(model, chunks, [("int8", "float8_e4m3fn")])
    full = perplexity.losses(model, chunks)
    np.testing.assert_allclose(plain["by_chunk"], full.by_chunk, rtol=1e-5)
    setting = run_settings.Setting("full", None, "block", "unknown", cache_dtype="int8/float8_e4m3fn")
    cached = perplexity.policy_losses(model, chunks, setting, full=full, feed=answering.Feed(8, 4))
    np.testing.assert_allclose(eight["by_chunk"], cached.by_chunk, atol=1e-5)
    np.testing.assert_allclose(eight["kl_by_chunk"], cached.divergence, rtol=0.05, atol=2e-7)
    late = perplexity.policy_losses(model, chunks, setting, full=full, feed=answering.Feed(8, 4), counted=12)
    np.testing.assert_allclose(eight["late"]["by_chunk"], late.by_chunk, atol=1e-5)
    assert (plain["key"], plain["kl"], eight["bytes"]) == (PLAIN, 0, 24)


@nightly  # fourteen pairs of roundings
def test_the_command_measures_several_texts_and_writes_them(tiny_folder, tmp_path, capsys):
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file in files:
        file.write_text(TEXT)
    path = tmp_path / "rounding.json"
    given = ["--model", str(tiny_folder), "--text", *map(str, files), "--chunk", "24", "--sequences", "2"]
    assert main(["rounding", *given, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["chunks"] == {str(file): 2 for file in files} and set(map(str, files)) < set(data["fingerprints"])
    assert [(r["key"], r["value"]) for r in data["results"]] == 2 * [(PLAIN, PLAIN), *PAIRS]
    assert all(r["by_chunk"] != data["results"][0]["by_chunk"] for r in data["results"][1 : 1 + len(PAIRS)])
    page = runpy.run_path(str(ROOT / "docs/tables.py"), run_name="tables")["roundings"](str(path)).splitlines()
    assert page[0].startswith("2 chunks of 24 tokens of each text") and len(page) == 4 + len(PAIRS)
    assert page[6].startswith("| int8 | int8 | 24 | ") and page[6].count("%") == 2
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert printed.count(["float8_e4m3fn"] * 2) == 2 and [f"{files[1]}:"] in printed
