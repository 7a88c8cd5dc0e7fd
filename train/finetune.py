"""Fine-tunes a model with its policy in place: `python -m train.finetune`.

A step runs the model as it will be used: the prompt goes through an evicting prefill, and each token's loss is that of
reading what the policy has kept. Gradients flow through the attention and the kept keys and values, past the rounding
of a cache in eight bits; the choice of the tokens that stay has none. Text is learned as it stands, under evictions
after each block. Of prompts with answers the answer is learned, fed after its prompt was compressed.

A derivative keeps the cache before each block and computes one block's activations again; of the logits it holds a part
of the tokens at a time. All weights are trained, or LoRA's low-rank matrices (train/lora.py).

The folder ``--out`` is a Hugging Face folder of the last checkpoint's model, or of its adapter after LoRA;
``models.load`` reads both. It also holds what every run's does (train/loop.py).
"""

from __future__ import annotations

from models.commands.shared_flags import count

if __name__ == "__main__":  # before the other imports, so that a missing extra is named
    from models import commands

    with commands.extra("train", "train.finetune"):
        from train import finetune  # this file, under its own name
    raise SystemExit(finetune.main())

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import kvjax
import models
from evals import loglikelihood
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_names
from kvjax._src.quantise import check_dtypes
from kvjax._src.selection import share_of_tokens
from kvjax.schedule import When, moments
from models import adapters, commands, hosts
from models.commands.shared_flags import add_shared_flags
from models.config_json import to_hugging_face
from models.decoder import Decoder
from models.tokenizer import Tokenizer
from train import answers, command, loop, lora
from train.loop import Parameters, State
from train.parts import summed
from train.text import Corpus

FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
EXAMPLES = """examples:
  python -m train.finetune --model smollm2 --data qa.jsonl --policy snapkv+caote --budget 0.25 --when prompt --out tuned
  python -m train.finetune --model smollm2 --data text.jsonl --policy h2o+caote --budget 128 --lora 8 --out tuned
  python -m train.finetune --model smollm2 --data qa.jsonl --policy full --eval-policy full,snapkv+caote --out control
a line of text is {"text": ...}; a line of a question {"prompt": ..., "answer": ...}, with more about the same text in
"more": [[prompt, answer], ...]
"""


@dataclasses.dataclass(frozen=True)
class Settings(loop.Settings):
    """Settings of a run, beside those of :class:`train.loop.Settings`.

    ``policy``, ``budget``, ``block``, ``when`` and ``cache_dtype`` are those of :func:`models.prefill`. ``lora`` is the
    rank of the matrices beside the projections ``lora_on`` (all if empty); 0 trains all weights.
    """

    tokens: int = 1_000_000
    seq_len: int = 512
    batch: int = 8
    lr: float = 2e-5
    warmup: float = 0.03
    policy: str = "snapkv+caote"
    budget: int | float = 0.25
    block: int = 128
    when: str = "block"
    cache_dtype: str | None = None
    lora: int = 0
    lora_on: tuple[str, ...] = ()


def check_settings(settings: Settings, config: models.Config, *, text: bool) -> None:
    """Raise ValueError, with the flag's name, unless a run's settings are in range and fit the model and the data.

    ``text`` says whether the data are text, without prompts that could be compressed as a whole.
    """
    loop.check_settings(settings, config)
    known = lora.projections(config)
    if settings.lora < 0:
        raise ValueError(f"--lora is {settings.lora}; give a rank of at least 1.")
    if settings.cache_dtype is not None:
        check_dtypes(settings.cache_dtype)
    check_names("--lora-on", settings.lora_on, known)
    policy, when = _checked_policy(settings, settings.policy), settings.when
    if policy is None:
        return
    evicts = moments(policy, cast(When, when), None)[0]
    if evicts == "block" and not policy.allocation.even:
        raise ValueError(
            f"{policy.name!r} moves tokens between pages after each block, which has no derivative; take an allocation "
            "that gives all heads the same budget, or --when prompt with prompts and answers."
        )
    if text:
        _check_row(settings, [settings.policy], settings.seq_len - 1)
    if text and evicts == "prompt":
        raise ValueError(
            f"{policy.name!r} evicts once, after the last token of a text, which changes nothing that is learned; take "
            "--when block and a policy that can, or data with prompts and answers."
        )


def _check_row(settings: Settings, names: Sequence[str], fed: int) -> None:
    """Raise ValueError if a ratio of a row's ``fed`` tokens, prompt and answer, is too few slots for a policy."""
    for policy in map(policy_of, names):
        if policy is not None and isinstance(settings.budget, float):
            kvjax.check_budget(policy, share_of_tokens(settings.budget, fed))


def _checked_policy(settings: Settings, name: str) -> kvjax.Policy | None:
    """Return a policy of a run or of its table, None for the full cache."""
    policy = policy_of(name)
    if policy is None:
        return None
    if policy.needs.predicted:
        raise ValueError(f"{policy.name!r} scores by a network that was trained for the frozen model; take another.")
    if policy.needs.reconstruction is not None:
        raise ValueError(f"{policy.name!r} has the model repeat its prompt, which training does not; take another.")
    kvjax.check_block(policy, settings.block)
    if isinstance(settings.budget, int):
        kvjax.check_budget(policy, settings.budget)
    return policy


# The model that is trained, and its loss.


def model_of(model: Decoder, parameters: Parameters, settings: Settings) -> Decoder:
    """Return the trained model: of the parameters, its arrays, or of the first model's with LoRA's products added."""
    if settings.lora:
        parameters = _merged(model.config, model.arrays(), parameters)
    return Decoder(model.config, parameters)


_merged = jax.jit(lora.merged, static_argnums=0)


def loss_of(model: Decoder, rows: Int[np.ndarray, "B T"], settings: Settings) -> Float[Array, ""]:
    """Compute the mean loss of the learned tokens of a batch, in nats, each read from what the policy has kept.

    ``rows`` are on the host; see :mod:`train.answers`. Errors are those of :func:`models.prefill`.
    """
    fed = answers.model_batch(rows)
    kept = _arguments(settings, settings.policy)
    # The answer's last token is predicted and not fed; the others are fed after the prompt was compressed.
    question = fed.answers - 1 if kept["policy"] is not None and fed.answers.all() else None
    _, hidden = models.hidden_states(model, fed.tokens[:, :-1], lengths=fed.lengths, question=question, **kept)
    places = _places(fed.learned)
    return _mean_loss(
        model,
        jnp.take_along_axis(hidden, places[..., None], axis=1),
        np.take_along_axis(fed.tokens[:, 1:], places, axis=1),
        np.take_along_axis(fed.learned, places, axis=1),
        max(1, loglikelihood.LOGITS_BYTES // (4 * len(rows) * model.config.vocab_size)),
    )


def _places(learned: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B P"]:
    """Return the places whose logits are needed: the learned ones, and others up to a power of two that all have."""
    most = int(learned.sum(axis=1).max())
    count = min(1 << max(most - 1, 0).bit_length(), learned.shape[1])
    return np.argsort(~learned, axis=1, kind="stable")[:, :count]


def _arguments(settings: Settings, name: str) -> dict[str, Any]:
    """Return a policy's arguments of :func:`models.hidden_states`."""
    policy, same = policy_of(name), dict(block=settings.block, cache_dtype=settings.cache_dtype)
    if policy is None:
        return dict(policy=None, **same)
    return dict(policy=policy, budget=settings.budget, when=settings.when, **same)


@functools.partial(jax.jit, static_argnames="places")
def _mean_loss(
    model: Decoder,
    hidden: Float[Array, "B T E"],
    following: Int[Array, "B T"],
    learned: Array,
    places: int,
) -> Float[Array, ""]:
    """Compute the mean loss, with the logits of ``places`` tokens per row at a time, also in its derivative."""

    def of_part(hidden: Array, following: Array, learned: Array) -> Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), following)
        return jnp.sum(jnp.where(learned, losses, 0))

    return summed(of_part, (hidden, following, learned), places) / jnp.sum(learned)


def held_out_loss(model: Decoder, rows: Int[np.ndarray, "R T"], settings: Settings, policy: str) -> float:
    """Compute the mean loss of the learned tokens of held-out rows under a policy, in nats."""
    fed = answers.model_batch(rows)
    kept = _arguments(settings, policy)
    found = loglikelihood.predict(
        model,
        [tokens[: length + 1].tolist() for tokens, length in zip(fed.tokens, fed.lengths, strict=True)],
        fed.answers.tolist(),
        batch=settings.batch,
        **kept | {"policy": str(kept["policy"] or "full")},
    )
    told = zip(found, fed.learned, fed.lengths, strict=True)
    losses = [-row.log_probability[learned[:length]] for row, learned, length in told]
    return float(np.concatenate(losses).mean(dtype=np.float64))


def make_step(settings: Settings) -> Callable[[Decoder, State, Array, int], tuple[State, Array, Array]]:
    """Return a step: (model, state, rows [B, T], number) -> state, loss, the gradient's norm before clipping.

    The host cuts the rows into blocks; the model's pass, the loss and the update are compiled programs.
    """
    update = jax.jit(functools.partial(loop.updated, loop.make_optimizer(settings)))

    def step(model: Decoder, state: State, rows: Array, number: int) -> tuple[State, Array, Array]:
        def objective(parameters: Parameters) -> Array:
            return loss_of(model_of(model, parameters, settings), hosts.fetched(rows), settings)

        loss, gradients = jax.value_and_grad(objective)(state.parameters)
        state, norm = update(state, gradients)
        return state, loss, norm

    return step


def init_state(model: Decoder, settings: Settings, mesh: Mesh | None = None) -> State:
    """Return the first parameters (the model's, or LoRA's of no effect) and the optimizer's state.

    On a mesh, what does not lie there yet goes to every device, so that a restored state lies where this one does.
    """
    if settings.lora:
        on = settings.lora_on or lora.projections(model.config)
        parameters = lora.init(model.config, settings.lora, on, settings.seed)
    else:
        parameters = model.arrays()
    key = jax.random.key_data(jax.random.key(settings.seed + 1))
    state = State(parameters, loop.make_optimizer(settings).init(parameters), key)
    if mesh is None:
        return state
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere), state)


# The run.


def train(
    folder: str | Path,
    model: Decoder,
    tokenizer: Tokenizer | None,
    corpus: Corpus,
    settings: Settings,
    *,
    eval_policies: Sequence[str] = (),
    options: loop.Options = loop.DEFAULTS,
) -> tuple[Decoder, dict[str, Any] | None]:
    """Fine-tune a model, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    Args:
        tokenizer: saved with the model; an adapter has its base model's.
        corpus: rows of text (:func:`train.text.open_corpus`), or of answers (:func:`train.answers.open_answers`).
        eval_policies: the policies of the table before and after, at the run's budget; the full cache and the run's own
            by default.
        folder, settings, options: see :func:`train.loop.run`, also for the errors.

    Returns:
        The trained model, and the summary; None if the run was stopped before its end.
    """
    folder = Path(folder)
    text = bool((corpus.held_out >= 0).all())
    check_settings(settings, model.config, text=text)
    dtype = model.embedding[...].dtype
    if not settings.lora and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"the model is in {dtype}, in which steps of the learning rate round to nothing; train all weights in "
            "float32, or low-rank matrices (--lora)."
        )
    if not settings.lora:
        to_hugging_face(model.config)  # refuses before the first step what cannot be saved
    named = eval_policies or ("full", settings.policy)
    evaluated = list(dict.fromkeys(str(_checked_policy(settings, policy) or "full") for policy in named))

    def save(parameters: Parameters) -> None:
        if settings.lora:
            base = str(Path(options.name).resolve()) if Path(options.name).exists() else options.name
            adapters.save(folder, model.config, parameters, base=base, scale=lora.SCALE)
        else:
            models.save(folder, model_of(model, parameters, settings), tokenizer)

    def measure(parameters: Parameters) -> dict[str, float]:
        return {
            "loss": held_out_loss(model_of(model, parameters, settings), corpus.held_out, settings, settings.policy)
        }

    def summarise(parameters: Parameters) -> tuple[dict[str, Any], dict[str, float]]:
        stages = {"before": model, "after": model_of(model, parameters, settings)}
        losses = {
            policy: {when: held_out_loss(tuned, corpus.held_out, settings, policy) for when, tuned in stages.items()}
            for policy in evaluated
        }
        found = {
            "parameters": sum(math.prod(array.shape) for array in parameters.values()),
            "held_out_rows": len(corpus.held_out),
            "held_out_tokens": int(answers.model_batch(corpus.held_out).learned.sum()),
            "held_out_loss": losses,
        }
        return found, {f"{policy}/{when}": loss for policy, own in losses.items() for when, loss in own.items()}

    trainer = loop.Trainer(
        command="train.finetune",
        configuration={"evaluated": evaluated},
        init=functools.partial(init_state, model, settings, options.mesh),
        step=make_step(settings),
        save=save,
        measure=measure,
        summarise=summarise,
        files=adapters.FILES if settings.lora else FILES,
    )
    parameters, summary = loop.run(folder, trainer, model, corpus, settings, options)
    return model_of(model, parameters, settings), summary


# The command.


def table(summary: dict[str, Any]) -> str:
    """Return the summary as a table in text."""
    settings = summary["settings"]
    budget = settings["budget"]
    kept = f"{budget:.0%} of the tokens" if isinstance(budget, float) else f"{budget} slots per head"
    kept += f", cache of {settings['cache_dtype']}" if settings["cache_dtype"] else ""
    lines = [
        f"{summary['parameters']:,} parameters trained under {settings['policy']} · {summary['tokens']:,} tokens in "
        f"{summary['seconds']:,.0f} s",
        "",
        f"loss per token in nats, {summary['held_out_tokens']:,} held-out tokens, budget {kept}",
        f"{'policy':<32}{'before':>10}{'after':>10}",
    ]
    lines += [
        f"{policy:<32}{losses['before']:>10.4f}{losses['after']:>10.4f}"
        for policy, losses in summary["held_out_loss"].items()
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    own = Settings()
    flags = command.parser(
        "train.finetune", description="Fine-tunes a model with its cache policy in place.", examples=EXAMPLES,
        out="finetuned", seq_len=str(own.seq_len), lr=f"{own.lr:.0e}, with --lora {10 * own.lr:.0e}",
    )  # fmt: skip
    defaults: dict[str, Any] = dict(policy=own.policy, budget=str(own.budget), block=own.block, when=own.when)
    add_shared_flags(flags, "chat", *defaults, "cache_dtype", **defaults)
    flags.add_argument("--lora", type=count, metavar="RANK", help="train low-rank matrices (default: all weights)")
    flags.add_argument("--lora-on", help="the projections that get them, several by comma (default: all)")
    flags.add_argument(
        "--eval-policy", help="policies of the table before and after, several by comma (default: full and --policy)"
    )
    return flags


def settings_of(flags: argparse.Namespace) -> Settings:
    """Return the settings that the flags give; a LoRA run has a ten times larger learning rate by default."""
    changes = command.changes_of(flags, Settings)
    if flags.lora_on is not None and flags.lora is None:
        raise ValueError("--lora-on was given without --lora; give a rank, such as --lora 8.")
    changes["budget"] = commands.parse_budget(flags.budget)
    changes["policy"] = str(policy_of(flags.policy) or "full")
    changes["lora_on"] = tuple(commands.split_list(flags.lora_on or ""))
    if flags.lora is not None and flags.lr is None:
        changes["lr"] = 10 * Settings().lr
    return Settings().changed(**changes)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input, a loss that is not finite, or a full disk."""
    return commands.call(parser(), _run, "train.finetune", arguments)


def _run(flags: argparse.Namespace) -> None:
    settings = settings_of(flags)
    if Path(flags.model).is_dir() and flags.out.resolve() == Path(flags.model).resolve():
        raise ValueError(f"--out is {flags.out}, the folder of --model, which the run would overwrite; name another.")
    loaded = command.load(flags)
    model, tokenizer = loaded.model, loaded.tokenizer
    of_answers = flags.data is not None and answers.are_answers(flags.data)
    check_settings(settings, model.config, text=not of_answers)
    named = commands.split_list(flags.eval_policy or "")
    if of_answers:
        corpus = answers.open_answers(
            flags.data,
            tokenizer,
            settings.seq_len,
            eval_names=flags.eval_data,
            eval_rows=flags.eval_rows,
            chat=flags.chat,
            seed=settings.seed,
            check=functools.partial(_check_row, settings, [settings.policy, *named]),
        )
    else:
        if flags.chat:
            raise ValueError("--chat is for prompts with answers, but the data are text; leave it out.")
        corpus = command.open_text(flags, tokenizer, settings)
    _, summary = train(
        flags.out,
        model,
        tokenizer,
        corpus,
        settings,
        eval_policies=named,
        options=command.options_of(flags, loaded, "train.finetune"),
    )
    command.report(flags, summary, table)
