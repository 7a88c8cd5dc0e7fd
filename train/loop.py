"""The training loop that the trainers of frozen models share: checkpoints, log, resuming, and checks for NaN.

A trainer describes itself as a :class:`Trainer`, and :func:`run` does the rest. What a step reads follows from the
data's position, and its randomness from its number, so a run that was killed and resumed ends with the same parameters
as one that was not, bit for bit.

The folder holds what the trainer saves (of the last checkpoint), checkpoints/, run.json (which describes the run),
log.jsonl, TensorBoard's events, and summary.json at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import kvjax
from models import commands, files, fingerprints, hosts
from models.commands import provenance
from models.config import Config
from models.decoder import Decoder
from models.networks import fingerprint
from train import folder as folders
from train.checkpoints import Checkpoints, Progress
from train.interrupts import Interrupts, interrupted
from train.meter import Meter
from train.text import Corpus

Parameters = dict[str, Array]
MEASURING = "measuring held-out text"
SAVE_SECONDS = 300.0  # between two checkpoints at most, however long a step takes


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that every trainer has; each trainer's own class adds what is its own, and other defaults.

    A run reads ``tokens`` tokens in total, in steps of ``batch`` rows of ``seq_len``. The learning rate rises over the
    share ``warmup`` of the steps and falls to 0 on a cosine.
    """

    tokens: int
    seq_len: int
    batch: int
    lr: float
    warmup: float = 0.1
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    @property
    def steps(self) -> int:
        """The number of steps of a run."""
        return math.ceil(self.tokens / (self.batch * self.seq_len))

    def changed(self, **changes: Any) -> Self:
        """Return the settings with those of the changes that are not None."""
        return dataclasses.replace(self, **{name: value for name, value in changes.items() if value is not None})


class State(NamedTuple):
    """Holds what a step changes: the parameters, the optimizer's state, and a random key."""

    parameters: Parameters
    optimizer: Any
    key: Array  # of what is random in a step, before the step's number is folded in


class Trainer(NamedTuple):
    """A description of what is trained. All functions but ``save`` are pure.

    Attributes:
        command: the module that is run, such as "train.scorer".
        configuration: that of what is trained, by its name, for run.json.
        init: () -> the first State.
        step: (model, state, rows [B, T] on the mesh, step from 0) -> state, loss, the gradient's norm before clipping.
            Nothing may be donated, as Ctrl-C saves the last state that was reached.
        save: (parameters) -> None; writes ``files`` into the folder, with each checkpoint. Every process calls it.
        measure: (parameters) -> figures of held-out text by name, for the log; "loss" is among them.
        summarise: (parameters) -> entries of summary.json, and figures by name that the log gets too.
        files: the names of the files that ``save`` writes.
    """

    command: str
    configuration: dict[str, Any]
    init: Callable[[], State]
    step: Callable[[Decoder, State, Array, int], tuple[State, Array, Array]]
    save: Callable[[Parameters], None]
    measure: Callable[[Parameters], dict[str, float]]
    summarise: Callable[[Parameters], tuple[dict[str, Any], dict[str, float]]]
    files: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of where a run starts and when it writes.

    Attributes:
        name: the model's name, for messages; an adapter names it as its base.
        invocation: the command, for run.json and summary.json.
        digests: fingerprints of the model, its tokenizer and the built-in prose; a run resumes only with the same ones.
        mesh: devices with axes "data", over which the rows of a step are spread, and "tensor", over which the model is.
        resume: whether it starts from the newest whole checkpoint in its folder, if there is one.
        save_every, keep: the steps between two checkpoints, and how many checkpoints are kept. A run of one process
            also writes one when five minutes have passed since the last.
        eval_every: the steps between two measurements on held-out text; 0 for the end only.
        log_every: the steps between two lines of the log.
        stop_after: the step at which to stop, to be resumed later.
        measure: whether the end is measured on held-out text; else the summary has no figures of it.
        progress_bar: whether finished steps are shown: as a bar on a terminal, else in lines through ``say``.
        say: called with messages about where the run is.
    """

    name: str = "a model"
    invocation: commands.Invocation | None = None
    digests: Mapping[str, str] | None = None
    mesh: Mesh | None = None
    resume: bool = True
    save_every: int = 200
    keep: int = 2
    eval_every: int = 200
    log_every: int = 20
    stop_after: int | None = None
    measure: bool = True
    progress_bar: bool = False
    say: Callable[[str], None] = lambda text: None


DEFAULTS = Options()


def one_device() -> Mesh:
    """Return the mesh of a run on one device: axes "data" and "tensor", both of size 1."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))


def check_settings(settings: Settings, model: Config) -> None:
    """Raise ValueError, with the flag's name, unless a run's settings are in range and fit the model."""
    if not 2 <= settings.seq_len <= model.max_positions:
        raise ValueError(
            f"--seq-len is {settings.seq_len}; the model takes sequences of 2 to {model.max_positions} tokens."
        )
    if settings.batch < 1:
        raise ValueError(f"--batch is {settings.batch}; a step has at least 1 row.")
    if settings.tokens < (step := settings.batch * settings.seq_len):
        rows = f"{settings.batch} x {settings.seq_len}"
        raise ValueError(f"--tokens is {settings.tokens:,}; one step of {rows} takes {step:,}.")
    for flag, value in (("--lr", settings.lr), ("--clip", settings.clip)):
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} is {value}; give a number above 0.")
    if not 0 <= settings.warmup < 1:
        raise ValueError(f"--warmup is {settings.warmup}; give a share of the steps in [0, 1).")
    if not 0 <= settings.weight_decay < math.inf:
        raise ValueError(f"--weight-decay is {settings.weight_decay}; give a number from 0.")


def rate_schedule(settings: Settings) -> optax.Schedule:
    """Return the learning rate by step."""
    steps = settings.steps
    warmup = round(settings.warmup * steps)
    return optax.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, max(steps, warmup + 1))


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Return an optimizer: clipping by the global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate_schedule(settings), weight_decay=settings.weight_decay),
    )


def init_state(make: Callable[[], Parameters], settings: Settings, mesh: Mesh) -> State:
    """Return the parameters that ``make`` returns, compiled, and their optimizer's state, on every device."""

    def init():
        parameters = make()
        key = jax.random.key_data(jax.random.key(settings.seed + 1))
        return parameters, make_optimizer(settings).init(parameters), key

    parameters, optimizer, key = jax.jit(init, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    return State(parameters, optimizer, key)


def make_step(
    objective: Callable[[Decoder, Parameters, Array, Array], Array], settings: Settings, mesh: Mesh
) -> Callable[[Decoder, State, Array, int], tuple[State, Array, Array]]:
    """Compile a step (:class:`Trainer`) of an objective: (model, parameters, tokens, key of the step) -> the loss."""
    optimizer = make_optimizer(settings)

    def step(model, state, tokens, number):
        key = jax.random.fold_in(state.key, number)
        loss, gradients = jax.value_and_grad(objective, argnums=1)(model, state.parameters, tokens, key)
        state, norm = updated(optimizer, state, gradients)
        return state, loss, norm

    # Nothing is donated, as Ctrl-C saves the last state that was reached.
    return jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))


def updated(optimizer: optax.GradientTransformation, state: State, gradients: Parameters) -> tuple[State, Array]:
    """Return the state after a step of the optimizer, and the gradient's norm."""
    updates, of_optimizer = optimizer.update(gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    return State(parameters, of_optimizer, state.key), optax.tree.norm(gradients)


def spread(rows: np.ndarray, mesh: Mesh) -> Array:
    """Spread rows over the mesh's data axis. Each process has read all rows, and passes on those of its devices."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def run(
    folder: Path,
    trainer: Trainer,
    model: Decoder,
    corpus: Corpus,
    settings: Settings,
    options: Options = DEFAULTS,
) -> tuple[Parameters, dict[str, Any] | None]:
    """Train, from the newest whole checkpoint in ``folder`` if there is one and ``options.resume`` is true.

    Args:
        folder: see the module's docstring; created if it does not exist.
        model: the frozen model, on ``options.mesh`` if that is given (``models.load(..., mesh=mesh)``).
        corpus: the text, in rows of length ``settings.seq_len``.

    Returns:
        The parameters on the host, and the summary; None if the run was stopped before its end.

    Raises:
        ValueError: the folder holds another run (the message says what differs) or one that is running, the mesh does
            not divide the batch, the loss is not finite, or the text cannot be read.
        OSError: a checkpoint cannot be written.
        KeyboardInterrupt: Ctrl-C or SIGTERM, after a checkpoint was saved; the message has its path and the command
            that resumes.
    """
    mesh, resume, measure = options.mesh or one_device(), options.resume, options.measure
    if settings.batch % mesh.shape["data"]:
        raise ValueError(
            f"a step of {settings.batch} rows cannot be spread over data={mesh.shape['data']}; make --batch a multiple."
        )
    first_process = hosts.first()
    invocation = options.invocation or commands.Invocation(f"{trainer.command}.train(...)", time.monotonic())
    digests = fingerprints.fingerprints(model) if options.digests is None else options.digests
    description = _description(trainer, model, options.name, corpus, settings, digests)
    folders.check_run(folder, description, trainer.files, resume)
    steps = settings.steps
    last = min(steps, options.stop_after or steps)
    rate = rate_schedule(settings)

    with contextlib.ExitStack() as stack:
        if first_process:
            folder.mkdir(parents=True, exist_ok=True)
            files.lock(stack.enter_context((folder / files.LOCK_FILE).open("ab")), folder)
        facts = provenance.facts(invocation, settings.seed, dict(digests))
        folders.begin_run(folder, description, trainer.files, resume, facts)
        checkpoints = Checkpoints(folder, options.keep, options.say)
        interrupts = stack.enter_context(Interrupts())
        state, progress = checkpoints.restore(trainer.init(), Progress(0, None, 0.0))
        log = stack.enter_context(folders.Log(folder, progress.step, first_process))
        meter = Meter(last, progress.step, options.progress_bar and first_process, options.say)
        stack.callback(meter.close)
        pending: list[tuple[Array, Array]] = []
        started = logged = written = time.monotonic()
        since, saved, before = progress.step, progress.step, progress.seconds
        reached = state, progress  # in one name, so that Ctrl-C never finds one without the other

        def note() -> None:
            """Write the log's line of the steps since the last one, after a check that they are finite."""
            nonlocal pending, since, logged
            done, position = reached[1].step, reached[1].position
            if not pending:
                return
            mean_loss, mean_norm = _checked(pending, done, checkpoints)
            with interrupts.held():
                now, of_step = time.monotonic(), settings.batch * settings.seq_len
                speed = round((done - since) * of_step / (now - logged))
                pending, since, logged = [], done, now
                log.write(
                    done,
                    {
                        "loss": mean_loss,
                        "learning_rate": float(rate(done - 1)),
                        "gradient_norm": mean_norm,
                        "tokens_per_second": speed,
                        "tokens": done * of_step,
                        "skipped_lines": _skipped(position),
                    },
                )

        def save() -> None:
            """Write a checkpoint and what the trainer saves, if a step was done since the last one."""
            nonlocal saved, logged, written
            state, progress = reached
            if progress.step == saved:
                return
            with interrupts.held():
                checkpoints.save(state, progress)
                trainer.save(jax.tree.map(hosts.fetched, state.parameters))
                checkpoints.wait()
                saved, logged = progress.step, time.monotonic()
                written = logged

        batches = prefetch(_batches(corpus, settings, progress, last))
        try:
            for batch, position in batches:
                if isinstance(batch, Exception):
                    note()
                    save()
                    checkpoints.close()
                    raise batch
                state, progress = reached
                state, loss, norm = trainer.step(model, state, spread(batch, mesh), progress.step)
                pending.append((loss, norm))
                reached = state, Progress(progress.step + 1, position, before + time.monotonic() - started)
                done, ends = progress.step + 1, progress.step + 1 == last
                every = options.eval_every
                # By the clock in one process only: several would have to agree on the time.
                late = jax.process_count() == 1 and time.monotonic() - written >= SAVE_SECONDS
                saves = done % options.save_every == 0 or ends or late
                measures = bool(every) and (done % every == 0 or ends) and (measure or done < steps)
                if done % options.log_every == 0 or saves or measures:
                    note()
                if saves:
                    save()
                meter.started(loss)  # after the save: a step is counted once its checkpoint is on disk
                if saves or measures:
                    meter.settle()
                if measures:
                    with meter.doing(MEASURING):
                        figures = trainer.measure(state.parameters)
                    log.write(done, {f"held_out/{name}": value for name, value in figures.items()})
                    logged = time.monotonic()
            checkpoints.close()
            state, progress = reached
            parameters = jax.tree.map(hosts.fetched, state.parameters)
            meter.close(MEASURING if measure and progress.step == steps else "")
            if progress.step < steps:
                return parameters, None
            with meter.doing(MEASURING):
                found, headline = trainer.summarise(state.parameters) if measure else ({}, {})
        except KeyboardInterrupt:
            meter.close()
            if jax.process_count() == 1:  # the others are not interrupted, and saving needs them all
                with contextlib.suppress(KeyboardInterrupt):
                    note()
                    save()
                checkpoints.close()
            raise interrupted(folder, checkpoints.newest(), invocation, resume) from None
        finally:
            batches.close()
        summary = provenance.facts(invocation, settings.seed, dict(digests)) | description
        summary |= _summary(settings, progress, mesh) | found
        trainer.save(parameters)
        if first_process:
            files.write_json(folder / "summary.json", summary)
        log.write(progress.step, {f"summary/{name}": value for name, value in headline.items()})
    return parameters, summary


def prefetch(items: Iterator, size: int = 8) -> Generator[Any]:
    """Yield the items of an iterator, prepared ahead in a thread; an exception in the thread is raised here.

    The thread ends with the generator, also where its consumer stops early.
    """
    ready: queue.Queue = queue.Queue(size)
    stopped = threading.Event()

    def put(item: Any, error: Exception | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put((item, error), timeout=0.1)

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except Exception as error:
            put(None, error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()


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


def _description(
    trainer: Trainer, model: Decoder, name: str, corpus: Corpus, settings: Settings, digests: Mapping[str, str]
) -> dict[str, Any]:
    """Return what tells a run from others: a folder is resumed only by a run of the same description."""
    return {
        "version": kvjax.__version__,
        "model": {"name": name, "dtype": model.embedding[...].dtype.name, **fingerprint(model)},
        **trainer.configuration,
        "settings": dataclasses.asdict(settings),
        "jax": provenance.settings(),
        "data": {
            "names": corpus.name,
            "held out": zlib.crc32(corpus.held_out.tobytes()),
            **{what: digests[what] for what in ("tokenizer", "prose") if what in digests},
        },
    }


def _summary(settings: Settings, progress: Progress, mesh: Mesh) -> dict[str, Any]:
    tokens = progress.step * settings.batch * settings.seq_len
    return {
        "steps": progress.step,
        "tokens": tokens,
        "seconds": round(progress.seconds, 1),
        "tokens_per_second": round(tokens / max(progress.seconds, 1e-9)),
        "skipped_lines": _skipped(progress.position),
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "optax": optax.__version__,
        "orbax": ocp.__version__,
    }
