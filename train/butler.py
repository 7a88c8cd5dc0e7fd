"""Trains TokenButler's predictor for a frozen model: `python -m train.butler`.

A step runs the model once. Layer 0's output goes to the predictor, and as the other layers run, the loss compares each
layer's queries and keys with the predicted ones (kernels_pallas.mse_logits) and computes its gradient at once: nothing
of the model is kept for a backward pass. What a step reads follows from the data's position, and what it drops from its
number, so a run that was killed and resumed ends with the same parameters as one that was not, bit for bit.

The folder --out holds butler.safetensors and butler.json (the last checkpoint's predictor), checkpoints/, run.json
(which describes the run), log.jsonl, TensorBoard's events, and summary.json at the end.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that a missing extra is named
    from models import commands

    with commands.extra("train", "kvjax-train-butler"):
        from train import butler  # this file, under its own name
    raise SystemExit(butler.main())

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from tensorboardX import SummaryWriter
from tqdm import tqdm

import kvjax
import models
from evals import evaluator, selections
from kernels_pallas import mse_logits
from models import commands, provenance
from models.butler import (
    CONFIG_FILE,
    SOURCES,
    WEIGHTS_FILE,
    Butler,
    ButlerConfig,
    attention_in_chunks,
    butler_input,
    fingerprint,
    num_parameters,
    parameter_shapes,
    save_butler,
)
from models.config import Config
from models.decoder import Decoder
from models.parameters import parameter_shapes as model_shapes
from train.retriever import prefetch
from train.text import Corpus, open_corpus

Parameters = dict[str, Array]

BASELINES = ("oracle", "quest", "first_layer", "previous_layer", "random", "streaming")
RUN_FILE = "run.json"
TOKENS_AT_ONCE = 4096  # of held-out text


class Settings(NamedTuple):
    """The settings of a run. The defaults are the published ones (AdamW, one row per step; NOTES of the paper's code).

    A run reads ``tokens`` tokens in total, in steps of ``batch`` rows of ``seq_len``. The learning rate rises over the
    share ``warmup`` of the steps and falls to 0 on a cosine. With ``causal``, the loss counts only the pairs that a
    query sees, not all pairs.
    """

    tokens: int = 80_000_000
    seq_len: int = 2048
    batch: int = 1
    lr: float = 1e-3
    warmup: float = 0.1
    clip: float = 20.0
    weight_decay: float = 0.01
    causal: bool = False
    seed: int = 0

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.batch * self.seq_len))


EXAMPLES = """examples:
  python -m train.butler --out butler/
  python -m train.butler --model path/to/Llama-3.2-1B --data text/ books.jsonl --tokens 80e6 --out butler/
  python -m train.butler --model path/to/Llama-3.2-1B --data HuggingFaceFW/fineweb-edu:sample-10BT --mesh data=4
  python -m models.generate path/to/Llama-3.2-1B --butler butler/ --select butler --budget 0.5 --prompt-file book.txt
"""
EMBEDDED = Settings(tokens=3_000_000, seq_len=512, batch=8, lr=4e-3, causal=True)


class State(NamedTuple):
    parameters: Parameters
    optimizer: Any
    key: Array  # of dropout, before a step's number is folded in


class Progress(NamedTuple):
    """The progress of a run: the steps done, the data's position after them, and the seconds that they took."""

    step: int
    position: dict[str, Any] | None
    seconds: float


def settings_of(model: Config, *, embedded: bool = False, **changes: Any) -> Settings:
    """Return the settings for a model: the published ones, or those of the model that ships, with changes.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> import models
        >>> from train.butler import settings_of
        >>> llama = models.Config(128256, 4096, 14336, num_layers=32, num_heads=32, num_kv_heads=8, max_positions=8192)
        >>> settings_of(llama, tokens=10**6).seq_len, settings_of(llama, tokens=10**6).steps
        (1024, 977)
    """
    base = EMBEDDED if embedded else Settings(seq_len=1024 if model.hidden_size >= 4096 else 2048)
    settings = base._replace(**{name: value for name, value in changes.items() if value is not None})
    if not 2 <= settings.seq_len <= model.max_positions:
        raise ValueError(
            f"--seq-len is {settings.seq_len}; the model takes sequences of 2 to {model.max_positions} tokens."
        )
    if settings.batch < 1:
        raise ValueError(f"--batch is {settings.batch}; a step has at least 1 row.")
    if settings.tokens < settings.batch * settings.seq_len:
        raise ValueError(
            f"--tokens is {settings.tokens:,}; one step of {settings.batch} x {settings.seq_len} takes "
            f"{settings.batch * settings.seq_len:,}."
        )
    for flag, value in (("--lr", settings.lr), ("--clip", settings.clip)):
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} is {value}; give a number above 0.")
    if not 0 <= settings.warmup < 1:
        raise ValueError(f"--warmup is {settings.warmup}; give a share of the steps in [0, 1).")
    if settings.weight_decay < 0:
        raise ValueError(f"--weight-decay is {settings.weight_decay}; give a number from 0.")
    return settings


def butler_config_of(model: Config, *, embedded: bool = False, **changes: Any) -> ButlerConfig:
    """Return the predictor's shape for a model; for the model that ships, it is larger than a share of 1%.

    Example:
        >>> import models
        >>> from train.butler import butler_config_of
        >>> config = models.Config(64, 32, 96, num_layers=3, num_heads=4, num_kv_heads=2)
        >>> butler_config_of(config, hidden=24).hidden
        24
    """
    base = ButlerConfig.of(model)
    if embedded:
        base = dataclasses.replace(base, hidden=256, dim=32)
    changes = {name: value for name, value in changes.items() if value is not None}
    if {"hidden", "dim"} & changes.keys():
        base = dataclasses.replace(base, published_layout=False)
    return dataclasses.replace(base, **changes)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return an optimizer: clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate_schedule(settings), weight_decay=settings.weight_decay),
    )


def rate_schedule(settings: Settings) -> optax.Schedule:
    """Return the learning rate by step.

    Example:
        >>> from train.butler import Settings, rate_schedule
        >>> rate = rate_schedule(Settings(tokens=100 * 2048, lr=1.0))
        >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 55, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = round(settings.warmup * settings.steps)
    return optax.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, max(settings.steps, warmup + 1))


def loss_of(
    model: Decoder, butler: Butler, tokens: Int[Array, "B T"], *, causal: bool = False, dropout_key: Array | None = None
) -> Float[Array, ""]:
    """Return the published loss (TokenButler, section 3.2): the logits' mean squared error, a mean over layers.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> from train.butler import loss_of
        >>> config = models.Config(64, 32, 96, num_layers=3, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(0))
        >>> bool(loss_of(model, butler, jnp.arange(8)[None]) > 0)
        True
    """
    config, T = butler.config, tokens.shape[1]
    position = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    predict = functools.partial(butler, dropout_key=dropout_key)

    def attend(predicted, layer, sliding_window, query, key, value):
        out = attention_in_chunks(query, key.swapaxes(1, 2), value.swapaxes(1, 2), position, sliding_window)
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


def make_step(config: ButlerConfig, settings: Settings, mesh: Mesh) -> Callable:
    """Compile a step: (model, state, tokens [B, T], step) -> state, loss, the gradient's norm before clipping."""
    optimizer = make_optimizer(settings)

    def step(model, state, tokens, number):
        dropout_key = jax.random.fold_in(state.key, number) if config.dropout else None

        def objective(parameters):
            butler = Butler(config, parameters)
            return loss_of(model, butler, tokens, causal=settings.causal, dropout_key=dropout_key)

        loss, gradients = jax.value_and_grad(objective)(state.parameters)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        return State(parameters, optimizer_state, state.key), loss, optax.tree.norm(gradients)

    # Nothing is donated, as an asynchronous save may still be reading the last state.
    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def init_state(config: ButlerConfig, settings: Settings, mesh: Mesh) -> State:
    """Return random parameters and a new optimizer's state, on every device."""

    def make():
        butler = Butler(config, rngs=nnx.Rngs(settings.seed))
        parameters = {name: getattr(butler, name)[...] for name in parameter_shapes(config)}
        key = jax.random.key_data(jax.random.key(settings.seed + 1))
        return parameters, make_optimizer(settings).init(parameters), key

    parameters, optimizer, key = jax.jit(make, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    return State(parameters, optimizer, key)


# Held-out text.


def measure(
    model: Decoder, butler: Butler, rows: Int[np.ndarray, "R T"], source: str, budget: float
) -> dict[str, Float[np.ndarray, "layers"]]:
    """Measure how well a source predicts which tokens matter: means over rows and heads, for each layer from 1.

    Each query chooses the share ``budget`` of the tokens that it sees, without sinks, and so does the oracle
    (evals.selections.hits). ``hit_rate`` is the share of the oracle's tokens that the source chose too, a mean over
    all queries; ``token_accuracy`` is the same for the last query of each row, the paper's figure; ``mass`` is the true
    attention that the chosen tokens hold.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> import models
        >>> from train.butler import measure
        >>> config = models.Config(64, 32, 96, num_layers=3, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> butler = models.Butler(models.ButlerConfig.of(config), rngs=nnx.Rngs(0))
        >>> measure(model, butler, np.arange(8)[None], "oracle", 0.5)["hit_rate"].tolist()
        [1.0, 1.0]
    """
    made = []
    together = max(1, TOKENS_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), together):
        found = selections.hits(model, rows[start : start + together], source, 1 - budget, butler=butler)
        made.append([np.asarray(x)[1:] for x in _everywhere(found, model)])
    share, mass = (np.concatenate(parts, axis=1) for parts in zip(*made, strict=True))  # [L - 1, R, T]
    return {"hit_rate": share.mean((1, 2)), "token_accuracy": share[..., -1].mean(1), "mass": mass.mean((1, 2))}


def _everywhere(arrays: Any, model: Decoder) -> Any:
    """Return arrays in a form that every process can read."""
    sharding = model.embedding[...].sharding
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding):
        return arrays
    return jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(arrays)


def spread(rows: np.ndarray, mesh: Mesh) -> Array:
    """Spread rows over the mesh's data axis. Each process has read all rows, and passes on those of its devices."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


# Checkpoints.


class Checkpoints:
    """Orbax's manager, made safe for killed runs: checkpoints have digests, and the newest whole one is restored."""

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]):
        self.folder, self.say = (folder / "checkpoints").absolute(), say
        unfinished = self.folder.glob("*orbax-checkpoint-tmp*")
        self.cut_short = sorted({path.name.partition(".")[0] for path in unfinished})
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def restore(self, state: State, start: Progress) -> tuple[State, Progress]:
        """Return the newest whole checkpoint, or the given start; damaged ones are moved aside, never deleted."""
        for number in self.cut_short:
            self.say(f"the checkpoint of step {number} was cut short while it was written; it is ignored")
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
        for step in sorted(self.manager.all_steps(), reverse=True):
            try:
                items = dict(state=ocp.args.StandardRestore(target), progress=ocp.args.JsonRestore())
                restored = self.manager.restore(step, args=ocp.args.Composite(**items))
                found, progress = State(**restored["state"]), restored["progress"]
                if progress.pop("digest") != digest(found):
                    raise ValueError("its digest differs")
                self.say(f"resuming from the checkpoint of step {step}")
                return found, Progress(**progress)
            except Exception as error:  # Orbax, TensorStore and the disk have no common base
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                aside = self.folder.parent / "damaged" / f"{step}-{time.time_ns()}"
                self.say(f"the checkpoint of step {step} is damaged ({reason}); moved to {aside}")
                if jax.process_index() == 0:
                    aside.parent.mkdir(exist_ok=True)
                    os.replace(self.folder / str(step), aside)
                if jax.process_count() > 1:
                    multihost_utils.sync_global_devices("moved aside")
                self.manager.reload()
        if self.cut_short or (self.folder.parent / "damaged").exists():
            self.say("no checkpoint is whole; starting again")
        return state, start

    def save(self, state: State, progress: Progress) -> None:
        """Start to write a checkpoint, once the previous one is written."""
        try:
            self.manager.save(
                progress.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),
                    progress=ocp.args.JsonSave(progress._asdict() | {"digest": digest(state)}),
                ),
            )
        except Exception as error:
            raise self._unwritten(error) from None

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        try:
            self.manager.wait_until_finished()
            self.manager.close()
        except Exception as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: Exception) -> OSError:
        reason = " ".join(str(error).split())[:160]
        kept = [step for step in self.manager.all_steps(read=True)]
        last = f"that of step {max(kept)} is kept" if kept else "none was written before"
        return OSError(
            f"a checkpoint could not be written to {self.folder} ({type(error).__name__}: {reason}); {last}. Make room "
            "and run the same command again to resume."
        )


def digest(state: State) -> int:
    """Return a checksum of every bit of a state."""
    total = 0
    for leaf in jax.tree.leaves(state):
        total = zlib.crc32(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data, total)
    return total


# The run.


def train(
    folder: str | Path,
    model: Decoder,
    config: ButlerConfig,
    corpus: Corpus,
    settings: Settings,
    *,
    name: str = "a model",
    begun: commands.Begun | None = None,
    made_of: Mapping[str, str] | None = None,
    mesh: Mesh | None = None,
    budget: float = 0.5,
    resume: bool = True,
    save_every: int = 200,
    keep: int = 2,
    eval_every: int = 200,
    log_every: int = 20,
    stop_after: int | None = None,
    progress_bar: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Butler, dict[str, Any] | None]:
    """Train a predictor, from the newest whole checkpoint in ``folder`` if there is one and ``resume`` is true.

    Args:
        folder: see the module's docstring; created if it does not exist.
        model: the frozen model, on ``mesh`` if that is given (``models.load(..., mesh=mesh)``).
        config: the predictor's shape.
        corpus: the text, in rows of length ``settings.seq_len``.
        name: the model's name, for messages.
        begun: the command, for run.json and summary.json.
        made_of: fingerprints of the model, its tokenizer and the built-in prose; a run resumes only with the same ones.
        mesh: devices with axes "data", over which the rows of a step are spread, and "tensor", over which the model is.
        budget: the share of the tokens that a query reads, for the hit rate.
        save_every, keep: the steps between two checkpoints, and how many checkpoints are kept.
        eval_every: the steps between two measurements on held-out text; 0 for the end only.
        log_every: the steps between two lines of the log.
        stop_after: the step at which to stop, to be resumed later.
        say: called with messages about where the run starts.

    Returns:
        The predictor, and the summary; None if the run was stopped before its end.

    Raises:
        ValueError: the folder holds another run (the message says what differs) or one that is running, the mesh does
            not divide the batch, the budget is not in (0, 1], the loss is not finite, or the text cannot be read.
        OSError: a checkpoint cannot be written.
    """
    folder = Path(folder)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor")) if mesh is None else mesh
    if settings.batch % mesh.shape["data"]:
        raise ValueError(
            f"a step of {settings.batch} rows cannot be spread over data={mesh.shape['data']}; make --batch a multiple."
        )
    if not 0 < budget <= 1:
        raise ValueError(f"--budget is {budget}; give the share of the tokens that a query reads, in (0, 1].")
    first_process = jax.process_index() == 0
    begun = commands.Begun("train.butler.train(...)", time.monotonic()) if begun is None else begun
    made_of = provenance.fingerprints(model) if made_of is None else made_of
    run = {
        "version": kvjax.__version__,
        "model": {"name": name, **fingerprint(model)},
        "butler": dataclasses.asdict(config),
        "settings": settings._asdict(),
        "data": {
            "names": corpus.name,
            "held out": zlib.crc32(corpus.held_out.tobytes()),
            **{what: made_of[what] for what in ("tokenizer", "prose") if what in made_of},
        },
    }
    _check_run(folder, run, resume)
    last = min(settings.steps, stop_after or settings.steps)
    rate = rate_schedule(settings)

    with contextlib.ExitStack() as stack:
        if first_process:
            folder.mkdir(parents=True, exist_ok=True)
            commands.lock(stack.enter_context((folder / commands.LOCK_FILE).open("ab")), folder)
        facts = provenance.facts(begun, settings.seed, dict(made_of))
        _begin_run(folder, run, resume, facts)
        checkpoints = Checkpoints(folder, keep, say)
        step_function = make_step(config, settings, mesh)
        state, progress = checkpoints.restore(init_state(config, settings, mesh), Progress(0, None, 0.0))
        log = stack.enter_context(_Log(folder, progress.step, first_process))
        bar = stack.enter_context(
            tqdm(
                total=last,
                initial=progress.step,
                disable=None if progress_bar and first_process else True,
                dynamic_ncols=True,
            )
        )
        pending: list[tuple[Array, Array]] = []
        started = logged = time.monotonic()
        since, saved, before = progress.step, progress.step, progress.seconds
        for batch, position in prefetch(_batches(corpus, settings, progress, last)):
            if isinstance(batch, Exception):
                if pending:
                    _checked(pending, progress.step, checkpoints)
                if progress.step > saved:
                    checkpoints.save(state, progress)
                checkpoints.close()
                raise batch
            state, loss, norm = step_function(model, state, spread(batch, mesh), progress.step)
            pending.append((loss, norm))
            seconds = before + time.monotonic() - started
            progress = Progress(progress.step + 1, position, seconds)
            done, ends = progress.step, progress.step == last
            saves, measures = done % save_every == 0 or ends, bool(eval_every) and (done % eval_every == 0 or ends)
            bar.update()
            if done % log_every == 0 or saves or measures:
                mean_loss, mean_norm = _checked(pending, done, checkpoints)
                pending, now = [], time.monotonic()
                speed = (done - since) * batch.size / (now - logged)
                since, logged = done, now
                bar.set_postfix(loss=f"{mean_loss:.4f}", tokens_s=round(speed))
                log.write(
                    done,
                    {
                        "loss": mean_loss,
                        "learning_rate": float(rate(done - 1)),
                        "gradient_norm": mean_norm,
                        "tokens_per_second": round(speed),
                        "tokens": done * batch.size,
                        "skipped_lines": _skipped(position),
                    },
                )
            if saves:
                checkpoints.save(state, progress)
                saved = done
                save_butler(folder, Butler(config, jax.device_get(state.parameters)), model, name)
            if measures:
                figures = measure(model, Butler(config, state.parameters), corpus.held_out, "butler", budget)
                means = {name: float(values.mean()) for name, values in figures.items()}
                means["loss"] = held_out_loss(model, config, state.parameters, corpus, settings)
                log.write(done, {f"held_out/{name}": value for name, value in means.items()})
                logged = time.monotonic()
        checkpoints.close()
        butler = Butler(config, jax.device_get(state.parameters))
        if progress.step < settings.steps:
            return butler, None
        summary = provenance.facts(begun, settings.seed, dict(made_of))
        summary |= _summary(run, model, config, settings, progress, mesh)
        summary |= compare_sources(model, config, state.parameters, corpus, settings, budget)
        save_butler(folder, butler, model, name)
        if first_process:
            commands.write_json(folder / "summary.json", summary)
        log.write(progress.step, {f"summary/{n}": f["hit_rate"] for n, f in summary["figures"].items()})
    return butler, summary


def compare_sources(
    model: Decoder, config: ButlerConfig, parameters: Parameters, corpus: Corpus, settings: Settings, budget: float
) -> dict[str, Any]:
    """Return the figures of the predictor and of the other sources on held-out text; see :func:`measure`."""
    butler = Butler(config, parameters)
    found = {name: measure(model, butler, corpus.held_out, name, budget) for name in ("butler", *BASELINES)}
    return {
        "budget": budget,
        "held_out_rows": len(corpus.held_out),
        "held_out_loss": held_out_loss(model, config, parameters, corpus, settings),
        "figures": {
            source: {name: round(float(values.mean()), 6) for name, values in figures.items()}
            for source, figures in found.items()
        },
        "layers": {
            source: {name: values.round(6).tolist() for name, values in figures.items()}
            for source, figures in found.items()
        },
    }


def held_out_loss(
    model: Decoder, config: ButlerConfig, parameters: Parameters, corpus: Corpus, settings: Settings
) -> float:
    """Return the loss on held-out rows, without dropout."""
    return float(np.mean([_row_loss(model, parameters, row[None], config, settings.causal) for row in corpus.held_out]))


@functools.partial(jax.jit, static_argnames=("config", "causal"))
def _row_loss(model, parameters, tokens, config, causal):
    return loss_of(model, Butler(config, parameters), tokens, causal=causal)


def _batches(corpus: Corpus, settings: Settings, progress: Progress, last: int) -> Iterator[tuple[Any, Any]]:
    """Yield (rows, position after them) for the remaining steps; an error becomes the last item."""
    rows = corpus.rows(progress.position)
    try:
        for _ in range(progress.step, last):
            read = [next(rows) for _ in range(settings.batch)]
            yield np.stack([row for row, _ in read]), read[-1][1]
    except (ValueError, OSError) as error:
        yield error, None


def _checked(pending: Sequence[tuple[Array, Array]], done: int, checkpoints: Checkpoints) -> tuple[float, float]:
    """Return the mean loss and gradient norm of the last steps, after checking that all are finite."""
    values = np.array(jax.device_get(pending))
    wrong = np.flatnonzero(~np.isfinite(values).all(1))
    if len(wrong):
        step = done - len(pending) + 1 + int(wrong[0])
        checkpoints.close()
        kept = checkpoints.manager.latest_step()
        last = "no checkpoint was written before" if kept is None else f"the checkpoint of step {kept} is kept"
        raise ValueError(
            f"the loss or its gradient is not finite in step {step}; {last}. Start again with a smaller --lr or "
            "another --dtype."
        )
    return float(values[:, 0].mean()), float(values[:, 1].mean())


def _skipped(position: Any) -> int:
    """Count the bad lines that were skipped up to a position."""
    if isinstance(position, list):
        return sum(_skipped(part) for part in position)
    if isinstance(position, dict):
        return int(position.get("skipped", 0)) + sum(_skipped(part) for part in position.values())
    return 0


def _check_run(folder: Path, run: dict[str, Any], resume: bool) -> None:
    """Check that a folder is empty or of the same run."""
    record = folder / RUN_FILE
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is a file; name a folder.")
    run = json.loads(json.dumps(run))
    try:
        earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    except (ValueError, UnicodeDecodeError):
        earlier = {}
    if isinstance(earlier, dict):
        earlier.pop("made", None)
    if earlier is None and any((folder / name).exists() for name in (WEIGHTS_FILE, CONFIG_FILE, "checkpoints")):
        raise ValueError(f"{folder} holds a predictor that no run in this folder made; choose another --out.")
    if earlier is not None and resume and earlier != run:
        differing = "; ".join(_differences(earlier, run))
        raise ValueError(
            f"{folder} holds another run ({differing}): choose another --out, or --resume never to start again there."
        )


def _begin_run(folder: Path, run: dict[str, Any], resume: bool, facts: dict[str, Any]) -> None:
    """Record a folder's run; without ``resume``, delete what an earlier run left in it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("run checked")
    if jax.process_index() == 0:
        if not resume and (folder / RUN_FILE).exists():
            for name in ("checkpoints", "damaged", "events"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("log.jsonl", "summary.json", WEIGHTS_FILE, CONFIG_FILE):
                (folder / name).unlink(missing_ok=True)
        commands.write_json(folder / RUN_FILE, {**run, "made": facts})
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("run recorded")


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """List the differences between two trees of dictionaries, each as "name A there, B here"."""
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            line
            for key in dict.fromkeys([*there, *here])
            for line in _differences(there.get(key), here.get(key), f"{name} {key}".strip())
        ]
    if there == here:
        return []
    return [f"{name} {_brief(there)} there, {_brief(here)} here"]


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:28] + " ... " + text[-28:]


def _summary(
    run: dict[str, Any], model: Decoder, config: ButlerConfig, settings: Settings, progress: Progress, mesh: Mesh
) -> dict[str, Any]:
    model_size = sum(math.prod(shape) for shape in model_shapes(model.config).values())
    tokens = progress.step * settings.batch * settings.seq_len
    return {
        **run,
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 1),
        "tokens_per_second": round(tokens / max(progress.seconds, 1e-9)),
        "parameters": num_parameters(config),
        "share_of_model": num_parameters(config) / model_size,
        "skipped_lines": _skipped(progress.position),
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "optax": optax.__version__,
        "orbax": ocp.__version__,
    }


class _Log:
    """log.jsonl and TensorBoard's events; both drop the steps after the one that a run resumes from."""

    def __init__(self, folder: Path, step: int, writes: bool):
        self.path, self.writes = folder / "log.jsonl", writes
        if not writes:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        with commands.replacing(self.path) as temporary:  # a kill may have left half a line at the end
            temporary.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= step), encoding="utf-8")
        self.events = SummaryWriter(str(folder / "events"), purge_step=step + 1)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writes:
            self.events.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        if not self.writes:
            return
        for name, value in values.items():
            self.events.add_scalar(name, value, step)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values, "time": round(time.time(), 3)}) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


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
    ]
    lines += ["last query, the paper's figure; mass: true attention held by the chosen tokens. No sinks are added."]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    flags = commands.parser(
        "kvjax-train-butler",
        "train.butler",
        description="Trains TokenButler's predictor for a frozen model.",
        examples=EXAMPLES,
    )
    flags.add_argument("--model", default="retriever", help="'retriever' (the default), a folder, or a hub name")
    flags.add_argument(
        "--data", nargs="+", help="files, folders, a hub data set (owner/name[:config]), python, retriever"
    )
    flags.add_argument(
        "--eval-data", nargs="+", default=[], help="held-out text (default: the first documents of --data)"
    )
    flags.add_argument("--eval-rows", type=int, default=16, help="held-out rows (default 16)")
    flags.add_argument("--text-field", default="text", help="field of a JSON line (default text)")
    flags.add_argument("--skip-bad-lines", action="store_true", help="leave out and count lines without text")
    flags.add_argument("--hidden", type=int, help="hidden width of the two networks")
    flags.add_argument("--dim", type=int, help="D', width of the predicted queries and keys")
    flags.add_argument("--source", choices=SOURCES, help="what the predictor reads")
    flags.add_argument("--dropout", type=float, help="share of the feed-forward's output that is dropped")
    flags.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="loss of visible pairs only; published: of all pairs"
    )
    flags.add_argument("--tokens", type=_count, help="tokens of text in total, such as 80e6")
    flags.add_argument("--seq-len", type=int, help="tokens per row (default 1024 or 2048, by the model's width)")
    flags.add_argument("--batch", type=int, help="rows per step")
    flags.add_argument("--lr", type=float, help="the highest learning rate (default 1e-3)")
    flags.add_argument("--warmup", type=float, help="share of the steps with a rising learning rate")
    flags.add_argument("--clip", type=float, help="largest global norm of the gradient")
    flags.add_argument("--weight-decay", type=float)
    flags.add_argument("--seed", type=int)
    flags.add_argument("--budget", type=float, default=0.5, help="share of tokens read, for the hit rate (default 0.5)")
    flags.add_argument("--out", type=Path, default=Path("butler"), help="folder for the predictor and its run")
    flags.add_argument("--resume", choices=("auto", "never"), default="auto", help="resume --out's checkpoint")
    flags.add_argument("--save-every", type=int, default=200, help="steps between checkpoints (default 200)")
    flags.add_argument("--keep", type=int, default=2, help="checkpoints kept (default 2)")
    flags.add_argument("--eval-every", type=int, default=200, help="steps between measurements; 0: only at the end")
    flags.add_argument("--log-every", type=int, default=20, help="steps between lines of the log (default 20)")
    flags.add_argument("--stop-after", type=int, help="stop early, after this step")
    flags.add_argument("--mesh", help="devices, such as data=4 or data=2,tensor=2; data: rows, tensor: the model")
    flags.add_argument("--dtype", default="float32", help="the frozen model's dtype (default float32, as published)")
    flags.add_argument("--coordinator", help="host:port of the first process; 'auto' reads the cluster's environment")
    flags.add_argument("--processes", type=int, help="how many processes train together")
    flags.add_argument("--process-id", type=int, help="the number of this process, from 0")
    flags.add_argument("--json", action="store_true", help="print the summary as JSON")
    commands.add_cache_flag(flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for bad input, a loss that is not finite, or a full disk."""
    flags = parser().parse_args(arguments)
    commands.keep_compiled(vars(flags).pop("compilation_cache"))
    return commands.run(lambda: _run(flags), "train.butler")


def _run(flags: argparse.Namespace) -> None:
    for flag, least in (("save_every", 1), ("keep", 1), ("eval_every", 0), ("log_every", 1), ("eval_rows", 1)):
        if getattr(flags, flag) < least:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(flags, flag)}; give at least {least}.")
    if flags.stop_after is not None and flags.stop_after < 1:
        raise ValueError(f"--stop-after is {flags.stop_after}; give a step, at least 1.")
    if flags.out.exists() and not flags.out.is_dir():
        raise ValueError(f"--out is {flags.out}, which is a file; name a folder.")
    _join(flags)
    mesh = models.parse_mesh(flags.mesh or f"data={jax.device_count() if jax.process_count() > 1 else 1}")
    if mesh.size < jax.device_count() and jax.process_count() > 1:
        raise ValueError(f"--mesh takes {mesh.size} of the processes' {jax.device_count()} devices; it must take all.")
    embedded = flags.model == "retriever"
    if flags.data is None and not embedded:
        raise ValueError("no data was named; give --data files, folders or a hub data set.")
    model, tokenizer = models.load(flags.model, dtype=flags.dtype, mesh=mesh)
    if tokenizer is None:
        raise ValueError(f"{flags.model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    changes = {name: getattr(flags, name) for name in Settings._fields}
    settings = settings_of(model.config, embedded=embedded, **changes)
    shape = {name: getattr(flags, name) for name in ("hidden", "dim", "source", "dropout")}
    config = butler_config_of(model.config, embedded=embedded, **shape)
    corpus = open_corpus(
        flags.data or ["python"],
        tokenizer,
        settings.seq_len,
        eval_names=flags.eval_data,
        eval_rows=flags.eval_rows,
        field=flags.text_field,
        skip_bad_lines=flags.skip_bad_lines,
        seed=settings.seed,
    )

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(f"train.butler: {text}.", file=sys.stderr)

    _, summary = train(
        flags.out,
        model,
        config,
        corpus,
        settings,
        name=str(flags.model),
        begun=flags.begun,
        made_of=evaluator.made_of(model, tokenizer),
        mesh=mesh,
        budget=flags.budget,
        resume=flags.resume == "auto",
        save_every=flags.save_every,
        keep=flags.keep,
        eval_every=flags.eval_every,
        log_every=flags.log_every,
        stop_after=flags.stop_after,
        progress_bar=True,
        say=say,
    )
    if jax.process_index() > 0:
        return
    if summary is None:
        print(f"stopped after step {flags.stop_after}; run the same command without --stop-after to resume.")
    else:
        print(json.dumps(summary) if flags.json else table(summary))


def _join(flags: argparse.Namespace) -> None:
    """Join the other processes of a run, if there are any."""
    given = (flags.coordinator, flags.processes, flags.process_id)
    if flags.coordinator == "auto":
        jax.distributed.initialize()
    elif None not in given:
        if not 0 <= flags.process_id < flags.processes:
            raise ValueError(f"--process-id is {flags.process_id}; {flags.processes} processes are numbered from 0.")
        jax.distributed.initialize(flags.coordinator, flags.processes, flags.process_id)
    elif given != (None, None, None):
        raise ValueError("--coordinator, --processes and --process-id belong together; give all three, or none.")


def _count(text: str) -> int:
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 1 <= count < 1e15 or count != int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write it like 80e6.")
    return int(count)
