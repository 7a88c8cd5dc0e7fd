"""Test what benchmarks share: turns, memory that is checked; and kernels on arrays that are what they say."""

import argparse
import json
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels, measure
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES
from models import commands
from tests.tiers import matrix


def test_programs_take_turns_after_a_warm_up_each():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "ab"}
    times = measure.take_turns(runs, 2)
    assert seen == ["a", "b", "a", "b", "a", "b"]
    assert all(t.repetitions == 2 and t.lowest <= t.low <= t.milliseconds <= t.high for t in times.values())


def test_a_time_is_the_median_of_one_call(monkeypatch):
    clock = iter([0.0, 4.0, 10.0, 90.0, 100.0, 108.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    taken = measure.take_turns({"a": lambda: None}, 3, calls=4)["a"]
    assert (taken.milliseconds, taken.lowest) == (2000, 1000)  # of 1, 20 and 2 seconds


def test_each_call_has_arguments_and_a_result_of_its_own():
    def call(zero, x, y):
        return {"sum": (x + zero).sum(), "product": x @ y}

    given = [(i * jnp.ones(5), jnp.arange(5.0)) for i in range(3)]
    results = jax.jit(measure.in_turn(call))(*given)
    assert [(float(x["sum"]), float(x["product"])) for x in results] == [(0, 0), (5, 10), (10, 20)]


def test_a_floor_is_the_longer_of_copying_and_computing():
    device = measure.Device(copy_bytes=2e9, product_flops=1e12)
    assert (device.milliseconds(4e9, 1e12), device.milliseconds(1e9, 3e12), device.milliseconds(1e9)) == (2e3, 3e3, 500)


def test_a_result_in_the_place_of_a_donated_argument_takes_no_bytes():
    x = jax.ShapeDtypeStruct((2**18,), jnp.float32)
    given = dict(what="", free=1e9)
    assert measure.program_bytes(measure.executable(lambda x: x + 1, x, donate=[0], **given)) == 2**20
    assert measure.program_bytes(measure.executable(lambda x: x + 1, x, **given)) == 2**21


def test_xla_joins_no_calls():
    """What does not depend on the call before it computes once for all calls of the same array."""
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)

    def products(call) -> int:
        program = measure.executable(lambda x: measure.in_turn(call)((x,), (x,), (x,)), x, what="", free=1e9)
        return len(re.findall(r" dot\(", program.as_text()))

    assert (products(lambda zero, x: (x + zero) @ x), products(lambda zero, x: x @ x)) == (3, 1)


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
    fitting = TIMING.calls * measure.tree_bytes(jax.eval_shape(case("caote_topk", "block").make))
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


def test_a_killed_run_leaves_the_file_of_the_one_before(tmp_path):
    flags = argparse.Namespace(json=tmp_path / "found.json", invocation=commands.Invocation("x", 0.0))

    def killed():
        yield {"milliseconds": 2.0}
        raise KeyboardInterrupt

    measure.collect(flags, "x", {}, iter([{"milliseconds": 1.0}]))
    with pytest.raises(KeyboardInterrupt):
        measure.collect(flags, "x", {}, killed())
    found = [json.loads((tmp_path / name).read_text())["results"] for name in ("found.json", "found.partial.json")]
    assert found == [[{"milliseconds": 1.0}], [{"milliseconds": 2.0}]]
