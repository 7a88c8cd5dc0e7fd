"""Trains a network that scores tokens, for a frozen model: `python -m train.scorer`.

It predicts an expensive score of each token, for each KV head of each layer, from the input of the layer's attention.
The loss is that of the network's kind, as published:

    scorer    KVzap's (arXiv 2601.07891): the mean squared error of the score's logarithm
    gate      Fast KVzip's (arXiv 2601.17668): the binary cross-entropy of the score

The target is the score of a policy that observes the model while it repeats the row, asked to in words, or what answers
to questions about a text feel:

    kvzip     the largest attention that a token gets from the repeated ones
    kvgrad    the most that a loss of the repeated tokens would feel its absence, from 0 to 1 (:func:`from_0_to_1`)
    asked     the most that the row's answers would feel it, from 0 to 1 (train/asked.py); for data with answers

A step makes the target of its rows, then runs the model once more, and computes each layer's loss as the layer runs.
The folder --out holds NAME.safetensors and NAME.json, the last checkpoint's network, and what every run's has
(train/loop.py).
"""

from __future__ import annotations

from models.commands.shared_flags import at_least

if __name__ == "__main__":  # before the other imports, so that a missing extra is named
    from models import commands

    with commands.extra("train", "train.scorer"):
        from train import scorer  # this file, under its own name
    raise SystemExit(scorer.main())

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
import models
from kvjax import OutputProjection, Policy, RepeatPrompt
from kvjax._src.reconstruction import NO_WORDS, Repeated
from models import commands, hosts
from models.config import Config
from models.decoder import Decoder
from models.dense import attention_in_chunks
from models.networks import load_network, parameters_of
from models.planning import mesh_of
from models.repeating import asking, repeat_prompt
from models.scorer import Scorer, ScorerConfig, logarithm
from models.tokenizer import Tokenizer
from train import answers, asked, checkpoints, command, loop, networks
from train.text import Corpus

EXAMPLES = """examples:
  python -m train.scorer --model smollm2 --data books/ --target kvzip --out scorer/
  python -m train.scorer --model smollm2 --data books/ --network gate --target kvgrad --out gate/
  python -m train.scorer --model smollm2 --data qa.jsonl --network gate --target asked --begin gate/ --out asked/
  python -m train.scorer --model path/to/Llama-3.2-1B --data text/ --hidden 0 --out scorer/
  python -m models.generate smollm2 --policy "zap+protect(recent=128)" --networks scorer/ --budget 0.3 \\
      --prompt-file a.txt
"""


ASKED = "asked"  # the target that is no policy's score


@dataclasses.dataclass(frozen=True)
class Settings(loop.Settings):
    """The settings of a run; see :class:`train.loop.Settings`. ``target`` is the score that is predicted."""

    tokens: int = 4_000_000
    seq_len: int = 1024
    batch: int = 1
    lr: float = 1e-3
    target: str = "kvzip"


def settings_of(model: Config, words: int = 0, **changes: Any) -> Settings:
    """Return the checked settings for a model, with changes; ``words`` tokens ask it to repeat a row."""
    settings = Settings().changed(**changes)
    repeats = settings.target != ASKED
    if repeats:
        policy_of_target(settings.target)
    loop.check_settings(settings, model)
    if repeats and 2 * settings.seq_len + words > model.max_positions:
        raise ValueError(
            f"--seq-len is {settings.seq_len}; for the target {settings.target} the model repeats a row after {words} "
            f"words, in {2 * settings.seq_len + words} of its {model.max_positions} positions: give a smaller one."
        )
    return settings


def policy_of_target(target: str, prompt: RepeatPrompt = NO_WORDS) -> Policy:
    """Return the policy whose score is the target.

    ``prompt`` asks the model to repeat a row; :func:`models.repeating.repeat_prompt` has KVzip's words. Without any the
    row is fed again unasked, and scores are others.

    Raises:
        ValueError: the target is no score that is observed while the model repeats its text.

    Example:
        >>> from train.scorer import policy_of_target
        >>> policy_of_target("kvgrad(loss='tokens')").needs.reconstruction.loss
        'tokens'
    """
    try:
        policy = kvjax.parse(target)
    except ValueError as error:
        raise ValueError(f"--target expects kvzip, kvgrad or asked: {error}") from None
    if policy.inherited is not None or not isinstance(policy.init(1, 1, 1, 1, 1), Repeated):
        raise ValueError(
            f"--target is {target!r}; expected a score of a text that is repeated, kvzip or kvgrad, with no link or "
            "allocation behind it, or asked."
        )
    return asking(policy @ "uniform", prompt)  # all tokens are scored, and none is evicted


class Scored(NamedTuple):
    """Rows with the scores that a network learns.

    Attributes:
        tokens: those of the rows.
        score: of each token, for each KV head of each layer with attention.
        counted: the tokens whose scores are learned.
    """

    tokens: Int[Array, "B T"]
    score: Float[Array, "L B T K"]
    counted: Bool[Array, "B T"]


Target = Callable[[Any], Scored]  # of rows, on the host or on the mesh


def target_of(model: Decoder, target: str, prompt: RepeatPrompt = NO_WORDS, begin: Scorer | None = None) -> Target:
    """Return what scores rows of text, or for the target "asked" rows of :mod:`train.answers`.

    A network that was trained before, ``begin``, forgets what it knew if it is asked alone; so its own scores count
    half of what it is asked.
    """
    if target == ASKED:
        return functools.partial(_asked, model, begin)
    policy = policy_of_target(target, prompt)
    projection = models.output_projection(model, policy)

    def scored(rows: Int[Array, "B T"]) -> Scored:
        B, T = rows.shape
        counted = jnp.broadcast_to(jnp.arange(T) < T - 1, (B, T))
        return Scored(jnp.asarray(rows), scores_of(model, rows, policy, projection), counted)

    return scored


def _asked(model: Decoder, begin: Scorer | None, rows: Int[Array, "B T"]) -> Scored:
    fed = answers.model_batch(hosts.fetched(rows))
    text = fed.lengths + 1 - fed.answers
    counted = jnp.arange(rows.shape[1]) < text[:, None]
    score = from_0_to_1(asked.felt_by_answers(model, fed.tokens, text, fed.learned), counted)
    given = Scored(jnp.asarray(fed.tokens), score, counted)
    return given if begin is None else given._replace(score=(score + _known(model, begin, given)) / 2)


@jax.jit
def _known(model: Decoder, network: Scorer, given: Scored) -> Float[Array, "L B T K"]:
    """Return the scores that a network predicts, from 0 to 1."""
    return run_layers(model, given.tokens, given.score, lambda layer, x, _: jnp.exp(network(layer, x)))


def scores_of(
    model: Decoder, tokens: Int[Array, "B T"], policy: Policy, projection: tuple[OutputProjection, ...] | None = None
) -> Float[Array, "L B T K"]:
    """Return the scores that a policy gives rows while the model repeats them, from 0 to 1.

    KVzip's are weights of attention. Those that a loss feels (KVgrad) have its scale, and those of KVzip+ that of
    values: they go through :func:`from_0_to_1`. A token that a layer's sliding window hides from the repeated ones has
    0. ``projection`` is :func:`models.output_projection`'s, computed anew by default.
    """
    (B, T), mesh = tokens.shape, mesh_of(model)
    ways = 1 if mesh is None else mesh.shape["data"]
    rows = np.resize(hosts.fetched(tokens), (-(-B // ways) * ways, T))  # some twice, so that they can be spread
    cache = models.prefill(model, rows, policy=policy, budget=T, when="prompt", projection=projection).cache
    wanted, score = policy.needs.reconstruction, _by_position(cache, B, T)
    unbounded = wanted is not None and (wanted.loss is not None or wanted.input_length)
    return from_0_to_1(score, jnp.ones((B, T), bool)) if unbounded else score


def _has_gradient(target: str) -> bool:
    """Return whether a target takes the gradient of a loss, whose scale its scores have."""
    if target == ASKED:
        return True
    wanted = policy_of_target(target).needs.reconstruction
    return wanted is not None and wanted.loss is not None


@jax.jit
def from_0_to_1(score: Float[Array, "L B T K"], counted: Bool[Array, "B T"]) -> Float[Array, "L B T K"]:
    """Map scores s of any scale to s / (s + c), where a tenth of a row's counted ones exceed c.

    The row's scores of all layers and heads count together. The map keeps their order, and tells apart those next to c,
    where a budget of a tenth to a quarter divides them.
    """
    scale = jnp.nanquantile(jnp.where(counted[..., None], score, jnp.nan), 0.9, axis=(0, 2, 3), keepdims=True)
    return jnp.where(score > 0, score / (score + scale), 0)  # both are 0 where windows hide nine tenths


@functools.partial(jax.jit, static_argnums=(1, 2))
def _by_position(cache: Any, B: int, T: int) -> Float[Array, "L B T K"]:
    """Return the scores that a cache's policy has given the first B rows."""

    def of_layer(layer):
        here = cache.layer(layer)
        position = jnp.where(here.position < 0, T, here.position)[:B]  # [B, K, S]; T is left out
        nothing = jnp.zeros((*position.shape[:2], T))
        return jnp.put_along_axis(nothing, position, here.state.score[:B], axis=-1, inplace=False, mode="drop")

    return jnp.stack([of_layer(number) for number in range(cache.heads_shape[0])]).swapaxes(2, 3)


def run_layers(
    model: Decoder,
    tokens: Int[Array, "B T"],
    score: Float[Array, "L B T K"],
    of_layer: Callable[[Int[Array, ""], Float[Array, "B T E"], Float[Array, "B T K"]], Any],
) -> Any:
    """Run a frozen model over rows and collect what a function returns of each layer.

    ``of_layer(layer, x, score)`` gets the input of the layer's attention and the tokens' scores (:func:`scores_of`).
    """
    B, T = tokens.shape
    position = jnp.broadcast_to(jnp.arange(T), (B, T))

    def attend(x, layer, sliding_window, query, key, value):
        cap, sinks = model.config.attention_soft_cap, model.sink_logits(layer)
        out = attention_in_chunks(query, key, value, position, sliding_window, cap, sinks)
        return out, x, of_layer(layer, x, jax.lax.stop_gradient(score[layer]))

    def before_attention(_, layer, x):
        return jax.lax.stop_gradient(x)

    nothing = jnp.zeros((B, T, model.config.hidden_size), model.embedding[...].dtype)
    _, _, found = model.run(tokens, position, jnp.full(B, T), attend, nothing, before_attention=before_attention)
    return found


def loss_of(model: Decoder, network: Scorer, given: Scored) -> Float[Array, ""]:
    """Return the network's loss on the scores, a mean over layers, heads and the tokens that count."""
    counted = given.counted[..., None]

    def of_layer(layer, x, score):
        return jnp.mean(network.loss(layer, x, score), where=counted)

    return jnp.mean(run_layers(model, given.tokens, given.score, of_layer))


def measure(
    model: Decoder,
    network: Scorer,
    rows: Int[np.ndarray, "R T"],
    budget: float,
    target: Target,
) -> dict[str, Float[np.ndarray, "layers"]]:
    """Measure a network on held-out rows, for each layer: means over rows and heads, of the tokens that count.

    ``error`` is the mean squared error of the logarithm of the score. ``explained`` is the share of the logarithms'
    variance over a head's tokens that is explained (R squared). ``hit_rate`` is the share of the best tokens by the
    target that are also among the best by the network, where a head keeps the share ``budget`` of its tokens.
    """
    made = []
    for row in rows:
        own = target(row[None])
        both = jax.tree.map(hosts.fetched, _predicted_and_true(model, network, own))
        counted = hosts.fetched(own.counted)[0]
        predicted, true = (np.asarray(x, np.float64)[:, 0, counted] for x in both)  # [L, counted, K]
        error = (predicted - true) ** 2
        spread = np.maximum(((true - true.mean(axis=1, keepdims=True)) ** 2).mean(axis=1), 1e-12)
        kept = max(round(budget * true.shape[1]), 1)
        chosen, best = (np.argsort(-x, axis=1, kind="stable")[:, :kept] for x in (predicted, true))
        hits = [
            [len(set(chosen[layer, :, head]) & set(best[layer, :, head])) / kept for head in range(true.shape[2])]
            for layer in range(len(true))
        ]
        made.append(
            {
                "error": error.mean(axis=(1, 2)),
                "explained": (1 - error.mean(axis=1) / spread).mean(axis=1),
                "hit_rate": np.mean(hits, axis=1),
            }
        )
    return {name: np.mean([one[name] for one in made], axis=0) for name in made[0]}


@jax.jit
def _predicted_and_true(model, network, given):
    def both(layer, x, score):
        return network.predict(layer, x).score, logarithm(score)

    return run_layers(model, given.tokens, given.score, both)


@jax.jit
def mean_logarithms(given: Scored) -> Float[Array, "L K"]:
    """Return the mean logarithm of the scores that count, for each head of each layer."""
    return jnp.mean(logarithm(given.score), axis=(1, 2), where=given.counted[None, ..., None])


def train(
    folder: str | Path,
    model: Decoder,
    network: ScorerConfig | Scorer,
    corpus: Corpus,
    settings: Settings,
    *,
    prompt: RepeatPrompt = NO_WORDS,
    budget: float = 0.3,
    options: loop.Options = loop.DEFAULTS,
) -> tuple[Scorer, dict[str, Any] | None]:
    """Train a scorer, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    Args:
        network: its shape, or a network that is trained further (:func:`target_of`).
        prompt: asks the model to repeat a row; see :func:`policy_of_target`.
        budget: the share of its tokens that a head keeps, for the hit rate.
        folder, model, corpus, settings, options: see :func:`train.loop.run`, also for the errors.

    Returns:
        The network, and the summary; None if the run was stopped before its end.

    Raises:
        ValueError: the budget is not in (0, 1], or the target takes a gradient on several devices.
    """
    if _has_gradient(settings.target) and options.mesh is not None and options.mesh.size > 1:
        raise ValueError(
            f"--target is {settings.target!r}, which takes the gradient of a loss on one device, but --mesh has "
            f"{options.mesh.size}: leave --mesh out, or give another target, such as kvzip."
        )
    begin, config = (network, network.config) if isinstance(network, Scorer) else (None, network)
    began = None if begin is None else checkpoints.digest(parameters_of(begin))
    target = target_of(model, settings.target, prompt, begin)

    def first() -> dict[str, np.ndarray]:
        """Return a network's parameters, or the bias with which each head predicts its mean logarithm in a row."""
        if begin is not None:
            return {name: np.asarray(hosts.fetched(array), np.float32) for name, array in parameters_of(begin).items()}
        if config.kind == "gate":
            return {}
        row, _ = next(corpus.rows(None))
        return {"output_bias": np.asarray(hosts.fetched(mean_logarithms(target(row[None]))))}

    def measured(scorer: Scorer) -> dict[str, np.ndarray]:
        return measure(model, scorer, corpus.held_out, budget, target)

    objective = networks.Objective(
        begin=first,
        given=target,
        loss=lambda model, scorer, given, key: loss_of(model, scorer, given),
        measure=measured,
        compare=lambda scorer: (measured(scorer), {}),
        described={"words": prompt._asdict(), "begins with": began},
    )
    return networks.train(folder, model, config, corpus, settings, objective, budget=budget, options=options)


# The command.


def table(summary: dict[str, Any]) -> str:
    """Return the summary as a table in text."""
    figures, layers = summary["figures"], summary["layers"]
    lines = [
        f"{summary['parameters']:,} parameters · {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s · target "
        f"{summary['settings']['target']} · held-out error {figures['error']:.4f}",
        "",
        f"{'layer':<8}{'error':>10}{'explained':>12}{'hit rate':>10}   at a budget of {summary['budget']}",
    ]
    for layer, row in enumerate(zip(layers["error"], layers["explained"], layers["hit_rate"], strict=True)):
        lines.append(f"{layer:<8}{row[0]:>10.3f}{row[1]:>12.3f}{row[2]:>10.3f}")
    lines.append(f"{'mean':<8}{figures['error']:>10.3f}{figures['explained']:>12.3f}{figures['hit_rate']:>10.3f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = command.parser(
        "train.scorer", description="Trains a small network, which the policy zap evicts by, for a frozen model.",
        examples=EXAMPLES, out="scorer", seq_len=str(Settings().seq_len), lr=f"{Settings().lr:g}",
    )  # fmt: skip
    flags.add_argument(
        "--network", default="scorer", choices=("scorer", "gate"),
        help="scorer (KVzap, the default) or gate (Fast KVzip)",
    )  # fmt: skip
    flags.add_argument("--target", help="the score to predict: kvzip (the default), kvgrad or asked (one device)")
    flags.add_argument("--begin", type=Path, help="a folder with such a network of the model, to train further")
    flags.add_argument(
        "--hidden", type=at_least(0),
        help="width of a scorer's hidden layer, 0 for a linear map (default E / 8), or of a gate's keys (default 16)",
    )  # fmt: skip
    flags.add_argument("--budget", type=float, default=0.3, help="share of tokens kept, for the hit rate")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input, a loss that is not finite, or a full disk."""
    return commands.call(parser(), _run, "train.scorer", arguments)


def _run(flags: argparse.Namespace) -> None:
    loaded = command.load(flags)
    prompt = repeat_prompt(loaded.tokenizer)
    words = len(prompt.first) + len(prompt.suffix)
    settings = settings_of(loaded.model.config, words, **command.changes_of(flags, Settings))
    begin = None if flags.begin is None else load_network(flags.begin, loaded.model)
    config = ScorerConfig.of(loaded.model.config, flags.hidden, flags.network) if begin is None else begin.config
    if begin is not None and flags.hidden not in (None, config.hidden):
        raise ValueError(f"--begin {flags.begin} has {config.hidden} hidden numbers, but --hidden is {flags.hidden}.")
    if not isinstance(config, ScorerConfig) or config.kind != flags.network:
        raise ValueError(f"--begin {flags.begin} holds a {config.kind}, but --network is {flags.network}.")
    corpus = _corpus(flags, loaded.tokenizer, settings)
    options = command.options_of(flags, loaded, "train.scorer")
    _, summary = train(
        flags.out, loaded.model, begin or config, corpus, settings, prompt=prompt, budget=flags.budget, options=options,
    )  # fmt: skip
    command.report(flags, summary, table)


def _corpus(flags: argparse.Namespace, tokenizer: Tokenizer, settings: Settings) -> Corpus:
    if settings.target != ASKED:
        return command.open_text(flags, tokenizer, settings)
    if flags.data is None or not answers.are_answers(flags.data):
        raise ValueError(
            "--target asked learns from what answers feel; give --data of JSON lines with prompt and answer, such as "
            "python -m papers questions makes."
        )
    return answers.open_answers(
        flags.data, tokenizer, settings.seq_len, eval_names=flags.eval_data, eval_rows=flags.eval_rows,
        seed=settings.seed,
    )  # fmt: skip
