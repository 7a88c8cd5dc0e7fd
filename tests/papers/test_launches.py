"""Launches of a decode layer: counted in a program's text, pinned by lowering, compiled where the plugin is there."""

import importlib.util

import pytest
from jax.experimental import topologies

from benchmarks.shapes import shape
from benchmarks.targets import gpu_chip
from papers.__main__ import main
from papers.caote import launches

PROGRAM = """
%fused_write (p0: f32[2,8], p1: f32[8], p2: s32[]) -> f32[2,8] {
  %p0 = f32[2,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %row = f32[1,8]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  ROOT %write = f32[2,8]{1,0} dynamic-update-slice(%p0, %row, %p2, %p2)
}
%inner (i: (bf16[4], s32[])) -> (bf16[4], s32[]) {
  %i = (bf16[4]{0}, s32[]) parameter(0)
  %old = bf16[4]{0} get-tuple-element(%i), index=0
  ROOT %copied = bf16[4]{0} copy(%old)
}
%layer (x: (f32[2,8], f32[2,3,4], s32[])) -> (f32[2,8], f32[2,3,4], s32[]) {
  %x = (f32[2,8]{1,0}, /*index=1*/f32[2,3,4]{2,1,0}, s32[]) parameter(0)
  %stack = f32[2,3,4]{2,1,0} get-tuple-element(%x), index=1
  %kernel = f32[8]{0} custom-call(%stack), custom_call_target="t", metadata={op_name="jit(f)/my_kernel/pallas_call"}
  %i0 = (bf16[4]{0}, s32[]) tuple(%kernel)
  %search = (bf16[4]{0}, s32[]) while(%i0), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %n = s32[] get-tuple-element(%x), index=2
  %whole = f32[2,8]{1,0} get-tuple-element(%x), index=0
  %put = f32[2,8]{1,0} fusion(%whole, %kernel, %n), kind=kLoop, calls=%fused_write
  ROOT %t = (f32[2,8]{1,0}, f32[2,3,4]{2,1,0}, s32[]) tuple(%put, %stack, %n)
}
ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  ROOT %loop = f32[2,8]{1,0} while(%a), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"2"}}
}
"""


def test_each_turn_of_an_inner_loop_counts_and_only_what_is_moved():
    kernel, search, put = launches.launches(PROGRAM, layers=2)
    assert kernel == ("kernel", "my_kernel", 1, 4 * (3 * 4 + 8))  # one of two layers, and the result
    assert search == ("copied", None, 5, 5 * 2 * 2 * 4)
    assert put == ("put", None, 1, 4 * (8 + 1 + 8))  # the row is read and written, the array is not


@pytest.mark.parametrize(("policy", "kernels"), [("h2o+caote", 5), ("streaming", 2)])
def test_a_decode_layer_has_five_kernels_on_a_gpu(policy, kernels):
    """Attention, its sums and statistics, and the eviction's three: outputs, scores, and the slot that is freed."""
    text = launches.lowering(shape("tiny"), policy, batch=1, budget=64).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == kernels


@pytest.mark.skipif(
    not any(
        importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{v}")
        for v in (12, 13)
    ),
    reason="needs JAX's plugin for CUDA",
)
def test_a_compiled_decode_layer_has_no_inner_loop(capsys):
    assert main(["launches", "--shapes", "tiny", "--budget", "256", "--policies", "h2o+caote"]) == 0
    *_, total, kernels, inner, _ = capsys.readouterr().out.splitlines()[2].split()
    assert int(total) <= 25 and (kernels, inner) == ("5", "0")


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch, capsys):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    gpu_chip.cache_clear()
    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    assert main(["launches", "--shapes", "tiny"]) == 2
    error = capsys.readouterr().err
    assert (
        "JAX's plugin for CUDA is not installed; install it with: pip install -e '.[cuda]'" in error
        and "Traceback" not in error
    )
