"""What is compiled for TPUs that are not at hand, and what is said where it cannot be."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import tpu_compile
from benchmarks.__main__ import main
from benchmarks.shapes import shape
from benchmarks.targets import tpu_chips
from tests.tiers import matrix

TINY = ["--shapes", "tiny", "--split", "tiny", "--budget", "256", "--block", "64", "--prompt", "512"]


@pytest.fixture
def no_libtpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    tpu_chips.cache_clear()


def test_without_libtpu_one_sentence_says_what_to_install(no_libtpu, capsys):
    assert main(["tpu_compile", *TINY]) == 2
    error = capsys.readouterr().err
    assert "libtpu is not installed; install it with: pip install -e '.[tpu]'" in error and "Traceback" not in error


def test_chips_that_the_heads_leave_split_experts(monkeypatch):
    monkeypatch.setattr(tpu_compile, "tpu_chips", lambda topology: tuple(jax.devices()[:8]))
    axes = {name: tpu_compile.mesh_of("v5e:2x4", shape(name)).shape for name in ("llama-3.1-8b", "qwen3-30b-a3b")}
    assert axes == {"llama-3.1-8b": dict(data=1, tensor=8), "qwen3-30b-a3b": dict(data=1, expert=2, tensor=4)}


def test_bytes_of_a_chip_are_those_of_its_part():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "tensor"))
    split = jax.ShapeDtypeStruct((2, 8), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "tensor")))
    whole = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    assert tpu_compile.chip_bytes({"split": split, "whole": whole}) == 2 * 2 * 2 + 3 * 4


def test_a_program_that_does_not_compile_says_why_and_has_a_row():
    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\n  used 17 of 16 GB\n\nmore\nand more")

    found = {"shape": "big", "program": "step", "topology": "v5e:2x2", "chips": 1, **tpu_compile.describe(fails)}
    assert found["reason"] == "RESOURCE_EXHAUSTED: out of memory used 17 of 16 GB"
    assert "big, step, 1 of v5e:2x2: RESOURCE_EXHAUSTED" in tpu_compile.table([found])
    assert "big, step, 1 of v5e:2x2 (2 more like it): RESOURCE_EXHAUSTED" in tpu_compile.table([found] * 3)


@pytest.mark.tpu
def test_an_unknown_topology_is_refused(capsys):
    pytest.importorskip("libtpu")
    assert main(["tpu_compile", *TINY, "--topologies", "v99:1x1"]) == 2
    assert "unknown TPU topology 'v99:1x1'" in capsys.readouterr().err


@matrix
@pytest.mark.tpu
def test_programs_hold_kernels_and_split_models_gather_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("libtpu")
    some = {name: tpu_compile.OPERATIONS[name] for name in ("caote_topk", "cache_attention, a block")}
    monkeypatch.setattr(tpu_compile, "OPERATIONS", some)
    out = tmp_path / "out.json"
    monkeypatch.setattr(tpu_compile, "tpu_chips", lambda topology: tpu_chips(topology)[:2])  # as many as KV heads
    assert main(["tpu_compile", *TINY, "--topologies", "v5e:2x2", "--json", str(out)]) == 0
    assert "Compiled, not timed" in capsys.readouterr().out
    written = json.loads(out.read_text())
    found = {(row["program"], row["chips"]): row for row in written["results"]}
    assert written["settings"]["timed"] is False and all(row["compiles"] for row in found.values())
    assert [found["caote_topk", 1]["kernels"], found["cache_attention, a block", 1]["kernels"]] == [1, 2]
    for chips in (1, 2):
        step, block = (found[f"{name}, snapkv+caote", chips] for name in ("decode step", "block of 64"))
        assert (step["kernels"], block["kernels"]) == (2, 3)
        assert set(step["collectives"]) == set(block["collectives"]) == ({"all-reduce"} if chips == 2 else set())
        assert step["argument_bytes"] >= step["array_bytes"] > 0
    assert found["decode step, snapkv+caote", 2]["array_bytes"] < 0.6 * step_bytes(found)


def step_bytes(found):
    return found["decode step, snapkv+caote", 1]["array_bytes"]
