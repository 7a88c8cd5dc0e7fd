"""Trains a gate of retention for a frozen model: `python -m train.retention`, for the policy trimkv.

TRIM-KV (arXiv 2512.03324) learns how fast each token may be forgotten. While it trains, nothing is evicted: the logit
of a token that is a tokens old is multiplied by beta^a, where beta is what the gate predicts from its hidden state.
The loss is how far the model's predictions come from those that it makes undisturbed (their divergence, and the
cross-entropy of the text), and by how much the sum of beta^a, the tokens that a head still holds, exceeds its memory.
The folder --out holds retention.safetensors and retention.json, the last checkpoint's gate, and what every run's has
(train/loop.py).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that a missing extra is named
    from models import commands

    with commands.extra("train", "train.retention"):
        from train import retention  # this file, under its own name
    raise SystemExit(retention.main())

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from evals import loglikelihood
from kernels_pallas.softmax import grouped_logits, scaled, sees
from models import commands, hosts
from models.commands.shared_flags import count
from models.config import Config
from models.decoder import Decoder
from models.dense import QUERIES_A_CHUNK, attention_in_chunks
from models.scorer import RetentionGate, ScorerConfig
from train import command, loop, networks
from train.parts import summed
from train.text import Corpus

EXAMPLES = """examples:
  python -m train.retention --model smollm2 --data books/ --memory 128 --out retention/
  python -m models.generate smollm2 --policy trimkv --networks retention/ --budget 512 --prompt-file book.txt
"""


@dataclasses.dataclass(frozen=True)
class Settings(loop.Settings):
    """The settings of a run; see :class:`train.loop.Settings`.

    Attributes:
        memory: the tokens that a KV head may hold, M of the paper.
        over: the weight of the tokens beyond them in the loss.
        bias: of the gate's output at first: 10 as published, with which nearly all is kept. A short run begins nearer
            to the end with log(M - 1), where a head of equal tokens holds M.
    """

    tokens: int = 4_000_000
    seq_len: int = 1024
    batch: int = 1
    lr: float = 2e-4
    memory: int = 256
    over: float = 1.0
    bias: float = 10.0


def settings_of(model: Config, **changes: Any) -> Settings:
    """Return the checked settings for a model, with changes."""
    settings = Settings().changed(**changes)
    loop.check_settings(settings, model)
    if not 0 < settings.memory < settings.seq_len:
        raise ValueError(
            f"--memory is {settings.memory} for rows of {settings.seq_len} tokens (--seq-len): give a smaller number, "
            "as nothing is forgotten where all fits."
        )
    if settings.over < 0 or not math.isfinite(settings.over):
        raise ValueError(f"--over is {settings.over}; give the weight of what exceeds the memory, a number from 0.")
    return settings


class Held(NamedTuple):
    """Hold what attention gives, and how many tokens each head still holds at each query."""

    output: Float[Array, "B T N D"]
    number: Float[Array, "B T K"]


def fading_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K D"],
    retention: Float[Array, "B T K"],
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "N"] | None = None,
) -> Held:
    """Attend causally, with each logit times what the token's age leaves of it (TRIM-KV's retention-gated attention).

    Args:
        query, key, value: of whole rows; the key of a token is ``t - i`` tokens old for query ``t``.
        retention: logarithms of the share that each later token leaves, at most 0.
        sliding_window, soft_cap, sink_logits: see :func:`kernels_pallas.cache_attention`.

    Example:
        >>> import jax, numpy as np
        >>> from train.retention import fading_attention
        >>> rows = np.ones((1, 3, 1, 2), "f")
        >>> half = np.full((1, 3, 1), np.log(0.5), "f")
        >>> jax.jit(fading_attention)(rows, rows, rows, half).number[0, :, 0]
        Array([1.  , 1.5 , 1.75], dtype=float32)
    """
    B, T, N, D = query.shape
    K = key.shape[2]
    key, value, retention = key.swapaxes(1, 2), value.swapaxes(1, 2), retention.swapaxes(1, 2)
    place = jnp.arange(T)
    chunk = min(T, QUERIES_A_CHUNK)
    padded = -T % chunk

    @jax.checkpoint  # the backward pass computes a chunk's weights again
    def of_chunk(some: tuple[Array, Array]) -> Held:
        query, own = some
        age = jnp.maximum(own[:, None] - place, 0)
        seen = sees(own, place, sliding_window)
        left = jnp.where(seen, jnp.exp(age * retention[:, :, None]), 0)  # [B, K, t, T]
        logits = scaled(grouped_logits(query, key), D**-0.5, soft_cap) * left[:, :, None]
        logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
        if sink_logits is not None:
            sinks = jnp.broadcast_to(sink_logits.reshape(K, N // K, 1, 1), (*logits.shape[:-1], 1))
            logits = jnp.concatenate([logits, sinks.astype(logits.dtype)], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1)[..., :T]
        output = jnp.einsum("bkgts,bksd->btkgd", weights, value.astype(weights.dtype))
        return Held(output.reshape(B, -1, N, D).astype(query.dtype), jnp.sum(left, axis=-1).swapaxes(1, 2))

    queries = jnp.pad(query, ((0, 0), (0, padded), (0, 0), (0, 0)))
    queries = jnp.moveaxis(queries.reshape(B, -1, chunk, N, D), 1, 0)
    made = jax.lax.map(of_chunk, (queries, jnp.arange(T + padded).reshape(-1, chunk)))
    return Held(*(jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])[:, :T] for x in made))


class Loss(NamedTuple):
    """Hold the parts of the loss: how far from the undisturbed model, the text's, and what exceeds the memory."""

    divergence: Float[Array, ""]
    text: Float[Array, ""]
    over: Float[Array, ""]
    held: Float[Array, "layers"]  # tokens, a mean over heads and the queries that see more than the memory


def losses_of(model: Decoder, gate: RetentionGate, tokens: Int[Array, "B T"], memory: int) -> Loss:
    """Return the parts of the loss on rows: means over their tokens.

    What exceeds the memory M at query t is ``max(0, sum of beta^a - M)``; it counts in units of ``T - M``, so that it
    is at most 1 where nothing is forgotten.
    """
    config, (B, T) = model.config, tokens.shape
    position = jnp.broadcast_to(jnp.arange(T), (B, T))

    def about(layer: int, sliding_window: int | None) -> tuple[Any, ...]:
        return sliding_window, config.attention_soft_cap, model.sink_logits(layer)

    def undisturbed(_, layer, sliding_window, query, key, value):
        out = attention_in_chunks(query, key, value, position, *about(layer, sliding_window))
        return out, None, ()

    def fading(x, layer, sliding_window, query, key, value):
        own = gate(layer, x)
        held = fading_attention(query, key, value, own, *about(layer, sliding_window))
        return held.output, x, held.number

    lengths = jnp.full(B, T)
    expected, _, _ = model.run(tokens, position, lengths, undisturbed, None)
    nothing = jnp.zeros((B, T, config.hidden_size), model.embedding[...].dtype)
    found, _, number = model.run(tokens, position, lengths, fading, nothing, before_attention=lambda _, layer, x: x)
    divergence, text = _of_logits(model, jax.lax.stop_gradient(expected), found, tokens)
    over = jnp.maximum(number - memory, 0) / (T - memory)  # [L, B, T, K]
    return Loss(divergence, text, jnp.mean(over), jnp.mean(number[:, :, memory:], axis=(1, 2, 3)))


def _of_logits(
    model: Decoder, expected: Float[Array, "B T E"], found: Float[Array, "B T E"], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean divergence of predictions from expected ones, and the mean cross-entropy of the text, in nats."""

    def of_part(expected: Array, found: Array, following: Array, counted: Array) -> tuple[Array, Array]:
        true, own = (jax.nn.log_softmax(model.logits(x)) for x in (expected, found))
        apart = jnp.sum(jnp.exp(true) * (true - own), axis=-1)
        chosen = jnp.take_along_axis(own, following[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(counted, apart, 0)), -jnp.sum(jnp.where(counted, chosen, 0))

    B, T = tokens.shape
    given = expected[:, :-1], found[:, :-1], tokens[:, 1:], jnp.ones((B, T - 1), bool)
    places = max(1, loglikelihood.LOGITS_BYTES // (8 * B * model.config.vocab_size))
    divergence, text = summed(of_part, given, places)
    return divergence / (B * (T - 1)), text / (B * (T - 1))


def loss_of(model: Decoder, gate: RetentionGate, tokens: Int[Array, "B T"], settings: Settings) -> Float[Array, ""]:
    """Return the loss that is trained: the divergence, the text's, and ``over`` times what exceeds the memory."""
    found = losses_of(model, gate, tokens, settings.memory)
    return found.divergence + found.text + settings.over * found.over


_compiled_losses = jax.jit(losses_of, static_argnames="memory")


def measure(
    model: Decoder, gate: RetentionGate, rows: Int[np.ndarray, "R T"], memory: int
) -> dict[str, Float[np.ndarray, "some"]]:
    """Return the parts of the loss on held-out rows: "divergence", "text", "over", and "held" for each layer."""
    made = [jax.tree.map(hosts.fetched, _compiled_losses(model, gate, row[None], memory=memory)) for row in rows]
    return {name: np.atleast_1d(np.mean([getattr(one, name) for one in made], axis=0)) for name in Loss._fields}


def train(
    folder: str | Path,
    model: Decoder,
    config: ScorerConfig,
    corpus: Corpus,
    settings: Settings,
    *,
    options: loop.Options = loop.DEFAULTS,
) -> tuple[RetentionGate, dict[str, Any] | None]:
    """Train a gate, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    For the arguments and the errors see :func:`train.loop.run`.

    Returns:
        The gate, and the summary; None if the run was stopped before its end.
    """

    def measured(gate: RetentionGate) -> dict[str, np.ndarray]:
        found = measure(model, gate, corpus.held_out, settings.memory)
        return found | {"loss": found["divergence"] + found["text"] + settings.over * found["over"]}

    shape = config.shapes["output_bias"]
    objective = networks.Objective(
        begin=lambda: {"output_bias": np.full(shape, settings.bias, np.float32)},
        loss=lambda model, gate, tokens, key: loss_of(model, gate, tokens, settings),
        measure=measured,
        compare=lambda gate: (measured(gate), {}),
    )
    budget = settings.memory / settings.seq_len
    return networks.train(folder, model, config, corpus, settings, objective, budget=budget, options=options)


# The command.


def table(summary: dict[str, Any]) -> str:
    """Return the summary as a table in text."""
    figures, memory = summary["figures"], summary["settings"]["memory"]
    lines = [
        f"{summary['parameters']:,} parameters · {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s · "
        f"held-out divergence {figures['divergence']:.4f} nats",
        "",
        f"{'layer':<8}{'held':>8}   tokens of a memory of {memory}, where more were read",
    ]
    lines += [f"{layer:<8}{held:>8.0f}" for layer, held in enumerate(summary["layers"]["held"])]
    return "\n".join([*lines, f"{'mean':<8}{figures['held']:>8.0f}"])


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = command.parser(
        "train.retention", description="Trains the gate that the policy trimkv evicts by, for a frozen model.",
        examples=EXAMPLES, out="retention", seq_len=str(Settings().seq_len), lr=f"{Settings().lr:g}",
    )  # fmt: skip
    flags.add_argument("--memory", type=count, help="tokens that a KV head may hold (default: 256)")
    flags.add_argument("--over", type=float, help="weight of the tokens beyond them in the loss (default: 1)")
    flags.add_argument("--bias", type=float, help="of the gate's output at first (default: 10, all is kept)")
    flags.add_argument("--hidden", type=count, help="width of the gate's hidden layer (default: 512)")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input, a loss that is not finite, or a full disk."""
    return commands.call(parser(), _run, "train.retention", arguments)


def _run(flags: argparse.Namespace) -> None:
    loaded = command.load(flags)
    settings = settings_of(loaded.model.config, **command.changes_of(flags, Settings))
    config = ScorerConfig.of(loaded.model.config, flags.hidden, "retention")
    corpus = command.open_text(flags, loaded.tokenizer, settings)
    options = command.options_of(flags, loaded, "train.retention")
    _, summary = train(flags.out, loaded.model, config, corpus, settings, options=options)
    command.report(flags, summary, table)
