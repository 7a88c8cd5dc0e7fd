"""Trains the retriever, the small model that ships: `python -m papers.retriever.recipe --out models/retriever`.

The model learns one thing well, to read a fact from its context, and a little prose. These choices make that fast
enough for two CPU cores: very many questions per row, a separate loss for answers, short rows first, normalised queries
and keys (Qwen3) so that Muon can take large steps, few rows at a time so that activations stay in the CPU's cache, and
initial weights that can already look things up (papers/retriever/circuit.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from evals import answering, prose, sweep, tasks
from models import commands, files
from models.commands import provenance
from models.commands.shared_flags import add_shared_flags, at_least, count
from models.config import Config, described
from models.config_json import from_hugging_face
from models.decoder import Decoder
from models.loading import load
from models.parameters import join_weights, split_weights
from models.saving import save
from papers.predictor import coref_task
from papers.retriever import data
from papers.retriever.circuit import init_parameters
from train import folder as folders
from train.checkpoints import Checkpoints, Progress
from train.interrupts import Interrupts, interrupted
from train.loop import Options, prefetch
from train.meter import Meter

Parameters = dict[str, Array]
HELD_OUT = 1_000_000  # the seed of the first held-out sample


class State(NamedTuple):
    """Holds what a step changes: the parameters and the optimizer's state."""

    parameters: Parameters
    optimizer: Any


class Phase(NamedTuple):
    """A number of steps at one level. The learning rate goes linearly from the first ``rate`` to the second.

    ``weights`` has one weight per kind of target in ``data.KINDS``, for the mean loss on that kind.
    """

    steps: int
    rows: int
    rate: tuple[float, float]
    level: data.Level
    weights: tuple[float, float, float, float, float] = (1.0, 1.0, 0.5, 1.0, 1.0)


def read_recipe() -> tuple[Phase, ...]:
    """Read the phases of the recipe, from recipe.toml.

    >>> sum(phase.steps for phase in read_recipe())
    3160
    """

    def exact(table: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}

    phases = sweep.read(Path(__file__).with_suffix(".toml"))["phases"]
    return tuple(Phase(**exact({**phase, "level": data.Level(**exact(phase["level"]))})) for phase in phases)


def make_config(tokenizer: Tokenizer, **changes: Any) -> Config:
    """Return the config of the model that ships, with the ids of its tokenizer; ``changes`` are to its config.json."""
    # A theta so large that half of each head hardly rotates within 2,048 positions: it matches content at any distance.
    raw = dict(
        architectures=["Qwen3ForCausalLM"], hidden_size=192, intermediate_size=192, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rope_theta=1_000_000.0,
        max_position_embeddings=4096, tie_word_embeddings=True, vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=data.special_id(tokenizer, data.BOS), eos_token_id=data.special_id(tokenizer, data.EOS),
        pad_token_id=data.special_id(tokenizer, data.PAD),
    )  # fmt: skip
    return from_hugging_face(raw | changes)


def make_optimizer(rate: Callable[[Array], Array]) -> optax.GradientTransformation:
    """Return an optimizer: Muon for the layers' matrices, Adam for the embedding and the norms."""
    dimensions = optax.contrib.MuonDimensionNumbers
    matrices = {"layers.output": dimensions(1, 2)}
    matrices |= {f"layers.{name}": dimensions(1, (2, 3)) for name in ("query", "key", "value")}
    matrices |= {f"layers.{name}": dimensions(1, 2) for name in ("gate", "up", "down")}
    return optax.contrib.muon(
        rate,
        weight_decay=0.01,
        adam_learning_rate=lambda step: 0.5 * rate(step),
        adam_b2=0.99,
        muon_weight_dimension_numbers=lambda tree: {name: matrices.get(name) for name in tree},
    )


def hidden_states(
    config: Config, parameters: Parameters, tokens: Int[Array, "B T"], position: Int[Array, "B T"] | None = None
) -> tuple[Decoder, Float[Array, "B T E"]]:
    """Return the decoder and its last hidden states, computed by :func:`causal_attention`."""
    model = Decoder(config, join_weights(config, parameters))
    if position is None:
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(carry, layer, window, query, key, value):
        return causal_attention(query, key, value), carry, None

    hidden, _, _ = model.run(tokens, position, jnp.full(tokens.shape[:1], tokens.shape[1]), attend, None)
    return model, hidden


def causal_attention(
    query: Float[Array, "B T N D"], key: Float[Array, "B T K D"], value: Float[Array, "B T K D"], block: int = 256
) -> Float[Array, "B T N D"]:
    """Compute causal attention, a block of queries at a time, over the keys that the block may see only."""
    _, T, N, D = query.shape
    heads_first = lambda x: jnp.repeat(x.swapaxes(1, 2), N // x.shape[2], axis=1)  # noqa: E731
    query, key, value = heads_first(query * D**-0.5), heads_first(key), heads_first(value)
    outputs = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        scores = jnp.einsum("bntd,bnsd->bnts", query[:, :, start:stop], key[:, :, :stop])
        seen = jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        outputs.append(jnp.einsum("bnts,bnsd->bntd", weights, value[:, :, :stop]))
    return jnp.concatenate(outputs, axis=2).swapaxes(1, 2)


def losses(
    config: Config,
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    position: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Return the cross-entropy of every target."""
    model, hidden = hidden_states(config, parameters, tokens, position)
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)


def make_step(config: Config, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Callable:
    """Compile a step: (state, batch, weights) -> state, losses.

    A batch is [groups, rows, T]. The groups are split over the devices; each device runs its groups one after the other
    and adds up the gradients. The optimizer's work is split by layers.
    """
    replicated, by_layer = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def group_loss(parameters, weights, tokens, positions, targets, shares):
        each = losses(config, parameters, tokens, targets, positions)
        parts = jnp.einsum("rt,rtk->k", each, shares)
        return jnp.dot(parts, weights), parts

    def device_gradients(parameters, weights, *batch):
        def add(total, group):
            (_, parts), gradients = jax.value_and_grad(group_loss, has_aux=True)(parameters, weights, *group)
            return jax.tree.map(jnp.add, total, (gradients, parts)), None

        zero = (jax.tree.map(jnp.zeros_like, parameters), jnp.zeros(len(data.KINDS)))
        total, _ = jax.lax.scan(add, zero, batch)
        return jax.lax.psum(total, "data")

    gradients_of = jax.shard_map(
        device_gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), *[PartitionSpec("data")] * 4),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def share(name: str, array: Array) -> Array:
        split = name.startswith("layers.") and array.shape[0] % mesh.size == 0
        return jax.lax.with_sharding_constraint(array, by_layer if split else replicated)

    def step(state, batch, weights):
        gradients, parts = gradients_of(state.parameters, weights, *batch)
        gradients = {name: share(name, array) for name, array in gradients.items()}
        updates, of_optimizer = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        return State(jax.lax.with_sharding_constraint(parameters, replicated), of_optimizer), parts

    return jax.jit(step, donate_argnums=0)


def arrange(batch: data.Batch, devices: int) -> tuple[np.ndarray, ...]:
    """Arrange a batch in groups of rows [groups, rows, T]: tokens, positions, targets, and their shares in mean losses.

    Groups of about 256 tokens keep the activations in a core's cache, which doubles the speed on a CPU.
    """
    count, T = batch.tokens.shape
    rows = max(1, min(256 // T, count // devices))
    kinds = batch.kinds[..., None] == np.array(data.KINDS)
    shares = (kinds / np.maximum(1, kinds.sum((0, 1)))).astype(np.float32)
    arrays = batch.tokens, batch.positions, batch.targets, shares
    return tuple(array.reshape(count // rows, rows, *array.shape[1:]) for array in arrays)


def make_recall(config: Config) -> Callable:
    """Compile (parameters, samples' tokens, their answers' places) -> whether each place's token is the argmax.

    An answer is right as a whole exactly if greedy decoding is right: each token follows the right tokens before it.
    """

    def tokens_right(parameters: Parameters, tokens: Int[Array, "B T"], places: Int[Array, "B A"]):
        def one(row):
            tokens, places = row
            model, hidden = hidden_states(config, parameters, tokens[None])
            return jnp.argmax(model.logits(hidden[0, places - 1]), -1) == tokens[places]

        return jax.lax.map(one, (tokens, places))

    return jax.jit(tokens_right)


def recall(
    tokens_right: Callable,
    parameters: Parameters,
    tokenizer: Tokenizer,
    length: int,
    question: tasks.Placement = "after",
    *,
    count: int,
    facts: int = 10,
) -> np.ndarray:
    """Return which digits of ``count`` held-out needles are right with a full cache, bool [count, 4]."""
    samples = [
        tasks.needle(HELD_OUT + i, tokenizer, length, depth=(i + 0.5) / count, facts=facts, question=question)
        for i in range(count)
    ]
    return np.stack(_answers_right(tokens_right, parameters, samples, length + 4))


def names_right(tokens_right: Callable, parameters: Parameters, tokenizer: Tokenizer, count: int) -> list[np.ndarray]:
    """Return which tokens of each final name are right in ``count`` held-out samples of the co-reference task."""
    samples = [coref_task.sample(HELD_OUT + i, tokenizer) for i in range(count)]
    return _answers_right(tokens_right, parameters, samples)


def _answers_right(
    tokens_right: Callable, parameters: Parameters, samples: Sequence[Any], width: int = 0
) -> list[np.ndarray]:
    """Return which tokens of each sample's answer are right; rows are padded to ``width`` or the longest of them."""
    rows = [[*sample.tokens, *sample.answer_tokens] for sample in samples]
    answer = np.arange(max(len(sample.answer_tokens) for sample in samples))
    places = [np.minimum(answer + len(s.tokens), len(row) - 1) for s, row in zip(samples, rows, strict=True)]
    right = np.asarray(tokens_right(parameters, answering.padded(rows, width), np.array(places, np.int32)))
    return [row[: len(sample.answer_tokens)] for row, sample in zip(right, samples, strict=True)]


def perplexity(config: Config, parameters: Parameters, tokenizer: Tokenizer, length: int = 512) -> float:
    """Return the perplexity per token of the haystack's held-out sentences."""
    ids = tokenizer.encode(prose.text("test")).ids
    rows = np.array(ids[: (len(ids) - 1) // length * length + 1])
    tokens, targets = rows[:-1].reshape(-1, length), rows[1:].reshape(-1, length)
    each = jax.jit(lambda p, x, y: jax.lax.map(lambda row: losses(config, p, row[0][None], row[1][None]), (x, y)))
    return float(np.exp(np.mean(each(parameters, tokens, targets))))


def measure(config: Config, parameters: Parameters, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Measure the finished model with a full cache: recall by placement and length, co-reference, and perplexity."""
    tokens_right = make_recall(config)
    exact = {
        place: {
            length: float(recall(tokens_right, parameters, tokenizer, length, place, count=count).all(-1).mean())
            for length in (512, 1024, 2048)
        }
        for place in get_args(tasks.Placement)
    }
    names = _names_summary(names_right(tokens_right, parameters, tokenizer, count))
    found = perplexity(config, parameters, tokenizer)
    return {"samples": count, "facts": 10, "recall": exact, **names, "perplexity": found}


def _names_summary(names: Sequence[np.ndarray]) -> dict[str, float]:
    return {
        "names_accuracy": float(np.mean([name.all() for name in names])),
        "names_coverage": float(np.mean([name.mean() for name in names])),
    }


def plan(recipe: Sequence[Phase], start: int) -> Iterator[tuple[int, Phase]]:
    """Return (step, phase) for every step from ``start``."""
    phases = itertools.chain.from_iterable(itertools.repeat(phase, phase.steps) for phase in recipe)
    return itertools.islice(enumerate(phases), start, None)


def rate_schedule(recipe: Sequence[Phase]) -> Callable[[Array], Array]:
    """Return the learning rate by step: linear within each phase, with a warm-up over the first 50 steps."""
    sizes = jnp.array([phase.steps for phase in recipe])
    ends = jnp.cumsum(sizes)
    first, last = jnp.array([phase.rate for phase in recipe]).T

    def rate(step):
        at = jnp.minimum(jnp.searchsorted(ends, step, side="right"), len(recipe) - 1)
        share = jnp.clip((step - (ends - sizes)[at]) / sizes[at], 0, 1)
        return (first[at] + share * (last - first)[at]) * jnp.minimum(1, (step + 1) / 50)

    return rate


OFTEN = Options(save_every=100, eval_every=100, progress_bar=True)


def train(
    folder: Path,
    config: Config,
    tokenizer: Tokenizer,
    recipe: Sequence[Phase],
    *,
    seed: int = 0,
    begin: Path | None = None,
    options: Options = OFTEN,
) -> Parameters:
    """Run the recipe and return the parameters.

    It starts from the newest checkpoint in ``folder`` if there is one and ``options.resume`` is true; else from the
    model in ``begin``, or from initial weights. It writes checkpoints, ``log.jsonl`` and ``run.json`` (which describes
    the run) into ``folder``. Every batch follows from the seed and the step, so a run that stops and resumes ends with
    the parameters of one that does not, bit for bit.

    Args:
        begin: a folder with a model that this recipe made, up to the last step in its log.jsonl; the run continues
            after that step, with a new optimizer.
        options: where the run starts, and when it writes. Recall is measured every ``eval_every`` steps and at the end;
            never for 0.

    Raises:
        ValueError: ``folder`` holds another run or one that is running, or ``begin`` has a model of another shape or no
            log with its last step.
        FileNotFoundError: ``begin`` has no model.
        KeyboardInterrupt: Ctrl-C, after a checkpoint was saved; the message has its path and the command that resumes.
    """
    parameters, first = init_parameters(config, jax.random.key(seed)), 0
    if begin is not None:
        parameters, first = _read_model(begin, config)
    invocation = options.invocation or commands.Invocation("papers.retriever.recipe.train(...)", time.monotonic())
    resume, say = options.resume, lambda text: print(f"papers.retriever.recipe: {text}.", file=sys.stderr)
    run = {"config": described(config), "seed": seed, "first": first, "jax": provenance.settings()}
    folders.check_run(folder, run, (), resume, flag="--work")
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,))
    rate = rate_schedule(recipe)
    optimizer = make_optimizer(lambda step: rate(step + first))  # the optimizer counts its own steps
    step_function, tokens_right = make_step(config, optimizer, mesh), make_recall(config)
    everywhere, groups = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    state = jax.device_put(State(parameters, optimizer.init(parameters)), everywhere)
    total = sum(phase.steps for phase in recipe)
    last = total if options.stop_after is None else min(total, options.stop_after)
    writer = data.Writer(tokenizer)

    with contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        files.lock(stack.enter_context((folder / files.LOCK_FILE).open("ab")), folder)
        folders.begin_run(folder, run, (), resume, {})
        if begin is not None and not (folder / "log.jsonl").exists():
            files.write_files(folder, {"log.jsonl": (begin / "log.jsonl").read_bytes()})
        checkpoints = Checkpoints(folder, options.keep, say)
        stack.callback(checkpoints.close)
        state, progress = checkpoints.restore(state, Progress(first, None, 0.0))
        start = progress.step
        made = (
            (step, phase, arrange(writer.batch(phase.level, phase.rows, seed, step), len(devices)))
            for step, phase in plan(recipe, start)
            if step < last
        )
        interrupts = stack.enter_context(Interrupts())
        meter = Meter(last, start, options.progress_bar, say)
        stack.callback(meter.close)
        timed, seen, totals = time.monotonic(), 0, []
        done = saved = start

        def save() -> None:
            nonlocal saved
            if done > saved:
                with interrupts.held():
                    checkpoints.save(state, Progress(done, None, 0.0))
                    checkpoints.wait()
                    saved = done

        try:
            for step, phase, batch in prefetch(made):
                weights, batch = jnp.array(phase.weights), jax.device_put(batch, groups)
                with interrupts.held():  # a step deletes what it reads
                    state, parts = step_function(state, batch, weights)
                    done = step + 1
                totals.append(parts)
                seen += batch[0].size
                if done % options.save_every == 0 or done == last:
                    save()
                meter.started(parts @ weights)  # after the save: a step is counted once its checkpoint is on disk
                if done % 20 == 0 or done == last:
                    meter.settle()
                    means = np.mean(jax.device_get(totals), axis=0).tolist()
                    line = dict(zip(("first", "rest", "text", "before", "name"), means, strict=True))
                    line = {"step": done, "length": phase.level.length} | line
                    speed = round(seen / (time.monotonic() - timed))
                    _log(folder, line | {"tokens_per_second": speed, "time": round(time.time())})
                    timed, seen, totals = time.monotonic(), 0, []
                if options.eval_every and (done % options.eval_every == 0 or done == last):
                    trained = phase.level.length
                    for length in sorted({256, max(trained, 256), min(2 * trained, 2048)}):
                        facts = 6 if length < 512 else 10
                        right = recall(tokens_right, state.parameters, tokenizer, length, count=32, facts=facts)
                        line = {"step": done, "recall_length": length, "recall": float(right.all(-1).mean())}
                        _log(folder, line | {"digits": right.mean(0).round(3).tolist()})
                    if phase.level.places:
                        names = names_right(tokens_right, state.parameters, tokenizer, 32)
                        _log(folder, {"step": done} | _names_summary(names))
                    timed = time.monotonic()
        except KeyboardInterrupt:
            meter.close()
            with contextlib.suppress(KeyboardInterrupt):
                save()
            raise interrupted(folder, checkpoints.newest(), invocation, resume) from None
    return state.parameters


def _read_model(folder: Path, config: Config) -> tuple[Parameters, int]:
    """Return a saved model's parameters, and the last step of the recipe in its log.jsonl."""
    model, _ = load(folder)
    if model.config != config:
        raise ValueError(f"the model in {folder} has another shape or vocabulary than the recipe's; give one it made.")
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    steps = [step for line in lines if (step := json.loads(line).get("step")) is not None]
    if not steps:
        raise ValueError(f"{log} does not say how far the recipe came; give the folder of a model that it made.")
    return split_weights(model.config, model.arrays()), steps[-1]


def _log(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = commands.Parser(prog="python -m papers.retriever.recipe", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/retriever"), help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("runs/retriever"), help="folder for checkpoints and the log")
    parser.add_argument("--resume", choices=("auto", "never"), default="auto", help="resume --work's checkpoint")
    parser.add_argument("--from", type=Path, dest="begin", help="continue from this folder's model and log")
    parser.add_argument("--keep", type=float, default=0.0, help="share of --from's weights in the finished model")
    add_shared_flags(parser, "seed")
    parser.add_argument("--devices", type=count, default=2, help="devices to split a CPU into; give its cores")
    parser.add_argument("--samples", type=at_least(0), default=100, help="needles per recall measurement; 0 for none")
    parser.add_argument("--stop-after", type=count, default=None, help="stop early, after this step")
    options = parser.parse_args(arguments)
    return commands.run(lambda: _make(options), "papers.retriever.recipe")


def _make(options: argparse.Namespace) -> None:
    for folder in (options.out, options.work):
        files.check_folder(folder)
    if options.begin is not None and not options.begin.is_dir():
        raise ValueError(f"--from is {options.begin}, which is no folder; expected one with a model of this recipe.")
    if not 0 <= options.keep < 1 or (options.keep and options.begin is None):
        raise ValueError(f"--keep is {options.keep}; expected a share from 0 to less than 1, and --from with it.")
    jax.config.update("jax_num_cpu_devices", options.devices)
    tokenizer = data.train_tokenizer()
    config = make_config(tokenizer)
    resume = options.resume == "auto"
    run = dataclasses.replace(OFTEN, invocation=options.invocation, resume=resume, stop_after=options.stop_after)
    recipe = read_recipe()
    parameters = train(options.work, config, tokenizer, recipe, seed=options.seed, begin=options.begin, options=run)
    if options.keep:
        kept, _ = _read_model(options.begin, config)
        parameters = {
            name: options.keep * kept[name] + (1 - options.keep) * array for name, array in parameters.items()
        }
    save(options.out, Decoder(config, join_weights(config, jax.device_get(parameters))), tokenizer)
    if options.samples:
        figures = measure(config, parameters, tokenizer, options.samples)
        _log(options.work, figures)
        print(json.dumps(figures))
    files.write_files(options.out, {"log.jsonl": (options.work / "log.jsonl").read_bytes()})


if __name__ == "__main__":
    sys.exit(main())
