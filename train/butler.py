"""Trains TokenButler's predictor (version 1 of its paper) for a frozen model: `python -m train.butler`.

A step runs the model once. Layer 0's output goes to the predictor, and as the other layers run, the loss compares each
layer's queries and keys with the predicted ones (kernels_pallas.mse_logits) and computes its gradient at once: nothing
of the model is kept for a backward pass. The folder --out holds butler.safetensors and butler.json, the last
checkpoint's predictor, and what every run's has (train/loop.py).
"""

from __future__ import annotations

from models.commands.shared_flags import count

if __name__ == "__main__":  # before the other imports, so that a missing extra is named
    from models import commands

    with commands.extra("train", "kvjax-train-butler"):
        from train import butler  # this file, under its own name
    raise SystemExit(butler.main())

import argparse
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from evals import simulator
from kernels_pallas import mse_logits
from models import commands, hosts
from models.butler import SOURCES, Butler, ButlerConfig, butler_input
from models.config import Config
from models.decoder import Decoder
from models.dense import attention_in_chunks
from models.parameters import parameter_shapes as model_shapes
from train import command, loop, networks
from train.text import Corpus

BASELINES = ("oracle", "quest", "first_layer", "previous_layer", "random", "streaming")
TOKENS_AT_ONCE = 4096  # of held-out text


@dataclasses.dataclass(frozen=True)
class Settings(loop.Settings):
    """The settings of a run; see :class:`train.loop.Settings`. The defaults are the published ones (AdamW, one row
    per step; NOTES of the paper's code).

    With ``causal``, the loss counts only the pairs that a query sees, not all pairs.
    """

    tokens: int = 80_000_000
    seq_len: int = 2048
    batch: int = 1
    lr: float = 1e-3
    clip: float = 20.0
    weight_decay: float = 0.01
    causal: bool = False


EXAMPLES = """examples:
  python -m train.butler --out butler/
  python -m train.butler --model path/to/Llama-3.2-1B --data text/ books.jsonl --tokens 80e6 --out butler/
  python -m train.butler --model path/to/Llama-3.2-1B --data HuggingFaceFW/fineweb-edu:sample-10BT --mesh data=4
  python -m models.generate path/to/Llama-3.2-1B --networks butler/ --select butler --budget 0.5 --prompt-file book.txt
"""
EMBEDDED = Settings(tokens=3_000_000, seq_len=512, batch=8, lr=4e-3, causal=True)


def settings_of(model: Config, *, embedded: bool = False, **changes: Any) -> Settings:
    """Return the checked settings for a model, with changes: the published ones, or those of the embedded one."""
    base = EMBEDDED if embedded else Settings(seq_len=1024 if model.hidden_size >= 4096 else 2048)
    settings = base.changed(**changes)
    loop.check_settings(settings, model)
    return settings


def butler_config_of(model: Config, *, embedded: bool = False, **changes: Any) -> ButlerConfig:
    """Return the predictor's shape for a model; for the model that ships, it is larger than a share of 1%."""
    base = ButlerConfig.of(model)
    if embedded:
        base = dataclasses.replace(base, hidden=256, dim=32)
    changes = {name: value for name, value in changes.items() if value is not None}
    if {"hidden", "dim"} & changes.keys():
        base = dataclasses.replace(base, published_layout=False)
    return dataclasses.replace(base, **changes)


def loss_of(
    model: Decoder, butler: Butler, tokens: Int[Array, "B T"], *, causal: bool = False, dropout_key: Array | None = None
) -> Float[Array, ""]:
    """Return the published loss (TokenButler, section 3.2): the logits' mean squared error, a mean over layers.

    A model's soft cap is left out of its logits: it does not change their order, by which tokens are chosen.
    """
    config, T = butler.config, tokens.shape[1]
    position = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    predict = functools.partial(butler, dropout_key=dropout_key)

    def attend(predicted, layer, sliding_window, query, key, value):
        cap, sinks = model.config.attention_soft_cap, model.sink_logits(layer)
        out = attention_in_chunks(query, key, value, position, sliding_window, cap, sinks)
        own = jax.tree.map(lambda x: x[jnp.maximum(layer - 1, 0)], predicted)
        return out, predicted, mse_logits(query, key, own.query, own.key, causal=causal)

    if config.source == "attention_input":
        predicted, after_first = predict(butler_input(model, tokens, source=config.source)), None
    else:
        x = jax.ShapeDtypeStruct((*tokens.shape, config.hidden_size), model.embedding[...].dtype)
        predicted = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(predict, x))  # for layer 0

        def after_first(x, carry):
            return predict(x)

    lengths = jnp.full(tokens.shape[:1], T)
    _, _, losses = model.run(tokens, position, lengths, attend, predicted, after_first=after_first)
    return jnp.mean(losses[1:])


_compiled_loss = jax.jit(loss_of, static_argnames="causal")


# Held-out text.


def measure(
    model: Decoder, butler: Butler, rows: Int[np.ndarray, "R T"], source: str, budget: float
) -> dict[str, Float[np.ndarray, "layers"]]:
    """Measure how well a source predicts which tokens matter: means over rows and heads, for each layer from 1.

    Each query chooses the share ``budget`` of the tokens that it sees, without sinks, and so does the oracle
    (evals.simulator.hits). ``hit_rate`` is the share of the oracle's tokens that the source chose too, a mean over
    all queries; ``token_accuracy`` is the same for the last query of each row, the paper's figure; ``mass`` is the true
    attention that the chosen tokens hold.
    """
    made = []
    together = max(1, TOKENS_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), together):
        found = simulator.hits(model, rows[start : start + together], source, 1 - budget, networks=butler)
        made.append([hosts.fetched(x)[1:] for x in found])
    share, mass = (np.concatenate(parts, axis=1) for parts in zip(*made, strict=True))  # [L - 1, R, T]
    return {"hit_rate": share.mean((1, 2)), "token_accuracy": share[..., -1].mean(1), "mass": mass.mean((1, 2))}


# The run.


def train(
    folder: str | Path,
    model: Decoder,
    config: ButlerConfig,
    corpus: Corpus,
    settings: Settings,
    *,
    budget: float = 0.5,
    options: loop.Options = loop.DEFAULTS,
) -> tuple[Butler, dict[str, Any] | None]:
    """Train a predictor, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    ``budget`` is the share of the tokens that a query reads, for the hit rate. For the other arguments and the errors
    see :func:`train.loop.run`.

    Returns:
        The predictor, and the summary; None if the run was stopped before its end.
    """

    def loss(model: Decoder, butler: Butler, tokens: Array, key: Array) -> Array:
        return loss_of(model, butler, tokens, causal=settings.causal, dropout_key=key if config.dropout else None)

    def measured(butler: Butler, source: str) -> dict[str, Any]:
        return measure(model, butler, corpus.held_out, source, budget)

    def held_out_loss(butler: Butler) -> float:  # without dropout
        rows = [row[None] for row in corpus.held_out]
        return float(np.mean([_compiled_loss(model, butler, row, causal=settings.causal) for row in rows]))

    def compare(butler: Butler) -> tuple[dict[str, Any], dict[str, Any]]:
        share = config.num_parameters / sum(map(math.prod, model_shapes(model.config).values()))
        found = {source: measured(butler, source) for source in ("butler", *BASELINES)}
        return found, {"share_of_model": share, "held_out_loss": held_out_loss(butler)}

    objective = networks.Objective(
        loss=loss,
        measure=lambda butler: measured(butler, "butler") | {"loss": held_out_loss(butler)},
        compare=compare,
    )
    return networks.train(folder, model, config, corpus, settings, objective, budget=budget, options=options)


# The command.


def table(summary: dict[str, Any]) -> str:
    """Return the summary as a table in text."""
    lines = [
        f"{summary['parameters']:,} parameters, {100 * summary['share_of_model']:.3f}% of the model · "
        f"{summary['tokens']:,} tokens in {summary['seconds']:,.0f} s · held-out loss {summary['held_out_loss']:.4f}",
        "",
        f"{'budget ' + str(summary['budget']):<16}{'hit rate':>10}{'accuracy':>10}{'mass':>10}",
    ]
    for name, row in sorted(summary["figures"].items(), key=lambda item: -item[1]["hit_rate"]):
        lines.append(f"{name:<16}" + "".join(f"{row[key]:>10.3f}" for key in ("hit_rate", "token_accuracy", "mass")))
    lines += [
        "",
        "hit rate: share of the oracle's tokens that are chosen, mean over all queries; accuracy: the same for the",
        "last query, the paper's figure; mass: true attention held by the chosen tokens. No sinks are added.",
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = command.parser(
        "train.butler", script="kvjax-train-butler", description="Trains TokenButler's predictor for a frozen model.",
        examples=EXAMPLES, out="butler", seq_len="1024 or 2048, by the model's width", lr="1e-3",
    )  # fmt: skip
    flags.add_argument("--hidden", type=count, help="hidden width of the two networks")
    flags.add_argument("--dim", type=count, help="D', width of the predicted queries and keys")
    flags.add_argument("--source", choices=SOURCES, help="what the predictor reads")
    flags.add_argument("--dropout", type=float, help="share of the feed-forward's output that is dropped")
    flags.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="loss of visible pairs only; published: of all pairs"
    )
    flags.add_argument("--budget", type=float, default=0.5, help="share of tokens read, for the hit rate")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input, a loss that is not finite, or a full disk."""
    return commands.call(parser(), _run, "train.butler", arguments)


def _run(flags: argparse.Namespace) -> None:
    loaded = command.load(flags)
    model, embedded = loaded.model, loaded.embedded
    settings = settings_of(model.config, embedded=embedded, **command.changes_of(flags, Settings))
    shape = {name: getattr(flags, name) for name in ("hidden", "dim", "source", "dropout")}
    config = butler_config_of(model.config, embedded=embedded, **shape)
    corpus = command.open_text(flags, loaded.tokenizer, settings)
    options = command.options_of(flags, loaded, "train.butler")
    _, summary = train(flags.out, model, config, corpus, settings, budget=flags.budget, options=options)
    command.report(flags, summary, table)
