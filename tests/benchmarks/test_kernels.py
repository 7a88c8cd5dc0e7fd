"""The kernels benchmark runs what it names, on arrays that are what they say."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels, measure
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES
from tests.tiers import matrix

TIMING = measure.Timing(calls=2, repetitions=1, free=2**30, limits=measure.Device(1e9, 1e9))


def case(operation: str, name: str) -> kernels.Case:
    given = kernels.cases(SHAPES["tiny"], 1, kernels.TINY, jnp.float32, [operation])
    return next(c for c in given if c.case == name)


def test_the_command_writes_a_row_for_each_implementation(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert main(["kernels", "--tiny", "--operations", "select_attention", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert len({r["name"] for r in rows}) == len(rows)
    for r in rows:
        assert r["floor_milliseconds"] > 0 and r["repetitions"] == 1 and r["milliseconds"] > 0
        assert r["compiled_bytes"] >= r["floor_bytes"]
    assert [r["times_reference"] for r in rows if r["implementation"] == "reference"] == [1.0] * 3
    printed = capsys.readouterr().out
    assert all(r["case"] in printed for r in rows)


def test_a_case_that_does_not_fit_says_so_in_its_row(monkeypatch):
    fitting = measure.tree_bytes(jax.eval_shape(case("caote_topk", "block").make))
    timing = TIMING._replace(free=fitting + 2**10)  # the arrays, but not what the reference needs beside them
    rows = kernels.measurement(case("caote_topk", "block"), ["reference"], timing)
    assert len(rows) == 1 and "GiB are free here" in rows[0]["refused"]
    table = kernels.table([{"operation": "caote_topk", "case": "block", "shape": "tiny", "batch": 1, **rows[0]}])
    assert "refused" in table and "GiB" in table


@pytest.mark.parametrize("by", ["reference", "pallas_gpu"])
def test_what_an_implementation_cannot_do_is_a_row(by):
    given = case("caote_topk", "block")

    def call(function, *rest):
        raise NotImplementedError("the head dim is 1000")

    rows = kernels.measurement(given._replace(call=call), [by], TIMING, interpret=True)
    assert rows == [{"implementation": by, "refused": "the head dim is 1000"}]


@matrix
def test_a_kernel_that_breaks_stops_no_other_and_a_broken_reference_is_loud():
    given = case("caote_topk", "decode")

    def call(function, *rest):
        if getattr(function, "keywords", {}).get("interpret"):
            raise TypeError("no such block\nand more")
        return given.call(function, *rest)

    rows = kernels.measurement(given._replace(call=call), ["pallas_gpu", "reference"], TIMING, interpret=True)
    assert rows[0] == {"implementation": "pallas_gpu", "refused": "TypeError: no such block"}
    assert rows[1]["milliseconds"] > 0

    def broken(*_):
        raise TypeError("broken")

    with pytest.raises(TypeError, match="broken"):
        kernels.measurement(given._replace(call=broken), ["reference"], TIMING)
