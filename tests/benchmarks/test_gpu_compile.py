"""What a program launches on a GPU, read from XLA's lists of a small one, and programs lowered for a GPU."""

import argparse
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from benchmarks import gpu_compile, gpu_limits, launches, machine_code, steps
from benchmarks.__main__ import main
from benchmarks.measure import RESULTS
from benchmarks.shapes import SHAPES
from benchmarks.targets import gpu_chip
from models.config import Rope
from tests.tiers import nightly

MIB = 2**20
# x = tanh(x + sum(w[i])) three times, a sort of x, and y in bfloat16; compiled for an H100
PROGRAM = Path(__file__).with_name("gpu_program.txt").read_text().split("\n====\n")


def test_each_turn_of_a_loop_counts_and_only_what_is_moved():
    found = launches.launches(*PROGRAM)
    assert [(x.what, x.name, x.times, x.blocks) for x in found] == [
        ("copy", "copy.9", 1, None),
        ("copy", "copy.8", 1, None),
        ("reduce", "input_reduce_fusion", 3, 256),
        ("elementwise", "loop_add_fusion", 3, 1),
        ("elementwise", "loop_tanh_fusion", 3, 8),
        ("copy", "fusion", 1, None),  # a sort is in place
        ("sort", "fusion", 1, 1),
        ("convert", "wrapped_convert", 1, 2048),
    ]
    by_name = {x.name: x for x in found}
    assert by_name["input_reduce_fusion"].moved == 4 * MIB + 4 + 4 * 1024  # one of three matrices, its number, the sums
    assert by_name["wrapped_convert"].moved == 6 * MIB
    assert launches.weights_moved(found) == 6 * MIB
    assert by_name["loop_tanh_fusion"].seconds == pytest.approx(3 * (2e-6 + 3 * 4096 / (4e12 * 8 / 132)))
    assert gpu_compile.figures(found)["launches"] == 14 and not any(x.in_graph for x in found)


def test_what_stands_in_a_graph_is_told_apart():
    text, sequence, names = PROGRAM
    held = sequence.replace("009: kCustomKernel", "020: kCommandBuffer [x] \n  009: kCustomKernel")
    assert [x.name for x in launches.launches(text, held, names) if x.in_graph] == ["fusion"]


PALLAS = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %one = f32[8]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/scores/pallas_call"}
  ROOT %two = f32[8]{0} custom-call(%one), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/attention/mpmd_map"}, backend_config={kernel_hash = "\\A1\\22z", module = "x"}
}
"""  # noqa: E501
SEQUENCE = """
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source | next=002 (1)] scores_1 grid: [8, 9, 1] threads: [128, 1, 1]  shared_memory: 16 bytes
    002: kCustomCall   [prev=001 (1) | sink] kCustomCall
"""


def test_pallas_kernels_are_told_by_their_route_and_by_what_names_their_code():
    names = 'annotation: "one" thunk_id: 1\nannotation: "two" thunk_id: 2'
    triton, mosaic = launches.launches(PALLAS, SEQUENCE, names)
    assert (triton.what, triton.by, triton.code, triton.blocks, triton.shared) == (
        "kernel scores", "Triton", "scores_1", 72, 16
    )  # fmt: skip
    assert (mosaic.what, mosaic.by, mosaic.code, mosaic.blocks) == ("kernel attention", "Mosaic", r"\A1\22z", None)
    assert triton.in_graph and mosaic.in_graph


def test_a_model_of_few_layers_has_each_kind_that_the_model_has():
    for name, numbers in {
        "llama-3.1-8b": [32],
        "qwen2.5-7b": [28],
        "qwen3-30b-a3b": [48],
        "gemma-3-4b": [29, 5],
    }.items():
        assert list(gpu_compile.kinds(SHAPES[name]).values()) == numbers
    assert gpu_compile.with_layers(SHAPES["llama-3.1-8b"], 2).sliding_windows == (None, None)
    both = gpu_compile.with_layers(SHAPES["gemma-3-4b"], 1, 2)
    assert both.sliding_windows == (1024, None, None) and both.ropes == (Rope(), None, None) and both.num_layers == 3


def test_a_layer_is_the_mean_over_all_and_a_step_has_all(monkeypatch):
    def compiled(lower, known):
        windows = lower.args[0].config.sliding_windows
        each = 10 + sum(3 if window else 5 for window in windows)
        found = [launches.Launch("copy", "copy", each, True, 1, 0)]
        return gpu_compile.Compiled(found, [], len(windows))

    monkeypatch.setattr(gpu_compile, "compiled", compiled)
    found = gpu_compile.describe(steps.Setting(SHAPES["gemma-3-4b"], None, 64), "decode", None, {})
    assert found["layer"]["launches"] == pytest.approx((29 * 3 + 5 * 5) / 34)
    assert found["step"]["launches"] == 10 + 29 * 3 + 5 * 5 and found["of_layer"] == {"copy": pytest.approx(112 / 34)}


def test_what_a_kernel_updates_in_place_is_not_moved():
    text = """ENTRY %main (a: f32[1024,1024], b: f32[8]) -> (f32[1024,1024], f32[4]) {
  %a = f32[1024,1024]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %call = (f32[1024,1024]{1,0}, f32[4]{0}) custom-call(%a, %b), output_to_operand_aliasing={{0}: (0, {})}
}"""
    sequence, names = "001: kCustomKernel [source | sink] call grid: [8, 1, 1]", 'annotation: "call" thunk_id: 1'
    assert [x.moved for x in launches.launches(text, sequence, names)] == [4 * (8 + 4)]


def test_of_a_conditional_the_shortest_branch_counts():
    sequence = """000: kCommandBuffer [source | sink]
    001: kConditional [source | next=009 (1)]
      false_branch:
        002: kCopy [source | sink] kCopy
        003: kCopy [source | sink] kCopy
      true_branch:
        004: kCopy [source | sink] kCopy
    009: kCopy [prev=001 (1) | sink] kCopy
"""
    names = "\n".join(f'annotation: "copy.{n}" thunk_id: {n}' for n in (2, 3, 4, 9))
    assert [x.name for x in launches.launches("", sequence, names)] == ["copy.4", "copy.9"]


def test_rows_that_a_kernel_does_not_read_are_not_moved():
    text = """ENTRY %main (x: bf16[1,64], parts: f32[4,8,64], w: bf16[64]) -> (bf16[1,64], bf16[1,64]) {
  %x = bf16[1,64]{1,0} parameter(0)
  %parts = f32[4,8,64]{2,1,0} parameter(1)
  %w = bf16[64]{0} parameter(2)
  ROOT %call = (bf16[1,64]{1,0}, bf16[1,64]{1,0}) custom-call(%x, %parts, %w), metadata={op_name="jit(f)/add_rms_norm/pallas_call"}, custom_call_target="__gpu$xla.gpu.triton"
}"""  # noqa: E501
    sequence, names = "001: kCustomKernel [source | sink] call grid: [1, 1, 1]", 'annotation: "call" thunk_id: 1'
    (found,) = launches.launches(text, sequence, names)
    assert (found.what, found.moved) == ("kernel add_rms_norm", 4 * 4 * 64 + 2 * 4 * 64)


@pytest.mark.parametrize(("program", "kernels"), [("decode", 18), ("block", 16)])
def test_programs_lower_with_a_layer_s_kernels(program, kernels):
    """Two functions, of the first layer and of one behind it, whose input is unsummed; they share one behind attention.

    Heads, a token's insertion, attention, its sums or statistics, sums so far, outputs, scores, selection, norm: all by
    Triton.
    """
    setting = steps.Setting(SHAPES["tiny"], "h2o+caote", 64, dtype=jnp.bfloat16)
    text = gpu_compile.lowered(setting, program).as_text()
    assert (text.count("@__gpu$xla.gpu.triton"), text.count("@mosaic_gpu_v2")) == (kernels, 0)


def test_comments_docstrings_and_tpu_kernels_are_no_part_of_the_kernels_code(tmp_path):
    def sources(code: str, tpu: str = "") -> dict[str, str]:
        folder = tmp_path / "kernels" / "operation"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kernels" / "shared.py").write_text("WARPS = 4\n")
        (folder / "gpu.py").write_text(code)
        (folder / "tpu.py").write_text(tpu)
        return gpu_compile.kernel_sources(tmp_path / "kernels")

    first = sources("def f(x):\n    return x + 1\n")
    assert first.keys() == {"kernels", "kernels/operation"}
    assert sources('"""A kernel."""\ndef f(x):  # adds\n    """Add."""\n\n    return (x + 1)\n', "TILE = 8") == first
    other = sources("def f(x):\n    return x + 2\n")
    assert other["kernels"] == first["kernels"] and other["kernels/operation"] != first["kernels/operation"]


COMMITTED = json.loads((RESULTS / "gpu_compile.json").read_text())
AGAIN = (
    "compile anew with `python -m benchmarks gpu_compile --json`, then `python -m benchmarks report` "
    "(it needs no GPU, but pip install -e '.[cuda]')"
)


def test_the_committed_figures_are_those_of_the_kernels_code():
    now, then = gpu_compile.kernel_sources(), COMMITTED["fingerprints"]
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    assert not changed, f"benchmarks/results/gpu_compile.json is older than the code of {', '.join(changed)}: {AGAIN}."


def test_all_programs_that_are_asked_for_are_in_the_committed_figures():
    flags = argparse.ArgumentParser()
    gpu_compile.add_flags(flags)
    names = set(map(gpu_limits.program_name, gpu_compile.asked(flags.parse_args([]))))
    assert names == {gpu_limits.program_name(r) for r in COMMITTED["results"] if "policy" in r}, AGAIN


HAS_PLUGIN = any(
    importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (12, 13)
)
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's plugin for CUDA (4.6 GB): pip install '.[cuda]'")


@nightly  # minutes, and the plugin
@needs_plugin
@pytest.mark.parametrize("row", [r for r in COMMITTED["results"] if "policy" in r], ids=gpu_limits.program_name)
def test_programs_compiled_anew_launch_what_the_committed_figures_say(row):
    found = gpu_compile.describe(gpu_compile.setting_of(row), row["program"], gpu_chip(), MOSAIC)
    assert "refused" not in found, found
    assert found["layer"]["launches"] == row["layer"]["launches"], AGAIN
    assert found["of_layer"] == row["of_layer"], AGAIN


MOSAIC: machine_code.Mosaic = {}  # a process compiles each of Mosaic's kernels once


@nightly  # the plugin
@needs_plugin
def test_the_command_writes_a_layer_s_launches_and_its_kernels_code(tmp_path):
    line = ["--shapes", "tiny", "--budget", "256", "--policies", "h2o+caote", "--batches", "1", "--operations", "none"]
    assert main(["gpu_compile", *line, "--json", str(tmp_path / "out.json")]) == 0
    decode, block = json.loads((tmp_path / "out.json").read_text())["results"]
    for row, kernels in ((decode, 9), (block, 8)):  # two are norms
        assert sum(number for what, number in row["of_layer"].items() if what.startswith("kernel ")) == kernels
        assert len(row["kernels"]) == kernels - 1
        assert all(0 < kernel["registers"] <= 255 and kernel["threads"] for kernel in row["kernels"])


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch, capsys):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    gpu_chip.cache_clear()
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert main(["gpu_compile", "--shapes", "tiny"]) == 2
    error = capsys.readouterr().err
    assert "JAX's plugin for CUDA is not installed; install it with: pip install -e '.[cuda]'" in error
    assert "Traceback" not in error
