"""The cost of evicting a block's tokens in rounds instead of all at once: CAOTE's scores and the selection."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from benchmarks import measure
from evals import evaluator, report
from kernels_pallas import ColumnStatistics
from models import commands

K, G, D = 8, 4, 128


def timed(links: list[str], budget: int, block: int, repetitions: int) -> list[dict[str, Any]]:
    """Time each link on one layer's scores; the links take turns, so that a busy machine slows all of them alike."""
    S = budget + block
    keys = jax.random.split(jax.random.key(0), 3)
    A = jax.nn.softmax(2 * jax.random.normal(keys[0], (1, K, G, S)))
    cache: Any = kvjax.KVCache.init(batch=1, kv_heads=K, slots=S, head_dim=D)
    V = jax.random.normal(keys[1], (1, S, K, D))
    cache = kvjax.insert(cache, V, V)
    projection = kvjax.output_projection(jax.random.normal(keys[2], (K * G, D, K * G * D)) / 64, K, ["factor", "gram"])

    def program(link: str):
        policy = kvjax.parse(f"h2o(accumulate=False)+{link}")

        def run(A, cache):
            seen = kvjax.Observation(
                columns=ColumnStatistics(sum=A),
                query=jnp.zeros((1, block, K * G, D)),
                query_position=jnp.arange(budget, S)[None],
                key=cache.key,
                value=cache.value,
                position=cache.position,
                next_position=cache.next_position,
                budget=jnp.array([budget]),
                context=kvjax.Context(layer=0, projection=projection),
            )
            scores, _ = kvjax.retention_scores(policy, policy.init(1, K, G, S, D), seen)
            return kvjax.evict(cache, scores, budget).position

        return jax.jit(run)

    runs = {link: functools.partial(program(link), A, cache) for link in links}
    times = measure.take_turns(runs, repetitions, progress=True)
    first = times[links[0]].milliseconds
    return [{"link": link, **own._asdict(), "ratio": own.milliseconds / first} for link, own in times.items()]


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one row per link."""
    cells = [
        ("link", "{link}"),
        ("median ms", "{milliseconds:.1f}"),
        ("lowest ms", "{lowest:.1f}"),
        ("ratio", "{ratio:.2f}"),
    ]
    return report.table(results, cells, left=1)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--links", default="caote,caote(rounds=2),caote(rounds=4),caote(rounds=8)")
    flags.add_argument("--budget", type=int, default=8_192)
    flags.add_argument("--block", type=int, default=128)
    flags.add_argument("--repetitions", type=int, default=15)
    measure.add_json_flag(flags, "rounds")


def command(flags: argparse.Namespace) -> None:
    """Measure, print the table, write JSON."""
    commands.check_outputs([flags.json])
    evaluator.check_least(flags, budget=1, block=1, repetitions=1)
    results = timed(commands.split_list(flags.links), flags.budget, flags.block, flags.repetitions)
    print(table(results))
    measure.write(
        flags, "rounds", {"budget": flags.budget, "block": flags.block, "K": K, "G": G, "D": D}, results, done=True
    )
