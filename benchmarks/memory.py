"""Bytes of a cache under each allocation: counted slots, arrays, and what the compiled steps take beside them.

Nothing runs: the steps are compiled for abstract arrays. Layers and heads are Llama-3.2-1B's. The model around them is
narrow, because on a CPU the layer loop copies one layer's weights, which would outweigh everything else. The dtype is
float32, because a CPU's compiler turns bfloat16 into float32 copies.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

import models
from benchmarks import measure, steps
from evals import report
from kvjax.schedule import Phase
from models import commands, driver, files
from models.commands.shared_flags import count
from models.sampling import Draws, Sampling
from models.steps import decode_phase

CONFIG = models.Config(
    256, 128, 128, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, tie_embeddings=True,
    max_positions=131_072,
)  # fmt: skip

LEGEND = """MiB. counted: slots x (key, value, position). + block: with the block in flight. arrays: the cache's
arrays. compiled: the same by memory_analysis of the decode step. ratio: arrays over counted + block. decode +, block
+: what a compiled step needs beside cache and weights."""


def compiled_bytes(policy: str, prompt: int, share: float, block: int, page_size: int) -> dict[str, Any]:
    """Compile one decode step and one block step under a policy, and return the bytes that they need."""
    budget = int(prompt * share)
    setting = steps.Setting(CONFIG, policy, budget, block=block, dtype=jnp.float32, page_size=page_size)
    run, state = steps.shapes(setting, prompt)
    row = np.zeros((1, block), np.int32)
    lowered = {
        "decode": driver.token_step.lower(
            run, state, row[:, 0], np.zeros(1, bool), Draws(), decode_phase(run.plan, 1), Sampling()
        ),
        "block": driver.block_step.lower(run, state, row, row, Phase(evicts=True)),
    }
    slot = 2 * CONFIG.head_dim * 4 + 4  # key, value, position
    heads = CONFIG.num_layers * CONFIG.num_kv_heads
    counted, in_flight, arrays = heads * budget * slot, heads * block * slot, measure.tree_bytes(state.cache)
    result: dict[str, Any] = {
        "policy": policy, "share": share, "budget": budget, "slots": heads * budget, "counted_bytes": counted,
        "in_flight_bytes": in_flight, "array_bytes": arrays, "ratio": arrays / (counted + in_flight),
    }  # fmt: skip
    for name, program in lowered.items():
        memory: Any = program.compile().memory_analysis()
        result[f"{name}_cache_bytes"] = memory.argument_size_in_bytes - measure.tree_bytes(run.model)
        result[f"{name}_temporary_bytes"] = memory.temp_size_in_bytes
        result[f"{name}_copied_bytes"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return result


def table(results: list[dict[str, Any]]) -> report.Table:
    """Return a table in MiB with one line per allocation and budget."""

    def mib(*names: str) -> report.Cell:
        return lambda r: f"{sum(r[f'{name}_bytes'] for name in names) / 2**20:.1f}"

    cells: list[tuple[str, report.Cell]] = [
        ("policy", "{policy}"),
        ("budget", "{budget:,} ({share:.0%})"),
        ("slots", "{slots:,}"),
        ("counted", mib("counted")),
        ("+ block", mib("counted", "in_flight")),
        ("arrays", mib("array")),
        ("compiled", mib("decode_cache")),
        ("ratio", "{ratio:.3f}"),
        ("decode +", mib("decode_temporary")),
        ("block +", mib("block_temporary")),
    ]
    return report.table(results, cells, left=2)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--policies", default="snapkv,snapkv@pyramid,snapkv@layer,snapkv@model")
    flags.add_argument("--shares", default="0.02,0.05,0.2", help="budgets as shares of the prompt")
    flags.add_argument("--prompt", type=count, default=16_384)
    flags.add_argument("--block", type=count, default=128)
    flags.add_argument("--page-size", type=count, default=16)
    measure.add_json_flag(flags, "memory")


def command(flags: argparse.Namespace) -> None:
    """Compile, print the table, write JSON."""
    files.check_outputs([flags.json])
    shares = measure.shares("--shares", flags.shares)
    settings = [(policy, share) for share in shares for policy in commands.split_list(flags.policies)]
    sizes = {"prompt": flags.prompt, "block": flags.block, "page_size": flags.page_size}
    bar = commands.progress_bar("setting", over=settings)
    results = [compiled_bytes(policy, share=share, **sizes) for policy, share in bar]
    print(table(results), LEGEND, sep="\n")
    measure.write(flags, "memory", sizes, results, done=True)
