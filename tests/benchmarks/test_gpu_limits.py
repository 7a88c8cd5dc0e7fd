"""The committed figures of compiled programs hold their limits, which are only ever lowered by the command."""

import json

import pytest

from benchmarks import gpu_limits
from benchmarks.measure import RESULTS

COMMITTED = json.loads((RESULTS / "gpu_compile.json").read_text())["results"]


def test_no_committed_figure_is_worse_than_its_limit():
    worse = gpu_limits.worse(COMMITTED, gpu_limits.read())
    assert not worse, "\n".join(["A figure is worse than its limit in benchmarks/gpu_limits.toml:", *worse])


def test_no_limit_is_looser_than_the_committed_figures():
    tight = gpu_limits.text(gpu_limits.tightened(COMMITTED, gpu_limits.read()))
    assert gpu_limits.PATH.read_text() == tight, "`python -m benchmarks gpu_compile --json` writes lower limits."


def program(launches: float = 20, weights: float = 0, spilled: int = 0, blocks: int = 2) -> list[dict]:
    layer = {"launches": launches, "moved_bytes": 1.125 * 2**20, "weights_moved_bytes": weights}
    kernel = {"name": "scores", "by": "Triton", "spilled_bytes": spilled, "blocks": blocks}
    names = {"shape": "tiny", "batch": 1, "program": "decode", "policy": "none"}
    return [names | {"layer": layer, "step": {"launches": 50, "in_graphs": 50}, "kernels": [kernel]}]


LIMITS = gpu_limits.tightened(program(), {})
WORSE = {
    "launches is 21": program(launches=21), "weights_moved_mib is 1": program(weights=2**20),
    "spilled_bytes is 8": program(spilled=8), "blocks is 1": program(blocks=1),
}  # fmt: skip


def test_figures_are_rounded_up_and_what_is_as_it_should_be_is_not_listed():
    assert LIMITS["launches"] == {"tiny x 1, decode, none": 20} and LIMITS["moved_mib"] == {
        "tiny x 1, decode, none": 1.2
    }
    assert not any(
        LIMITS[name] for name in ("refused", "weights_moved_mib", "outside_graphs", "spilled_bytes", "blocks")
    )
    assert gpu_limits.worse(program(), LIMITS) == []


@pytest.mark.parametrize("said", WORSE)
def test_a_worse_figure_is_named_and_never_becomes_the_limit(said):
    (found,) = gpu_limits.worse(WORSE[said], LIMITS)
    assert said in found
    assert gpu_limits.tightened(WORSE[said], LIMITS) == LIMITS


def test_a_better_figure_becomes_the_limit_and_an_exception_goes():
    exceptions = {**LIMITS, "blocks": {"scores, Triton, decode": 1}, "launches": {"tiny x 1, decode, none": 30}}
    assert gpu_limits.worse(program(blocks=1), exceptions) == []
    assert gpu_limits.tightened(program(blocks=1), exceptions)["blocks"] == exceptions["blocks"]
    assert gpu_limits.tightened(program(blocks=3), exceptions) == LIMITS


def test_a_refused_program_is_worse_and_the_file_is_what_was_written(tmp_path):
    refused = {"shape": "tiny", "batch": 1, "program": "decode", "policy": "none", "refused": "no memory"}
    (found,) = gpu_limits.worse([refused], LIMITS)
    assert "refused is 1" in found and "no memory" in found
    path = tmp_path / "limits.toml"
    assert gpu_limits.tighten(program(), path) == []
    assert gpu_limits.read(path) == LIMITS
