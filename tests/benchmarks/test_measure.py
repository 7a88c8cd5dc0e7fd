"""What benchmarks share: times in turns, loops that stay, memory that is checked, results with their facts."""

import jax
import jax.numpy as jnp

from benchmarks import measure


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


def test_a_loop_calls_as_often_as_it_says():
    def call(index, zero, x):
        jax.debug.callback(lambda i, z: calls.append((int(i), int(z))), index, zero)
        return {"sum": x.sum(), "index": index}

    calls: list[tuple[int, int]] = []
    out = jax.jit(measure.loop(call, 3))(jnp.ones(5))
    jax.effects_barrier()
    assert float(out["sum"]) == 5 and int(out["index"]) == 2 and sorted(calls) == [(0, 0), (1, 0), (2, 0)]


def products_outside_of_loops(program) -> int:
    text = program.as_text()
    entry = text[text.index("ENTRY") :]
    return entry.count("dot_general")


def test_what_is_sliced_at_zero_stays_in_the_loop():
    """XLA takes what no turn changes out of a loop: a barrier does not stop it, an unknown index does."""
    x = jax.ShapeDtypeStruct((2, 32, 32), jnp.float32)
    inside = measure.executable(measure.loop(lambda i, zero, a: a[i % 2 + zero] @ a[zero], 7), x, what="", free=1e9)
    assert products_outside_of_loops(inside) == 0
    outside = measure.executable(measure.loop(lambda i, zero, a: a[0] @ a[1], 7), x, what="", free=1e9)
    assert products_outside_of_loops(outside) > 0
