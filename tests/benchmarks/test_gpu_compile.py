"""What a program launches on a GPU, read from XLA's lists of a small one, and programs lowered for a GPU."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from benchmarks import gpu_compile, launches, steps
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES
from benchmarks.targets import gpu_chip
from tests.tiers import matrix

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


def test_the_first_layers_of_a_model_keep_their_windows():
    config = SHAPES["llama-3.1-8b"]
    assert len(config.sliding_windows) == 32 and gpu_compile.with_layers(config, 2).sliding_windows == (None, None)


@pytest.mark.parametrize(("program", "kernels"), [("decode", (5, 0)), ("block", (3, 2))])
def test_programs_lower_with_a_layer_s_kernels(program, kernels):
    """Attention, its sums with statistics, by Triton or Mosaic; outputs, scores, selection: one function."""
    setting = steps.Setting(SHAPES["tiny"], "h2o+caote", 64, dtype=jnp.bfloat16)
    text = gpu_compile.lowered(setting, program).as_text()
    assert (text.count("@__gpu$xla.gpu.triton"), text.count("@mosaic_gpu_v2")) == kernels


@matrix
@pytest.mark.skipif(
    not any(
        importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{v}")
        for v in (12, 13)
    ),
    reason="needs JAX's plugin for CUDA",
)
def test_a_compiled_layer_has_its_kernels(tmp_path):
    line = ["--shapes", "tiny", "--budget", "256", "--policies", "h2o+caote", "--batches", "1", "--programs", "decode"]
    assert main(["gpu_compile", *line, "--json", str(tmp_path / "out.json")]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert sum(count for what, count in row["of_layer"].items() if what.startswith("kernel ")) == 5


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch, capsys):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    gpu_chip.cache_clear()
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert main(["gpu_compile", "--shapes", "tiny"]) == 2
    error = capsys.readouterr().err
    assert "JAX's plugin for CUDA is not installed; install it with: pip install -e '.[cuda]'" in error
    assert "Traceback" not in error
