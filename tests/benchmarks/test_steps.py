"""Steps started as after a long prompt are the decoder's steps; what is compiled for TPUs that are not at hand."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from benchmarks import steps, tpu_compile
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, shape
from benchmarks.targets import tpu_chips
from models.steps import DecodeState, decode_phase, forward
from tests.tiers import matrix

CONFIG = SHAPES["tiny"]
EVICTING = steps.Setting(CONFIG, "h2o+caote", 16, block=8)
FREE = 2**30


@pytest.fixture(scope="module")
def model():
    return steps.random_model(CONFIG, jnp.float32, free=FREE)


def test_heads_hold_distinct_places_all_over_the_prompt():
    shape = steps.shapes(EVICTING, 1_000_000)[1].cache
    cache = steps.after_prompt(shape, 1_000_000, 16)
    for head in np.asarray(cache.position).reshape(-1, 24):
        live = head[head >= 0]
        assert len(set(live.tolist())) == 16 and live.max() > 900_000 and live.min() < 100_000
    assert np.asarray(cache.next_position).tolist() == [1_000_000]
    state = jax.tree.leaves([own.state for own in cache.layers])
    assert state and all(np.isfinite(leaf).all() for leaf in state)


def test_a_full_cache_stands_in_order():
    setting = steps.Setting(CONFIG, None, None, block=8)
    cache = steps.after_prompt(steps.shapes(setting, 40)[1].cache, 40, 40)
    assert cache.position[0, 0, 0].tolist() == [*range(40), *[-1] * 8]


@matrix
def test_a_program_is_so_many_of_the_decoder_s_steps(model):
    program = steps.program("decode", EVICTING, 100, 3, free=FREE)
    projection = models.output_projection(model, "h2o+caote")
    run = dataclasses.replace(program.run, model=model, projection=projection)
    make = lambda: steps.after_prompt(program.cache, 100, 16)  # noqa: E731
    after, logits = program.compiled(run, make(), program.tokens)
    state = DecodeState(make())
    for _ in range(3):
        hidden, state = forward(
            run, state, program.tokens, state.cache.next_position[:, None], decode_phase(run.plan, 1)
        )
    expected, cache = model.logits(hidden[:, 0]), state.cache
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.position, make().position)  # started anew
    for own, other in zip(after.layers, cache.layers, strict=True):
        np.testing.assert_allclose(own.value, other.value, rtol=1e-4, atol=1e-5)


def test_contenders_have_the_same_slots_and_one_program_serves_every_prompt_under_a_budget():
    for policy in ("h2o+caote", "streaming", None):
        setting = steps.Setting(CONFIG, policy, 16, block=8)
        assert steps.shapes(setting, 1_000_000)[1].cache.slots_shape == (2, 1, 2, 24)
    (run, state), (other, of_other) = (steps.shapes(EVICTING, prompt) for prompt in (100, 1_000_000))
    assert state == of_other and run.plan == other.plan


@matrix
def test_a_second_prompt_compiles_nothing(model):
    first, second = (steps.feed(model, EVICTING, prompt, steps=2) for prompt in (24, 48))
    assert first.compilations <= 1 and second.compilations == 0


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
    monkeypatch.setattr(tpu_compile, "OPERATIONS", ("caote_topk",))
    out = tmp_path / "out.json"
    monkeypatch.setattr(tpu_compile, "tpu_chips", lambda topology: tpu_chips(topology)[:2])  # as many as KV heads
    assert main(["tpu_compile", *TINY, "--topologies", "v5e:2x2", "--json", str(out)]) == 0
    assert "Compiled, not timed" in capsys.readouterr().out
    written = json.loads(out.read_text())
    found = {(row["program"], row["chips"]): row for row in written["results"]}
    assert written["settings"]["timed"] is False and all(row["compiles"] for row in found.values())
    assert [found[f"caote_topk, {case}", 1]["kernels"] for case in ("block", "block, fast", "decode")] == [1, 1, 1]
    for chips in (1, 2):
        step, block = (found[f"{name}, snapkv+caote", chips] for name in ("decode step", "block of 64"))
        assert (step["kernels"], block["kernels"]) == (2 * CONFIG.num_layers, 3 * CONFIG.num_layers)
        assert set(step["collectives"]) == set(block["collectives"]) == ({"all-reduce"} if chips == 2 else set())
        assert step["argument_bytes"] >= step["array_bytes"] > 0
    assert found["decode step, snapkv+caote", 2]["array_bytes"] < 0.6 * step_bytes(found)


def step_bytes(found):
    return found["decode step, snapkv+caote", 1]["array_bytes"]
