"""Decode steps that read only the tokens that a predictor foresees, beside dense ones, at growing contexts."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import models
from benchmarks import measure
from benchmarks.steps import unbounded
from evals import report
from kvjax import sources
from kvjax.sources import PREDICTOR
from models import commands, files, fingerprints
from models.butler import Butler
from models.commands.shared_flags import add_shared_flags, count
from models.networks import load_networks
from papers.predictor import flops

LEGEND = """ms: median of a step of `models.stream`, all ways in turns; over dense: that of the context's dense step.
predictor: its own step and the logits of all tokens in all predicted layers, without a selection. bytes: counted, over
the dense step's, where each head reads the tokens of its own, or a group of heads reads one set."""
TITLES = {"dense": "dense", "predictor": "predictor", "separate": "one set per head"}
BEFORE = 3  # calls that compile, before any is timed


def timings(
    model: models.Decoder,
    network: Butler,
    context: int,
    groups: Sequence[str],
    shares: Sequence[float],
    repetitions: int,
) -> list[dict[str, Any]]:
    """Time steps of one sequence after a random prompt; the dense step, the predictor and each selection take turns.

    ``groups`` say how the query heads of a group choose (:data:`kvjax.sources.Group`), ``shares`` what a step reads.
    """
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, context))

    def steps(**settings: Any) -> Callable[[], Any]:
        stream = models.stream(model, prompt, max_new_tokens=BEFORE + repetitions + 1, end=(), **settings)
        for _ in range(BEFORE):
            jax.block_until_ready(next(stream)[0])
        return lambda: next(stream)[0]

    asked = list(itertools.product(groups, shares))
    programs = {"dense": steps(), "predictor": alone(model, network, context)}
    for group, part in asked:
        programs[f"{group} {part}"] = steps(select=f"{PREDICTOR}(group={group!r})", budget=part, networks=network)
    times = measure.take_turns(programs, repetitions, progress=True)
    records = []
    asked_of: list[tuple[str, float | None]] = [("dense", None), ("predictor", None), *asked]
    for (name, share), own in zip(asked_of, times.values(), strict=True):
        ratios = {} if share is None else flops.bytes_ratios(model.config, network.config, share, context)
        record = {"context": context, "step": name, "share": share, **own._asdict()}
        record["ratio"] = own.milliseconds / times["dense"].milliseconds
        records.append({**record, "bytes_ratio": ratios.get("heads" if name == "separate" else "same")})
    return records


def alone(model: models.Decoder, network: Butler, context: int) -> Callable[[], Array]:
    """Return a step of the predictor after ``context`` tokens, with the logits of every predicted layer."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(network: Butler, memory: Any, x: Array, position: Int[Array, "1 1"]) -> tuple[Array, Any]:
        said, memory = network.look_ahead(memory, x, position, importance_keys=True)
        seen = (memory.position >= 0) & (memory.position <= position)

        def largest(layer: Array) -> Array:
            predicted: Any = network.predict(layer, x, said, memory)
            return jnp.max(jnp.where(seen, sources.logits(predicted.query, predicted.key), -jnp.inf))

        return jax.lax.map(largest, jnp.arange(1, model.config.num_layers)), memory

    places = jnp.arange(context + 1).at[-1].set(-1)[None].astype(jnp.int32)
    held = [dataclasses.replace(network.init_cache(1, context + 1), position=places)]
    x, position = jnp.ones((1, 1, model.config.hidden_size)), jnp.full((1, 1), context)

    def run() -> Array:
        logits, held[0] = step(network, held[0], x, position)
        return logits

    return run


def table(records: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per step."""
    cells: list[tuple[str, report.Cell]] = [
        ("context", "{context:,}"),
        ("step", lambda r: TITLES.get(r["step"], f"one set per group, {r['step']}")),
        ("read", lambda r: "all" if r["share"] is None else f"{r['share']:.0%}"),
        ("ms", "{milliseconds:.1f}"),
        ("lowest", "{lowest:.1f}"),
        ("over dense", "{ratio:.2f}"),
        ("bytes", lambda r: "" if r["bytes_ratio"] is None else f"{r['bytes_ratio']:.2f}"),
    ]
    return report.table(records, cells, left=3)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_shared_flags(flags, "model", "networks", "json", model="smollm2")
    flags.add_argument("--contexts", default="512,2048,8192", help="tokens of the prompt, several by comma")
    flags.add_argument("--groups", default="separate,max", help="how the heads of a group choose, several by comma")
    flags.add_argument("--shares", default="0.5,0.25,0.1", help="of the tokens that a step reads, several by comma")
    flags.add_argument("--repetitions", type=count, default=25, help="timed steps of each way")


def command(flags: argparse.Namespace) -> None:
    """Load model and predictor, measure, print the table, write JSON."""
    files.check_outputs([flags.json])
    contexts = measure.whole_numbers("--contexts", flags.contexts)
    groups = commands.split_list(flags.groups)
    shares = measure.shares("--shares", flags.shares)
    model, _ = models.load(flags.model, dtype="float32")
    (network,) = load_networks(flags.networks, flags.model, model, [frozenset({"query", "key"})])
    digests = fingerprints.fingerprints(model, networks=[network])
    model.config = unbounded(model.config)
    records = []
    for context in contexts:
        records += timings(model, cast(Butler, network), context, groups, shares, flags.repetitions)
    print(table(records), LEGEND, sep="\n\n")
    measure.write(flags, "selection", {"model": flags.model}, records, digests, done=True)
