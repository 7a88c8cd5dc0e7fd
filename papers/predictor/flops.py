"""The cost of a predictor at published sizes, counted from compiled programs.

No model runs: the programs are compiled for abstract arrays. XLA counts a loop's body once, whatever the loop's length.
So a model's cost is that of the model without layers, plus the cost that one layer adds times the number of layers.
Bytes are floors: each array is read once. The bytes that the compiled programs access are reported beside them.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

import models
from benchmarks import floors, measure
from benchmarks.shapes import shape
from evals import report
from kernels_pallas import cache_attention
from kvjax import sources
from kvjax._src.checks import check_names
from models import commands, files
from models.butler import Butler, ButlerConfig
from models.commands.shared_flags import add_shared_flags
from models.parameters import array_shapes
from models.steps import filled_slots

MODELS = {name: shape(name.lower()) for name in ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")}
BLOCK = 128  # tokens of a prompt per step
SINKS = 4  # read beside the share, as in the paper
WIDTH = 2  # bytes per number in the floors: bfloat16, for the predictor as well
UNUSED = ("unused_query", "unused_key", "unused_norm", "unused_norm_bias")  # in the published layout, but never read


class Cost(NamedTuple):
    """XLA's count for a compiled program: floating-point operations, and bytes read and written."""

    flops: float
    bytes: float


def _compiled_cost(function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Cost:
    """Compile a function for abstract arguments and return XLA's count; bodies of loops are counted once."""
    analysis: Any = jax.jit(function, donate_argnums=donate).lower(*arguments).compile().cost_analysis()
    return Cost(analysis["flops"], analysis["bytes accessed"])


class Parts(NamedTuple):
    """The parts of a forward: a model is ``rest`` + L ``layer``, a predictor is ``network`` + (L - 1) ``logits``."""

    rest: Any  # embedding, last norm, head
    layer: Any
    network: Any  # the predictor without its logits
    logits: Any  # q'.k' of one layer


@functools.cache
def model_cost(config: models.Config, tokens: int, slots: int) -> tuple[Cost, Cost]:
    """Return the cost of the model without layers and the cost per layer, for the last ``tokens`` of ``slots``."""
    whole = []
    for layers in (0, 1):
        short = dataclasses.replace(config, num_layers=layers, sliding_windows=())
        abstract = {name: _abstract(*sizes) for name, sizes in array_shapes(short).items()}
        model = jax.eval_shape(functools.partial(models.Decoder, short), abstract)
        cache = [_abstract(1, config.num_kv_heads, slots, config.head_dim) for _ in range(2)]
        whole.append(_compiled_cost(_forward, model, jax.ShapeDtypeStruct((1, tokens), jnp.int32), cache, donate=(2,)))
    return whole[0], Cost(*(one - none for none, one in zip(*whole, strict=True)))


def _forward(model: models.Decoder, tokens: Array, cache: list[Array]) -> tuple[Array, list[Array]]:
    T, S = tokens.shape[1], cache[0].shape[2]
    position = jnp.arange(S - T, S)[None]

    def attend(cache, layer, sliding_window, query, key, value):
        new = (key.swapaxes(1, 2), value.swapaxes(1, 2))
        key, value = (old.at[:, :, S - T :].set(x) for old, x in zip(cache, new, strict=True))
        slots = jnp.broadcast_to(jnp.arange(S), key.shape[:3])
        return cache_attention(query, key, value, slots, position)[0], [key, value], None

    hidden, cache, _ = model.run(tokens, position, jnp.full(1, S), attend, cache)
    return model.logits(hidden), cache


@functools.cache
def predictor_cost(config: Any, tokens: int, slots: int) -> tuple[Cost, Cost]:
    """Return the costs of the predictor without logits and of one layer's logits, as in :func:`model_cost`."""
    abstract = {name: _abstract(*sizes) for name, sizes in config.shapes.items()}
    predictor = jax.eval_shape(functools.partial(Butler, config), abstract)
    cache = jax.eval_shape(lambda predictor: predictor.init_cache(1, slots), predictor)

    def network(predictor, cache, x):
        return predictor.step(cache, x, jnp.arange(slots - tokens, slots)[None])

    query = _abstract(1, tokens, config.num_heads, config.dim)
    return (
        _compiled_cost(network, predictor, cache, _abstract(1, tokens, config.hidden_size), donate=(1,)),
        _compiled_cost(sources.logits, query, _abstract(1, config.num_heads, slots, config.dim)),
    )


def _abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)  # a CPU's compiler would turn bfloat16 into float32 copies


def floor_numbers(model: models.Config, predictor: Any, slots: int) -> Parts:
    """Return how many numbers a decode step reads, each once: weights, and the caches of ``slots`` tokens."""
    rest, layer = floors.weight_numbers(model)
    own = {name: math.prod(size) for name, size in predictor.shapes.items()}
    return Parts(
        rest=rest,
        layer=layer + floors.keys_and_values(model.num_kv_heads * slots, model.head_dim, 1),
        network=sum(count for name, count in own.items() if name not in UNUSED) + 2 * predictor.reduced * slots,
        logits=model.num_heads * predictor.dim * slots,
    )


def selected_numbers(model: models.Config, tokens: float, slots: int) -> dict[str, float]:
    """Return how many numbers of one layer's cache a decode step reads if each head reads ``tokens`` of the slots.

    ``heads``: every query head gathers its own tokens, as published. The others read the tokens of a group once:
    ``same`` if all heads of the group choose the same tokens, ``apart`` if no two heads share one, ``chance`` if they
    choose independently.
    """
    token, group = _token_numbers(model), model.num_heads // model.num_kv_heads
    return {
        "heads": group * token * tokens,
        "same": token * tokens,
        "chance": token * slots * (1 - (1 - tokens / slots) ** group),
        "apart": token * min(slots, group * tokens),
    }


def _token_numbers(model: models.Config) -> int:
    """Return how many numbers the key and value of a token have in one layer."""
    return 2 * model.num_kv_heads * model.head_dim


def break_even(model: models.Config, predictor: Any, share: float, reading: str) -> int | None:
    """Return the shortest context at which a decode step reads fewer bytes with the predictor, or None if none does."""

    def saved(slots: int) -> float:
        floor = floor_numbers(model, predictor, slots)
        read = selected_numbers(model, min(slots, share * slots + SINKS), slots)[reading] + floor.logits
        return predictor.predicted_layers * (_token_numbers(model) * slots - read) - floor.network

    longest = 2**40
    if saved(longest) <= 0:
        return None
    return bisect.bisect_left(range(longest), True, lo=1, key=lambda slots: saved(slots) > 0)


def largest_share(model: models.Config, predictor: Any, reading: str) -> float:
    """Return the share below which selection saves bytes at contexts where the predictor's weights do not matter."""
    group = model.num_heads // model.num_kv_heads
    own = model.num_heads * predictor.dim + 2 * predictor.reduced / predictor.predicted_layers
    left = max(0.0, 1 - own / _token_numbers(model))
    shares = {"heads": left / group, "same": left, "chance": 1 - (1 - left) ** (1 / group), "apart": left / group}
    return shares[reading]


def _blocks_of(tokens: int) -> list[tuple[int, int]]:
    """Return the tokens of each block of a prompt, and the slots that its attention reads."""
    block = min(BLOCK, tokens)
    fed = range(tokens % block or block, tokens + 1, block)  # the first block is the short one
    return [(min(block, end), filled_slots(end, tokens) or tokens) for end in fed]


def prefill(name: str, tokens: int) -> dict[str, Any]:
    """Count the FLOPs of a forward of ``tokens`` tokens and those that the predictor adds, with and without logits.

    The prompt comes in blocks, as in generation: attention and logits are over the slots that are filled so far.
    """
    model = MODELS[name]
    predictor = ButlerConfig.of(model)
    rest, network = model_cost(model, tokens, tokens)[0], predictor_cost(predictor, tokens, tokens)[0]
    last, L = model_cost(model, 1, tokens)[0], model.num_layers
    places = _blocks_of(tokens)
    layer = sum(model_cost(model, *place)[1].flops for place in places)
    logits = sum(predictor_cost(predictor, *place)[1].flops for place in places)
    whole, whole_last = rest.flops + L * layer, last.flops + L * layer
    all_logits = predictor.predicted_layers * logits
    return {
        "model": name,
        "tokens": tokens,
        "model_flops": whole,
        "model_flops_last_logits": whole_last,
        "network_flops": network.flops,
        "importance_flops": all_logits,
        "network_share": network.flops / whole,
        "share": (network.flops + all_logits) / whole,
        "network_share_last_logits": network.flops / whole_last,
        "share_last_logits": (network.flops + all_logits) / whole_last,
    }


class StepBytes(NamedTuple):
    """Bytes of a decode step of one sequence, each array read once: the dense step's first, then the predictor's."""

    weights: int
    cache: int
    predictor_weights: int
    predictor_cache: int
    importance_keys: int


def step_bytes(model: models.Config, predictor: Any, slots: int) -> StepBytes:
    """Return the bytes that a dense decode step at ``slots`` tokens reads, and those that the predictor reads."""
    floor, weights = floor_numbers(model, predictor, slots), floor_numbers(model, predictor, 0)
    return StepBytes(
        weights=WIDTH * (weights.rest + model.num_layers * weights.layer),
        cache=WIDTH * model.num_layers * (floor.layer - weights.layer),
        predictor_weights=WIDTH * weights.network,
        predictor_cache=WIDTH * (floor.network - weights.network),
        importance_keys=WIDTH * predictor.predicted_layers * floor.logits,
    )


def bytes_ratios(model: models.Config, predictor: Any, share: float, slots: int) -> dict[str, float]:
    """Return a selecting decode step's bytes over a dense one's, for each reading of :func:`selected_numbers`."""
    floor = step_bytes(model, predictor, slots)
    dense = floor.weights + floor.cache
    unselected = sum(floor) - floor.cache * predictor.predicted_layers / model.num_layers  # layer 0 is read in full
    numbers = selected_numbers(model, _tokens_read(share, slots), slots)
    return {name: (unselected + WIDTH * predictor.predicted_layers * n) / dense for name, n in numbers.items()}


def _tokens_read(share: float, slots: int) -> int:
    return min(slots, math.ceil(share * slots) + SINKS)


def decode(name: str, context: int, shares: list[float]) -> dict[str, Any]:
    """Count FLOPs and bytes of a decode step of one sequence at a context: dense, and with predictor and selection."""
    model = MODELS[name]
    predictor = ButlerConfig.of(model)
    predicted = predictor.predicted_layers
    (rest, layer), (network, logits) = model_cost(model, 1, context), predictor_cost(predictor, 1, context)
    dense = rest.flops + model.num_layers * layer.flops
    added = network.flops + predicted * logits.flops
    selections = []
    for share in shares:
        short = model_cost(model, 1, _tokens_read(share, context))[1]
        flops = dense + added - predicted * (layer.flops - short.flops)
        ratios = {"flops_ratio": flops / dense, "bytes_ratio": bytes_ratios(model, predictor, share, context)}
        selections.append({"share": share, "tokens": _tokens_read(share, context), "flops": flops, **ratios})
    counted = Parts(rest.bytes, layer.bytes, network.bytes, logits.bytes)
    floor = floor_numbers(model, predictor, context)
    return {
        "model": name,
        "context": context,
        "flops": dense,
        "network_flops": network.flops,
        "importance_flops": predicted * logits.flops,
        "bytes": step_bytes(model, predictor, context)._asdict(),
        "selections": selections,
        "accessed_over_floor": {n: c / (4 * f) for n, c, f in zip(Parts._fields, counted, floor, strict=True)},
    }


def reading(name: str, shares: list[float]) -> dict[str, Any]:
    """Return a model's numbers per token and predicted layer, and the contexts from which selection saves bytes."""
    model = MODELS[name]
    predictor = ButlerConfig.of(model)
    readings = ("heads", "same", "chance", "apart")
    return {
        "model": name,
        "key_value_numbers": _token_numbers(model),
        "importance_key_numbers": model.num_heads * predictor.dim,
        "own_attention_numbers": 2 * predictor.reduced / predictor.predicted_layers,
        "largest_share": {r: largest_share(model, predictor, r) for r in readings},
        "break_even": [{"share": s, **{r: break_even(model, predictor, s, r) for r in readings}} for s in shares],
    }


PREFILL = """What the predictor adds to the model's FLOPs. network: reduction, attention, feed-forward and the two
projection networks; + logits: and q'.k' in all predicted layers; last: against a model that projects only the last
token to the vocabulary. The prompt comes in blocks of 128 tokens; attention and logits are over the slots that are
filled so far, rounded up to quarters of all. The paper's figure 4 gives 1 to 2% of a whole forward's latency and does
not say what it holds; network is the reading taken for it, as the public code's inference path prefills densely,
without logits."""
DECODE_FLOPS = """Of one sequence. network, logits: what the predictor adds to a dense step; 50% and so on: a step
with predictor and selection over a dense one. Finding the largest logits is not counted."""
DECODE_BYTES = """MiB in bfloat16, each array read once. weights, K and V: a dense step; network: the predictor's
weights and the cache of its own attention; k': its keys of all tokens. 50% and so on: all that a step with selection
reads over a dense step, where each query head gathers its own tokens (in parentheses, where a group's tokens are
gathered once: if its heads choose the same .. if no two do)."""
READING = """Numbers for each token and predicted layer: K and V, 2 K D; k', N D'; own, the cache of the
predictor's own attention, 2 r / (L - 1). largest share: below it selection saves bytes once a context is long enough;
from: the shortest context that saves. Each query head gathers its own tokens (in parentheses: a group's heads choose
the same tokens, gathered once)."""


def tables(results: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[report.Table, str]]:
    """Return each table and its legend by title."""

    def by_share(part: str, field: str, cell: Callable[[dict[str, Any]], str], head: str = "") -> Any:
        """Return one column per share: its head, and the cell of each result's entry of that share."""
        return [
            (f"{head}{entry['share']:.0%}", lambda r, place=place: cell(r[field][place]))
            for place, entry in enumerate(results[part][0][field])
        ]

    def mib(*names: str) -> report.Cell:
        return lambda r: f"{sum(r['bytes'][name] for name in names) / 2**20:,.0f}"

    def length(slots: int | None) -> str:
        return "never" if slots is None else f"{slots:,}"

    of_forward: list[tuple[str, report.Cell]] = [
        ("model", "{model}"),
        ("tokens", "{tokens:,}"),
        ("GFLOPs", lambda r: f"{r['model_flops'] / 1e9:,.0f}"),
        ("network", "{network_share:.2%}"),
        ("+ logits", "{share:.2%}"),
        ("network, last", "{network_share_last_logits:.2%}"),
        ("+ logits, last", "{share_last_logits:.2%}"),
    ]
    of_flops: list[tuple[str, report.Cell]] = [
        ("model", "{model}"),
        ("context", "{context:,}"),
        ("GFLOPs", lambda r: f"{r['flops'] / 1e9:.2f}"),
        ("network", lambda r: f"+{r['network_flops'] / r['flops']:.2%}"),
        ("logits", lambda r: f"+{r['importance_flops'] / r['flops']:.2%}"),
        *by_share("decode", "selections", "{flops_ratio:.3f}".format_map),
    ]
    ratios = "{bytes_ratio[heads]:.2f} ({bytes_ratio[same]:.2f}..{bytes_ratio[apart]:.2f})".format_map
    of_bytes: list[tuple[str, report.Cell]] = [
        ("model", "{model}"),
        ("context", "{context:,}"),
        ("weights", mib("weights")),
        ("K and V", mib("cache")),
        ("network", mib("predictor_weights", "predictor_cache")),
        ("k'", mib("importance_keys")),
        *by_share("decode", "selections", ratios),
    ]
    of_reading: list[tuple[str, report.Cell]] = [
        ("model", "{model}"),
        ("K, V", "{key_value_numbers:,.0f}"),
        ("k'", "{importance_key_numbers:,.0f}"),
        ("own", "{own_attention_numbers:,.0f}"),
        ("largest share", "{largest_share[heads]:.1%} ({largest_share[same]:.1%})"),
        *by_share("reading", "break_even", lambda e: f"{length(e['heads'])} ({length(e['same'])})", "from, "),
    ]
    return {
        "A forward": (report.table(results["prefill"], of_forward, left=1), PREFILL),
        "FLOPs of a decode step": (report.table(results["decode"], of_flops, left=1), DECODE_FLOPS),
        "Bytes of a decode step": (report.table(results["decode"], of_bytes, left=1), DECODE_BYTES),
        "Where selection saves bytes": (report.table(results["reading"], of_reading, left=1), READING),
    }


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--models", default=",".join(MODELS))
    flags.add_argument("--lengths", default="256,512,1024,2048", help="tokens of a forward")
    flags.add_argument("--contexts", default="8192,32768,131072", help="tokens before a decode step")
    flags.add_argument("--shares", default="0.5,0.25,0.1,0.05", help="shares of the tokens that a head reads")
    add_shared_flags(flags, "json")


def command(flags: argparse.Namespace) -> None:
    """Count, print the tables, and write JSON."""
    files.check_outputs([flags.json])
    names = commands.listed("model", flags.models, f"--models {next(iter(MODELS))}")
    check_names("--models", names, MODELS)
    shares = measure.shares("--shares", flags.shares)
    lengths = sorted(measure.whole_numbers("--lengths", flags.lengths))
    contexts = sorted(measure.whole_numbers("--contexts", flags.contexts))
    forwards, steps = (list(itertools.product(names, sizes)) for sizes in (lengths, contexts))
    results = {
        "prefill": [prefill(name, tokens) for name, tokens in commands.progress_bar("forward", over=forwards)],
        "decode": [decode(name, context, shares) for name, context in commands.progress_bar("step", over=steps)],
        "reading": [reading(name, shares) for name in names],
    }
    for title, (table, legend) in tables(results).items():
        print(title, table, legend, "", sep="\n")
    report.write(flags, {"benchmark": "predictor", "sinks": SINKS, "results": results}, {})
