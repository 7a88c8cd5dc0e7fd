"""Each operation's kernel compared with its XLA reference and its counted floor, over shapes of published models."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from benchmarks import floors, measure, steps
from benchmarks.shapes import PUBLISHED, names_of, shape
from evals import report
from kernels_pallas.dispatch import kernels_of, platform
from kvjax._src.checks import check_names
from models import commands, files
from models.butler import ButlerConfig
from models.commands.shared_flags import count
from models.config import Config

OPERATIONS = ("caote_topk", "keep_topk", "cache_attention", "paged_attention", "select_attention", "mse_logits")
IMPLEMENTATIONS = ("reference", "pallas_gpu", "pallas_mosaic_gpu", "pallas_tpu")
STATISTICS = frozenset({"sum", "last"})  # read by H2O and SAGE-KV; a block's other statistics cost the same pass
ERRORS = frozenset({"window_mean"})  # read by DropKV, and by SnapKV under CAOTE of each query
PAGE_SIZE = 16

LEGEND = """ms: median of one call, in a program of several on arrays of their own; spread: the middle half of the runs.
floor: the counted bytes at the measured copy bandwidth, or the counted products at the measured product rate,
whichever is more. of floor: floor over ms. x reference: the reference's time over this one's. The loss never forms
all pairs, so its floor is its inputs and gradients; the products over all pairs would be 2 T^2 N (D + 3 D')."""


class Case(NamedTuple):
    """One operation at one size; ``numbers_bytes`` and ``flops`` are its floor.

    ``call(function, zero, *make())`` runs it, as :func:`benchmarks.measure.in_turn` needs it.
    """

    operation: str
    case: str
    make: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]
    numbers_bytes: int
    flops: int = 0


class Sizes(NamedTuple):
    """The sizes of cases: tokens kept, per block, of a long context, its share that is read, tokens of the loss."""

    budget: int = 8192
    block: int = 128
    context: int = 131_072
    share: float = 0.25
    loss_tokens: int = 4096


TINY = Sizes(budget=24, block=8, context=64, loss_tokens=16)


def cases(config: Config, batch: int, sizes: Sizes, dtype: DTypeLike, operations: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of a model's shape."""
    if "caote_topk" in operations:
        for name in ("block", "block, fast", "decode"):
            yield _caote_topk(config, batch, sizes, dtype, name)
    if "keep_topk" in operations:
        yield _keep_topk(config, batch, sizes)
    if "cache_attention" in operations:
        slots = sizes.budget + sizes.block
        for tokens in (1, sizes.block):
            for statistics in (frozenset[str](), STATISTICS):
                yield _cache_attention(config, batch, slots, tokens, statistics, dtype)
        yield _cache_attention(config, batch, slots, sizes.block, ERRORS, dtype, errors=True)
    if "paged_attention" in operations:
        yield _paged_attention(config, batch, sizes, 1, dtype)
        yield _paged_attention(config, batch, sizes, sizes.block, dtype)
    if "select_attention" in operations:
        for heads in (config.num_kv_heads, config.num_heads):
            yield _select_attention(config, batch, sizes, dtype, heads)
        yield _cache_attention(config, batch, sizes.context, 1, frozenset(), dtype, case="dense, for select_attention")
    if "mse_logits" in operations:
        for causal in (False, True):
            yield _mse_logits(config, batch, sizes.loss_tokens, causal=causal)


def _normal(number: int, size: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return jax.random.normal(jax.random.key(number), size, dtype)


def _caote_topk(config: Config, B: int, sizes: Sizes, dtype: DTypeLike, case: str) -> Case:
    K, G, D = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    S, fast, decoding = sizes.budget + sizes.block, case.endswith("fast"), case == "decode"
    live = sizes.budget + 1 if decoding else S
    width = jnp.dtype(dtype).itemsize

    def make() -> tuple[Any, ...]:
        position = jnp.broadcast_to(jnp.where(jnp.arange(S) < live, jnp.arange(S), -1), (B, K, S))
        logits = jnp.where(position[:, :, None] >= 0, _normal(0, (B, K, G, S), jnp.float32), -jnp.inf)
        budget = jnp.full(B, sizes.budget, jnp.int32)
        return jax.nn.softmax(logits), _normal(1, (B, K, S, D), dtype), position, budget

    def call(function: Callable[..., Any], zero: Any, weights: Array, *arrays: Any) -> Any:
        return function(
            weights + zero, *arrays, protected=None, fast=fast, norm=2, group="exact", excess=1 if decoding else None,
            with_scores=False,
        )  # fmt: skip

    return Case("caote_topk", case, make, call, floors.caote_topk(B, K, live, D, width, fast=fast))


def _keep_topk(config: Config, B: int, sizes: Sizes) -> Case:
    K, S = config.num_kv_heads, sizes.budget + sizes.block

    def make() -> tuple[Any, ...]:
        position = jnp.broadcast_to(jnp.arange(S), (B, K, S))
        return _normal(0, (B, K, S), jnp.float32), position, jnp.full(B, sizes.budget, jnp.int32)

    def call(function: Callable[..., Any], zero: Any, scores: Array, *arrays: Any) -> Any:
        return function(scores + zero, *arrays, excess=None)

    return Case("keep_topk", "block", make, call, floors.keep_topk(B, K, S))


def _cache_attention(
    config: Config,
    B: int,
    S: int,
    T: int,
    statistics: frozenset[str],
    dtype: DTypeLike,
    case: str | None = None,
    errors: bool = False,
) -> Case:
    N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    width = jnp.dtype(dtype).itemsize
    numbers_bytes = floors.keys_and_values(B * K * S, D, width)

    def make() -> tuple[Any, ...]:
        position = jnp.broadcast_to(jnp.arange(S), (B, K, S))
        key, value = (_normal(number, (B, K, S, D), dtype) for number in (1, 2))
        return _normal(0, (B, T, N, D), dtype), key, value, position, jnp.broadcast_to(jnp.arange(S - T, S), (B, T))

    def call(function: Callable[..., Any], zero: Any, query: Array, *arrays: Any) -> Any:
        return function(
            query + zero, *arrays, statistics=statistics, window=32, errors=errors, sliding_window=None, scale=D**-0.5
        )

    name = ("decode" if T == 1 else f"block of {T}") + (", errors" if errors else ", statistics" if statistics else "")
    sums = "sum" in statistics
    flops = floors.attention_flops(B, T, N, S, D, statistics=sums) if T >= 128 else 0
    return Case("cache_attention", case or name, make, call, numbers_bytes, flops)


def _paged_attention(config: Config, B: int, sizes: Sizes, T: int, dtype: DTypeLike) -> Case:
    """Make a case in which heads hold from 0.25 to 1.75 times the budget, and their pages lie in random order."""
    N, K, D, page = config.num_heads, config.num_kv_heads, config.head_dim, min(PAGE_SIZE, sizes.budget)
    share = np.linspace(0.25, 1.75, K) if K > 1 else np.ones(1)
    tokens = np.maximum(T, (share * sizes.budget).astype(int))  # [K]
    pages = -(-tokens // page)
    M, width = int(pages.max()), jnp.dtype(dtype).itemsize
    live = B * int(pages.sum())
    numbers_bytes = floors.keys_and_values(live * page, D, width)

    def make() -> tuple[Any, ...]:
        held = jnp.broadcast_to(jnp.arange(M) < jnp.asarray(pages)[:, None], (B, K, M))
        number = (jnp.cumsum(held.ravel()) - 1).reshape(held.shape)
        order = jax.random.permutation(jax.random.key(3), live)
        table = jnp.where(held, order[jnp.clip(number, 0, live - 1)], -1).astype(jnp.int32)
        slot = jnp.arange(M * page).reshape(M, page)
        of_head = jnp.where(slot < jnp.asarray(tokens)[:, None, None], slot, -1)  # [K, M, page]
        position = jnp.full((live, page), -1, jnp.int32)
        position = position.at[jnp.where(held, table, live)].set(
            jnp.broadcast_to(of_head, (B, *of_head.shape)).astype(jnp.int32), mode="drop"
        )
        key, value = (_normal(number, (live, page, D), dtype) for number in (1, 2))
        end = int(tokens.max())
        asked = jnp.broadcast_to(jnp.arange(end - T, end), (B, T))
        return _normal(0, (B, T, N, D), dtype), key, value, position, table, asked

    def call(function: Callable[..., Any], zero: Any, query: Array, *arrays: Any) -> Any:
        return function(query + zero, *arrays, statistics=frozenset(), window=0, sliding_window=None, scale=D**-0.5)

    flops = floors.attention_flops(B, T, N, page * int(pages.sum()) // K, D) if T >= 128 else 0
    return Case("paged_attention", "decode" if T == 1 else f"block of {T}", make, call, numbers_bytes, flops)


def _select_attention(config: Config, B: int, sizes: Sizes, dtype: DTypeLike, H: int) -> Case:
    N, K, D, S = config.num_heads, config.num_kv_heads, config.head_dim, sizes.context
    M, width = max(1, int(sizes.share * S)), jnp.dtype(dtype).itemsize

    def make() -> tuple[Any, ...]:
        apart = S // M
        place = jnp.arange(M) * apart + jax.random.randint(jax.random.key(3), (B, H, M), 0, apart)
        key, value = (_normal(number, (B, K, S, D), dtype) for number in (1, 2))
        return _normal(0, (B, 1, N, D), dtype), key, value, place.astype(jnp.int32)

    def call(function: Callable[..., Any], zero: Any, query: Array, *arrays: Any) -> Any:
        return function(query + zero, *arrays, scale=D**-0.5)

    case = f"{sizes.share:.0%}, a set a {'KV' if H == K else 'query'} head"
    return Case("select_attention", case, make, call, floors.keys_and_values(B * H * M, D, width))


def _mse_logits(config: Config, B: int, T: int, *, causal: bool) -> Case:
    F = ButlerConfig.of(config).dim
    N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    numbers_bytes = floors.mse_bytes(B, T, N, K, D, F, 4)

    def make() -> tuple[Any, ...]:
        sizes = ((B, T, N, D), (B, T, K, D), (B, T, N, F), (B, T, N, F))
        return tuple(_normal(number, size, jnp.float32) for number, size in enumerate(sizes))

    def call(function: Callable[..., Any], zero: Any, query: Array, *arrays: Any) -> Any:
        return jax.value_and_grad(functools.partial(function, causal=causal), argnums=(2, 3))(query + zero, *arrays)

    case = ("causal" if causal else "all pairs") + ", with gradients"
    return Case("mse_logits", case, make, call, numbers_bytes)


def _implementations_here(operation: str) -> list[str]:
    """Return the reference, this device's kernels but those by Mosaic, and for the loss the materialised form.

    An error in a kernel by Mosaic may end the process, so they are asked for by name.
    """
    found = kernels_of(operation).items()
    able = [name for name, kernel in found if kernel.platform == platform() and name != "pallas_mosaic_gpu"]
    return ["reference", *able, *(["materialised"] if operation == "mse_logits" else [])]


def chosen_implementations(asked: str, operation: str, *, interpret: bool) -> list[str]:
    """Return the implementations of an operation to run; "auto" stands for those of :func:`_implementations_here`."""
    here = _implementations_here(operation)
    if asked == "auto":
        return here
    found = []
    for name in commands.split_list(asked):
        check_names("implementation", name, ["auto", *IMPLEMENTATIONS])
        kernel = kernels_of(operation).get(name)
        if name in here or (kernel is not None and (interpret or kernel.platform == platform())):
            found.append(name)
        elif not interpret and (machine := name.rpartition("_")[2]) != platform():
            able = ", ".join(["auto", *(n for n in IMPLEMENTATIONS if n in here)])
            raise ValueError(
                f"implementation {name!r} runs on a {machine}, but this is a {platform()}; {able} can run here, "
                "and --interpret emulates it."
            )
    return found


def direct_loss(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    predicted_query: Float[Array, "B T N F"],
    predicted_key: Float[Array, "B T N F"],
    *,
    causal: bool,
) -> Float[Array, ""]:
    """Compute ``mse_logits`` directly, with all logits [B, N, T, T] of both sides in memory."""
    T, N, D = query.shape[1:]
    key = jnp.repeat(key, N // key.shape[2], axis=2)
    logits = jnp.einsum("bind,bjnd->bnij", query, key) * D**-0.5
    predicted = jnp.einsum("bind,bjnd->bnij", predicted_query, predicted_key) * predicted_query.shape[3] ** -0.5
    square = (logits - predicted) ** 2
    if not causal:
        return jnp.mean(square)
    pairs = query.shape[0] * N * T * (T + 1) / 2
    return jnp.sum(jnp.where(jnp.tril(jnp.ones((T, T), bool)), square, 0)) / pairs


def _function_of(operation: str, implementation: str, *, interpret: bool) -> Callable[..., Any]:
    """Return the function of an operation's implementation, to be called with all its options."""
    if implementation == "materialised":
        return direct_loss
    if interpret and implementation != "reference":
        kernel = kernels_of(operation)[implementation]
        how: Any = True
        if kernel.file == "tpu":
            from jax.experimental.pallas import tpu

            how = tpu.InterpretParams()
        elif kernel.file == "mosaic_gpu":
            from jax.experimental.pallas import mosaic_gpu

            how = mosaic_gpu.InterpretGPUParams()
        return functools.partial(kernel.run, interpret=how)
    api = importlib.import_module(f"kernels_pallas.{operation}.api")
    return functools.partial(getattr(api, operation), implementation=implementation)


def measurement(
    case: Case, implementations: Sequence[str], timing: measure.Timing, *, interpret: bool = False
) -> list[dict[str, Any]]:
    """Time a case's implementations in turns on the same arrays; one that cannot run has a refusal in its record."""
    shapes = [jax.eval_shape(case.make)] * timing.calls
    measure.check_fits(measure.tree_bytes(shapes), f"{case.operation} ({case.case})", timing.free)
    programs, records = dict[str, jax.stages.Compiled](), list[dict[str, Any]]()
    for name in implementations:
        function = functools.partial(case.call, _function_of(case.operation, name, interpret=interpret))
        program, what = measure.in_turn(function), f"{case.operation} ({case.case}, {name})"
        try:
            programs[name] = measure.executable(program, *shapes, what=what, free=timing.free)
        except Exception as reason:  # one failing kernel does not stop the others
            if name == "reference" and not isinstance(reason, (NotImplementedError, measure.DoesNotFit)):
                raise
            records.append({"implementation": name, "refused": measure.reason_of(reason)})
    make = jax.jit(case.make)
    arrays = [make() for _ in range(timing.calls)]
    runs = {name: functools.partial(program, *arrays) for name, program in programs.items()}
    times = measure.take_turns(runs, timing.repetitions, calls=timing.calls)
    reference = times.get("reference")
    for name, own in times.items():
        records.append(
            {
                "implementation": name,
                **own._asdict(),
                "floor_milliseconds": timing.limits.milliseconds(case.numbers_bytes, case.flops),
                "floor_bytes": case.numbers_bytes,
                "floor_flops": case.flops,
                "compiled_bytes": measure.program_bytes(programs[name]),
                "times_reference": None if reference is None else reference.milliseconds / own.milliseconds,
            }
        )
    return records


def sweep(
    shapes: Sequence[str],
    batches: Sequence[int],
    sizes: Sizes,
    timing: measure.Timing,
    *,
    operations: Sequence[str] = OPERATIONS,
    implementations: str = "auto",
    interpret: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the records of all cases of all shapes; that of a case that does not fit in memory has a refusal."""
    configs = {name: shape(name) for name in shapes}
    chosen = {name: chosen_implementations(implementations, name, interpret=interpret) for name in OPERATIONS}
    settings = [
        (name, batch, case)
        for name, config in configs.items()
        for batch in batches
        for case in cases(config, batch, sizes, steps.dtype_here(), operations)
        if chosen[case.operation]
    ]
    if not settings:
        raise ValueError(
            f"no operation out of {', '.join(operations)} has the implementation {implementations}; give another."
        )
    for name, batch, case in commands.progress_bar("case", over=settings):
        try:
            found = measurement(case, chosen[case.operation], timing, interpret=interpret)
        except (measure.DoesNotFit, jax.errors.JaxRuntimeError) as reason:
            found = [{"implementation": chosen[case.operation][0], "refused": measure.reason_of(reason)}]
        for record in found:
            label = f"{case.operation} ({case.case}), {name} x {batch}, {record['implementation']}"
            of_case = {"operation": case.operation, "case": case.case, "shape": name, "batch": batch}
            yield {"name": label, **of_case, **record}


def table(results: Sequence[dict[str, Any]]) -> report.Table:
    """Return a table with one line per case and implementation."""
    cells: list[tuple[str, report.Cell]] = [
        ("operation", "{operation}"),
        ("case", "{case}"),
        ("shape", "{shape}"),
        ("batch", "{batch}"),
        ("by", "{implementation}"),
        ("ms", "{milliseconds:.4f}"),
        ("spread", "{low:.4f}..{high:.4f}"),
        ("floor ms", "{floor_milliseconds:.4f}"),
        ("of floor", lambda r: f"{r['floor_milliseconds'] / r['milliseconds']:.0%}"),
        ("x reference", lambda r: "" if r["times_reference"] is None else f"{r['times_reference']:.2f}"),
    ]
    return measure.table(results, cells, left=5)


def tables(results: Sequence[dict[str, Any]]) -> dict[str, tuple[report.Table, str]]:
    """Return the table and its legend by title."""
    return {"Operations": (table(results), LEGEND)}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--shapes", "--shape", help=f"models' shapes (default: {','.join(PUBLISHED)}; on a CPU small)")
    flags.add_argument("--operations", default=",".join(OPERATIONS))
    flags.add_argument("--implementations", "--implementation", default="auto", help="auto: all that can run here")
    flags.add_argument("--interpret", action="store_true", help="emulate the named kernels; the times mean nothing")
    flags.add_argument("--batches", default="1,8")
    flags.add_argument("--budget", type=count, default=8192)
    flags.add_argument("--context", type=count, default=131_072, help="slots that select_attention chooses from")
    flags.add_argument("--loss-tokens", type=count, default=4096)
    measure.add_timing_flags(flags, "kernels")


def command(flags: argparse.Namespace) -> None:
    """Measure, print the table, write JSON."""
    files.check_outputs([flags.json])
    sizes = TINY if flags.tiny else Sizes(flags.budget, context=flags.context, loss_tokens=flags.loss_tokens)
    batches = [1] if flags.tiny else measure.whole_numbers("--batches", flags.batches)
    shapes = names_of(flags)
    options = dict(implementations=flags.implementations, interpret=flags.interpret)
    operations = commands.split_list(flags.operations)
    check_names("operation", operations, OPERATIONS)
    for operation in operations:
        chosen_implementations(flags.implementations, operation, interpret=flags.interpret)
    timing = measure.timing(flags)
    settings = {**timing.settings(), **sizes._asdict(), **options}
    records = sweep(shapes, batches, sizes, timing, operations=operations, **options)
    measure.show(tables(measure.collect(flags, "kernels", settings, records)), flags.json)
