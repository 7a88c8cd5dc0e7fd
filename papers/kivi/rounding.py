"""Perplexity of the full cache with keys and values rounded in several ways: a scale per vector, channel or group.

Nothing is evicted. A dense forward in float32 rounds the keys and values that its attention reads, so ways of rounding
are measured that no cache stores. Every way is compared with the unrounded model on the same chunks, over all tokens
but the first and over the last half of each chunk, whose tokens read many rounded vectors. The bytes are those of one
token's key and value in one head, with scales, in a text much longer than a block.

Vectors of the library's eight bits have one float32 scale, as in :func:`kvjax.quantise`; so have vectors of four bits.
Channels of eight bits have a float32 scale for a block of slots. Groups and channels of four bits have their smallest
number and a step, both in float16 (KIVI, arXiv 2402.02750). A block of keys that is not full yet is read in bfloat16,
as in KIVI.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import kvjax
import models
from evals import command_line, evaluator, perplexity, report, sweep, texts
from evals.perplexity import Losses
from models import commands, files
from models.commands.shared_flags import add_shared_flags, count

SLOTS = 64  # of a block whose channels share scales
GROUP = 32  # channels
Vectors = Float[Array, "B K T D"]


class Rounding(NamedTuple):
    """A way to store vectors.

    ``size(D)`` are a vector's bytes. Where channels of ``block`` slots share scales, ``rounded`` is given whole blocks.
    """

    rounded: Callable[[Vectors], Vectors]
    size: Callable[[int], float]
    block: int | None = None


def _by_steps(vectors: Float[Array, "..."], bits: int, axis: int) -> Float[Array, "..."]:
    """Round to multiples of a float32 scale, at which the largest magnitude along an axis is the largest number."""
    largest = 2 ** (bits - 1) - 1
    scale = jnp.max(jnp.abs(vectors), axis=axis, keepdims=True) / largest
    return jnp.round(vectors / jnp.where(scale > 0, scale, 1)) * scale


def _from_smallest(vectors: Float[Array, "..."], bits: int, axis: int) -> Float[Array, "..."]:
    """Round to the smallest number along an axis and equal steps above it, both stored in float16."""
    largest = 2**bits - 1
    smallest = _through(jnp.min(vectors, axis=axis, keepdims=True), "float16")
    step = _through((jnp.max(vectors, axis=axis, keepdims=True) - smallest) / largest, "float16")
    return jnp.clip(jnp.round((vectors - smallest) / jnp.where(step > 0, step, 1)), 0, largest) * step + smallest


def in_groups(vectors: Vectors) -> Vectors:
    """Round each :data:`GROUP` channels of a vector to four bits, or fewer where they do not divide it."""
    D = vectors.shape[-1]
    return _from_smallest(vectors.reshape(*vectors.shape[:-1], -1, math.gcd(GROUP, D)), 4, -1).reshape(vectors.shape)


def by_channel(vectors: Vectors, how: Callable[..., Array], bits: int) -> Vectors:
    """Round each channel of each block of :data:`SLOTS` slots."""
    B, K, T, D = vectors.shape
    return how(vectors.reshape(B, K, T // SLOTS, SLOTS, D), bits, -2).reshape(vectors.shape)


def _through(vectors: Array, dtype: str) -> Array:
    return vectors.astype(dtype).astype(vectors.dtype)


PLAIN = "float32"  # what every way is compared with
ROUNDINGS: dict[str, Rounding] = {
    PLAIN: Rounding(lambda vectors: vectors, lambda D: 4 * D),
    "bfloat16": Rounding(partial(_through, dtype="bfloat16"), lambda D: 2 * D),
    "float16": Rounding(partial(_through, dtype="float16"), lambda D: 2 * D),
    "int8": Rounding(partial(kvjax.straight_through, dtype="int8"), lambda D: D + 4),
    "float8_e4m3fn": Rounding(partial(kvjax.straight_through, dtype="float8_e4m3fn"), lambda D: D + 4),
    f"int8, a scale per channel and {SLOTS} slots": Rounding(
        partial(by_channel, how=_by_steps, bits=8), lambda D: D + 4 * D / SLOTS, SLOTS
    ),
    "4 bits": Rounding(partial(_by_steps, bits=4, axis=-1), lambda D: D / 2 + 4),
    f"4 bits, groups of {GROUP}": Rounding(in_groups, lambda D: D / 2 + 4 * D / math.gcd(GROUP, D)),
    f"4 bits per channel and {SLOTS} slots": Rounding(
        partial(by_channel, how=_from_smallest, bits=4), lambda D: D / 2 + 4 * D / SLOTS, SLOTS
    ),
}
PAIRS = tuple((key, value) for key, value in sweep.read(Path(__file__).with_suffix(".toml"))["pairs"])


def attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    of_key: Rounding,
    of_value: Rounding,
    *,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N D"]:
    """Compute causal attention over rounded keys and values, the values rounded vector by vector."""
    B, T, _, D = query.shape
    groups = query.reshape(B, T, key.shape[2], -1, D)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    at, block = jnp.arange(T), of_key.block

    def logits(vectors: Array) -> Array:
        return jnp.einsum("btkgd,bksd->bkgts", groups, vectors) / math.sqrt(D)

    if block is None:
        scores = logits(of_key.rounded(key))
    else:
        whole = jnp.pad(key, ((0, 0), (0, 0), (0, -T % block), (0, 0)))
        full = at // block < (at[:, None] + 1) // block
        scores = jnp.where(full, logits(of_key.rounded(whole)[:, :, :T]), logits(_through(key, "bfloat16")))
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    seen = at <= at[:, None]
    if sliding_window is not None:
        seen &= at > at[:, None] - sliding_window
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bkgts,bksd->btkgd", weights, of_value.rounded(value)).reshape(query.shape)


def _log_probabilities(
    model: models.Decoder, tokens: Int[Array, "1 T"], of_key: Rounding, of_value: Rounding
) -> Float[Array, "T-1 V"]:
    T = tokens.shape[1]
    if model.config.attention_sinks:
        raise ValueError("attention over rounded keys has no sinks, which this model has; take another model.")

    def attend(carry, layer, sliding_window, query, key, value):
        cap = model.config.attention_soft_cap
        out = attention(query, key, value, of_key, of_value, sliding_window=sliding_window, soft_cap=cap)
        return out, carry, None

    hidden, _, _ = model.run(tokens, jnp.arange(T)[None], jnp.full(1, T), attend, None)
    return jax.nn.log_softmax(model.logits(hidden)[0, :-1])


def measure(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    pairs: Sequence[tuple[str, str]] = PAIRS,
    *,
    progress: tqdm = evaluator.QUIET,
) -> list[dict[str, Any]]:
    """Measure pairs of roundings, of keys and values; the first is the model without any.

    Returns:
        Lines of ``key`` and ``value``, names of :data:`ROUNDINGS`; ``bytes`` of a token in one head; the figures
        of :func:`evals.perplexity.against`; and ``late``, the same over the last half of each chunk.
    """
    D = model.config.head_dim
    first = jax.jit(partial(_log_probabilities, of_key=ROUNDINGS[PLAIN], of_value=ROUNDINGS[PLAIN]))

    def compared(model: models.Decoder, tokens: Array, told: Array, of_key: Rounding, of_value: Rounding) -> Any:
        found = _log_probabilities(model, tokens, of_key, of_value)
        loss = -jnp.take_along_axis(found, tokens[0, 1:, None], axis=-1)[:, 0]
        return loss, jnp.sum(jnp.exp(told) * (told - found), axis=-1)

    ways = [(PLAIN, PLAIN), *pairs]
    programs = [jax.jit(partial(compared, of_key=ROUNDINGS[key], of_value=ROUNDINGS[value])) for key, value in ways]
    found: list[list[np.ndarray]] = [[] for _ in ways]
    for chunk in chunks:  # one after the other: the unrounded predictions are of the vocabulary's size
        tokens = jnp.asarray(chunk)[None]
        told = first(model, tokens)
        for of_way, program in zip(found, programs, strict=True):
            of_way.append(np.stack(program(model, tokens, told)).astype(np.float64))
            progress.update()
    by_way = np.array(found)  # [ways, n, 2, T - 1]

    def losses(way: int, last: int) -> Losses:
        return Losses(*by_way[way, :, :, -last:].mean(axis=-1).T)

    T = chunks.shape[1]
    results = []
    for way, (key, value) in enumerate(ways):
        size = ROUNDINGS[key].size(D) + ROUNDINGS[value].size(D)
        figures, late = (perplexity.against(losses(way, last), losses(0, last)) for last in (T - 1, T // 2))
        results.append({"key": key, "value": value, "bytes": size, **figures, "late": late})
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each pair of roundings, compared with the unrounded model."""

    def compared(cell: Callable[[dict[str, Any]], str]) -> report.Cell:
        return lambda r: "" if (r["key"], r["value"]) == (PLAIN, PLAIN) else cell(r)

    bounds = report.between("+.2%", "increase_low", "increase_high")
    cells: list[tuple[str, report.Cell]] = [
        ("keys", "{key}"),
        ("values", "{value}"),
        ("bytes", "{bytes:g}"),
        ("perplexity", "{perplexity:.3f}"),
        ("increase", compared("{increase:+.2%}".format_map)),
        ("95%", compared(bounds)),
        ("KL", compared("{kl:.4f}".format_map)),
        ("last half", compared("{late[increase]:+.2%}".format_map)),
        ("95%", compared(lambda r: bounds(r["late"]))),
        ("KL", compared("{late[kl]:.4f}".format_map)),
    ]
    return report.table(results, cells, left=2)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument(
        "--text", nargs="+", help="files, or texts of `python -m papers texts`; the library's own sentences by default"
    )
    flags.add_argument("--chunk", type=count, default=512, help="tokens per sequence")
    flags.add_argument("--sequences", type=count, help="use at most so many of each text's chunks")
    add_shared_flags(flags, "model", "json")


def command(flags: argparse.Namespace) -> None:
    """Measure every way on every text, print the tables, and write JSON."""
    files.check_outputs([flags.json])
    named = {name or "sentences": texts.read_text(name) for name in flags.text or [None]}
    model, tokenizer = command_line.load_with_tokenizer(flags.model, dtype="float32")
    cut = argparse.Namespace(**vars(flags) | {"stride": None})
    chunks = {name: perplexity.chunks_for(model, tokenizer, text, cut) for name, text in named.items()}
    results = []
    with commands.progress_bar("chunk", total=(1 + len(PAIRS)) * sum(map(len, chunks.values()))) as progress:
        for name, of_text in chunks.items():
            progress.set_description(name)
            own = measure(model, of_text, progress=progress)
            results += [{"text": name, **r} for r in own]
        progress.set_description("done")
    for name in chunks:
        print(f"{name}:\n{table([r for r in results if r['text'] == name])}\n")
    figures = {
        "evaluation": "rounding",
        "settings": command_line.settings(flags),
        "head_dim": model.config.head_dim,
        "chunks": {name: len(of_text) for name, of_text in chunks.items()},
        "results": results,
    }
    digests = evaluator.digests(model, tokenizer) | {name: texts.digest(text) for name, text in named.items()}
    report.write(flags, figures, digests)
