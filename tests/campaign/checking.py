"""One case: what the library does, held against the reference row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import models
from kvjax import KVCache, PagedCache
from models import Decoder
from models.engine import logits_of
from models.parameters import join_weights, partition
from tests.campaign.cases import Case
from tests.models import reference

TRIES = 60  # runs of the reference that look for the near choices that would explain a mismatch


class Outcome(NamedTuple):
    """What came of a case.

    ``kind`` is "ok"; "undecided", where the reference gives the library's result once choices within rounding, or
    numbers half way between two of eight bits, go the other way; "blurred", where there are too many such choices to
    try (CAOTE of equal values is nothing but rounding); "tie", where equals were told apart by rounding and not the
    more recent one stayed; "differs"; or "raises".
    """

    kind: str
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.kind in ("tie", "differs", "raises")


class Loss(NamedTuple):
    """Says what rounding may change, relative to a number; for ``small`` and ``rows``, to the largest at hand."""

    near: float = reference.NEAR  # of scores
    small: float = reference.SMALL  # of scores that are small differences
    rows: float = 1e-3  # of keys and values
    logits: float = 2e-3  # rows of attention that see other tokens differ by 0.1


FLOAT32 = Loss()


class Held(NamedTuple):
    """Tells which positions the heads hold, [L, B, K, P], and their keys and values; [L, K, P] of one row."""

    kept: np.ndarray
    key: np.ndarray  # [*, D], where kept
    value: np.ndarray
    following: Any  # the next position, [B] or of the row

    def row(self, row: int) -> Held:
        return Held(self.kept[:, row], self.key[:, row], self.value[:, row], int(self.following[row]))


class Row(NamedTuple):
    """Holds what the library gave for one row; None for what is not known."""

    tokens: list[int] | None
    logits: np.ndarray | None  # [P, V] or, of the last token, [V]
    held: Held | None
    history: list[np.ndarray | None]  # kept positions behind each block or step


def check(
    case: Case,
    weights: dict[str, np.ndarray] | None = None,
    wide: dict[str, np.ndarray] | None = None,
    loss: Loss = FLOAT32,
) -> Outcome:
    """Runs a case and holds it against the reference.

    ``weights`` are those of the case unless given; ``wide`` are the same for the reference, if they are too narrow.
    """
    weights = weights_of(case) if weights is None else weights
    rows = _library(case, weights)
    return worst(against(case, wide or weights, number, row, loss=loss) for number, row in enumerate(rows))


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The first of those that say the most against the library."""
    order = ("ok", "undecided", "blurred", "tie", "differs", "raises")
    return max(outcomes, key=lambda outcome: order.index(outcome.kind), default=Outcome("ok"))


def weights_of(case: Case) -> dict[str, np.ndarray]:
    return reference.parameters(case.config, case.seed)


def against(
    case: Case,
    weights: dict[str, np.ndarray],
    number: int,
    row: Row,
    prompt: Sequence[int] | None = None,
    loss: Loss = FLOAT32,
    **changes: Any,
) -> Outcome:
    """Holds a row against the reference's run of it; ``changes`` are of what is asked of the reference."""
    prompt = case.prompts()[number, : case.lengths[number]] if prompt is None else prompt
    settings: dict[str, Any] = dict(
        policy=None if case.policy == "full" else reference.policy(case.policy),
        budget=None if case.policy == "full" else case.budget,
        block=case.block,
        when=case.when,
        question=0 if case.question is None else case.question[number],
        new_tokens=0 if row.tokens is None else case.new,
        evict_every=case.evict_every,
        end=case.end,
        dtypes=case.dtypes,
        loss=(loss.near, loss.small),
    )
    if case.base == "butler":
        butler = reference.butler(case.config, case.seed)
        arrays = {name: np.asarray(array, np.float64) for name, array in nnx.to_pure_dict(nnx.state(butler)).items()}
        settings["butler"] = arrays, butler.config.rope_theta
    if case.base in ("zap", "trimkv"):
        state = nnx.to_pure_dict(nnx.state(reference.scorer(case.config, case.seed)))
        settings["scorer"] = {name: np.asarray(array, np.float64) for name, array in state.items()}
    settings |= changes
    # As it is; then with near choices as the library seems to have made them: what it holds afterwards, or at the end,
    # stayed; then, one after the other and together, with near choices the other way.
    ways: list[tuple[frozenset[int], list[np.ndarray]]] = [(frozenset(), [])]
    if seen := _filled([*row.history, *([] if row.held is None else [row.held.kept])]):
        ways.append((frozenset(), seen))
    first, wide, tries = "", False, 0
    while ways and tries < TRIES:
        tries += 1
        flips, held = ways.pop(0)
        known = None
        if held and row.held is not None:
            known = tuple(np.where(row.held.kept[..., None], x, np.nan) for x in (row.held.key, row.held.value))
        run = reference.run(weights, case.config, prompt, flips=flips, held=held, known=known, **settings)
        difference = _difference(row, run, loss)
        if not difference:
            turned = [near for near in run.choices.near if near.turned]
            gaps = f"row {number}: gaps of {', '.join(f'{near.gap:.0e}' for near in turned)}"
            return (
                Outcome("tie" if any(near.tie for near in turned) else "undecided", gaps) if turned else Outcome("ok")
            )
        first = first or f"row {number}: {difference}"
        wide = wide or any(near.wide for near in run.choices.near)
        ways += [(flips | {near.number}, held) for near in run.choices.near if near.number > max(flips, default=-1)]
    return Outcome("blurred" if wide or ways else "differs", first)


def _filled(history: list[np.ndarray | None]) -> list[np.ndarray]:
    """Fill in what is not known by what comes next."""
    filled: list[np.ndarray] = []
    for kept in reversed(history):
        if kept is not None or filled:
            filled.append(filled[-1] if kept is None else kept)
    return filled[::-1]


def _difference(row: Row, run: reference.Run, loss: Loss) -> str:
    """In words, "" where there is none."""
    if row.tokens is not None and row.tokens != run.tokens:
        return f"tokens {row.tokens}, expected {run.tokens}"
    P = run.kept.shape[-1]
    for step, (kept, expected) in enumerate(zip(row.history, run.history, strict=False)):
        if kept is not None and (where := _wrong(kept, expected)):
            return f"behind block or step {step}: {where}"
    if row.held is not None:
        if row.held.following != P:
            return f"next position {row.held.following}, expected {P}"
        if where := _wrong(row.held.kept, run.kept):
            return where
        for what, got, expected in (("keys", row.held.key, run.key), ("values", row.held.value, run.value)):
            error = np.where(run.kept[..., None], abs(got[..., :P, :] - expected), 0).max()
            if not error < loss.rows * max(1, abs(expected).max()):
                return f"{what} off by {error:.1e}"
    if row.logits is not None:
        expected = run.logits if row.logits.ndim == 2 else run.logits[-1]
        error = abs(row.logits - expected).max()
        if not error < loss.logits * max(1, abs(expected).max()):
            return f"logits off by {error:.1e}"
    return ""


def _wrong(kept: np.ndarray, expected: np.ndarray) -> str:
    """Where other positions are kept than expected."""
    P = expected.shape[-1]
    if kept.shape[:2] != expected.shape[:2] or kept[..., P:].any():
        return "positions that cannot be"
    wrong = np.argwhere(kept[..., :P] != expected)[:4]
    where = ", ".join(("kept" if kept[tuple(at)] else "lost") + f" {at.tolist()}" for at in wrong)
    return where and f"[layer, head, position] {where}"


def networks_of(case: Case) -> Any:
    """Return the network that a case's policy reads, if it reads one."""
    made = {"butler": reference.butler, "zap": reference.scorer, "trimkv": reference.retention}.get(case.base)
    return None if made is None else made(case.config, case.seed)


def settings_of(case: Case, **changes: Any) -> dict[str, Any]:
    """Return what the library's functions are asked for."""
    return (
        dict(
            policy=case.policy,
            budget=None if case.policy == "full" else case.budget,
            block=case.block,
            when=case.when,
            page_size=case.page_size,
            networks=networks_of(case),
            cache_dtype=case.cache_dtype,
        )
        | changes
    )


def _library(case: Case, weights: dict[str, np.ndarray]) -> list[Row]:
    model, B = model_of(case, weights), len(case.lengths)
    lengths = np.array(case.lengths)
    settings = settings_of(case, question=None if case.question is None else np.array(case.question))
    tokens: list[list[int]] | list[None] = [None] * B
    logits: Any = [None] * B
    blocks: list[Held] = []
    steps: list[Held] = []
    if case.entry == "prefill":
        cache, found = models.prefill(model, case.prompts(), lengths=lengths, **settings)
        logits, held = np.asarray(found, np.float64), held_of(cache)
    elif case.entry == "prefill all":
        cache, hidden = models.hidden_states(model, case.prompts(), lengths=lengths, **settings)
        each = np.asarray(logits_of(model, hidden), np.float64)
        logits, held = [each[row, :n] for row, n in enumerate(lengths)], held_of(cache)
    else:
        settings |= dict(lengths=lengths, max_new_tokens=case.new, evict_every=case.evict_every, end=case.end)
        if case.entry == "generate":
            out = models.generate(model, case.prompts(), **settings)
            tokens, held = answers(case, out), held_of(out.cache)
        else:
            tokens, steps = streamed(
                model, case.prompts(), on_block=lambda *at: blocks.append(held_of(at[-1])), **settings
            )
            held = steps[-1]
    questions = np.zeros(B, int) if case.question is None else np.array(case.question)
    counts = -(-(lengths - questions) // case.block)  # of each row's blocks before its question, which end together
    rows = []
    for row in range(B):
        history = blocks[counts.max() - counts[row] : counts.max()] + steps[1:]
        rows.append(Row(tokens[row], logits[row], held.row(row), [then.kept[:, row] for then in history]))
    return rows


def answers(case: Case, out: models.Generation) -> list[list[int]]:
    """Each row's tokens, up to where it ended; behind that there is padding."""
    host, counts = np.asarray(out.tokens), np.asarray(out.lengths)
    assert all((host[row, n:] == case.config.pad).all() for row, n in enumerate(counts)), "tokens behind the end"
    return [host[row, :n].tolist() for row, n in enumerate(counts)]


def streamed(model: Decoder, prompts: Any, **settings: Any) -> tuple[list[list[int]], list[Held]]:
    """Each row's tokens, and what is held behind each step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = []
    for step, cache in models.stream(model, prompts, **settings):
        steps.append(held_of(cache))
        for row, token in enumerate(step.tolist()):
            if token >= 0:
                tokens[row].append(token)
    return tokens, steps


def held_of(cache: Any) -> Held:
    """Reads a cache in NumPy."""
    if not isinstance(cache, PagedCache):
        layers = [cache.layer(layer) for layer in range(cache.heads_shape[0])]
        most = max(layer.num_slots for layer in layers)

        def of_all(*leaves: Any, fill: int = 0) -> np.ndarray:
            widths = [[(0, most - n if axis == 2 else 0) for axis, n in enumerate(leaf.shape)] for leaf in leaves]
            padded = zip(leaves, widths, strict=True)
            return np.stack([np.pad(leaf, width, constant_values=fill) for leaf, width in padded])

        entries = jax.tree.map(of_all, *(layer.entries for layer in layers))
        position = of_all(*(layer.position for layer in layers), fill=-1)
        cache = KVCache(entries=entries, position=position, next_position=cache.next_position)
    position, key, value = np.asarray(cache.position), *(_floats(cache, side) for side in ("key", "value"))
    if isinstance(cache, PagedCache):
        table = np.asarray(cache.table)
        position = np.where(table[..., None] >= 0, position[table], -1).reshape(*table.shape[:3], -1)
        key, value = (x[table].reshape(*position.shape, -1) for x in (key, value))
    P = 128
    count = (position[..., None] == np.arange(P)).sum(axis=-2)
    assert count.max(initial=0) <= 1, "a token lies in two slots"
    assert position.max() < P
    place = np.where(position >= 0, position, P)[..., None]
    rows = []
    for x in (key, value):
        array = np.zeros((*x.shape[:3], P + 1, x.shape[-1]))
        np.put_along_axis(array, np.broadcast_to(place, x.shape), x, axis=3)
        rows.append(array[..., :P, :])
    return Held(count.astype(bool), *rows, np.asarray(cache.next_position))


def _floats(cache: Any, side: str) -> np.ndarray:
    rows, scale = getattr(cache, side), getattr(cache, f"{side}_scale")
    wide = np.asarray(rows).astype(np.float64)
    return wide if scale is None else wide * np.asarray(scale, np.float64)[..., None]


def model_of(case: Case, weights: dict[str, np.ndarray]) -> Decoder:
    if case.mesh is None:
        return reference.decoder(case.config, weights)
    data, tensor = case.mesh
    mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    arrays = join_weights(case.config, weights)
    return Decoder(
        case.config, {n: jax.device_put(a, NamedSharding(mesh, partition(n, mesh))) for n, a in arrays.items()}
    )
