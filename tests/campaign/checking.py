"""One case: what the library does, held against the reference row by row."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import models
from kvjax import PagedCache, SplitCache
from models import Decoder
from models.parameters import partition
from tests.campaign.cases import Case
from tests.models import reference

LOGITS = 2e-3  # what float32 may lose of logits of a few units; rows of attention that see other tokens differ by 0.1
ROWS = 1e-3  # of keys and values
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


class _Row(NamedTuple):
    """What the library gave for one row. Kept positions are bool [L, K, P]."""

    tokens: list[int] | None
    logits: np.ndarray | None  # [P, V] or, of the last token, [V]
    kept: np.ndarray
    key: np.ndarray  # [L, K, P, D], where kept
    value: np.ndarray
    next_position: int
    history: list[np.ndarray]


def check(case: Case) -> Outcome:
    """Runs a case."""
    weights = reference.parameters(case.config, case.seed)
    try:
        rows = _library(case, weights)
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    worst = Outcome("ok")
    order = ("ok", "undecided", "blurred", "tie", "differs")
    for number, row in enumerate(rows):
        outcome = _check_row(case, weights, number, row)
        worst = max(worst, outcome, key=lambda o: order.index(o.kind))
    return worst


def _check_row(case: Case, weights: dict[str, np.ndarray], number: int, row: _Row) -> Outcome:
    prompt = case.prompts()[number, : case.lengths[number]]
    generates = case.entry in ("generate", "stream")
    settings: dict[str, Any] = dict(
        policy=None if case.policy == "full" else reference.policy(case.policy),
        budget=None if case.policy == "full" else case.budget,
        block=case.block,
        when=case.when,
        question=0 if case.question is None else case.question[number],
        new_tokens=case.new if generates else 0,
        evict_every=case.evict_every,
        end=case.end,
        dtypes=case.dtypes,
    )
    if case.base == "butler":
        butler = reference.butler(case.config, case.seed)
        arrays = {name: np.asarray(array, np.float64) for name, array in nnx.to_pure_dict(nnx.state(butler)).items()}
        settings["butler"] = arrays, butler.config.rope_theta
    if case.base == "zap":
        state = nnx.to_pure_dict(nnx.state(reference.scorer(case.config, case.seed)))
        settings["scorer"] = {name: np.asarray(array, np.float64) for name, array in state.items()}
    # As it is; then with near choices as the library seems to have made them: what it holds afterwards, or at the end,
    # stayed; then, one after the other and together, with near choices the other way.
    ways: list[tuple[frozenset[int], list[np.ndarray]]] = [(frozenset(), []), (frozenset(), [*row.history, row.kept])]
    first, wide, tries = "", False, 0
    while ways and tries < TRIES:
        tries += 1
        flips, held = ways.pop(0)
        known = tuple(np.where(row.kept[..., None], x, np.nan) for x in (row.key, row.value)) if held else None
        run = reference.run(weights, case.config, prompt, flips=flips, held=held, known=known, **settings)
        difference = _difference(row, run)
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


def _difference(row: _Row, run: reference.Run) -> str:
    """In words, "" where there is none."""
    if row.tokens is not None and row.tokens != run.tokens:
        return f"tokens {row.tokens}, expected {run.tokens}"
    P = run.kept.shape[-1]
    if row.next_position != P:
        return f"next position {row.next_position}, expected {P}"
    for step, (kept, expected) in enumerate(zip(row.history, run.history, strict=False)):
        if where := _wrong(kept, expected):
            return f"behind block or step {step}: {where}"
    if where := _wrong(row.kept, run.kept):
        return where
    for what, got, expected in (("keys", row.key, run.key), ("values", row.value, run.value)):
        error = np.where(run.kept[..., None], abs(got[..., :P, :] - expected), 0).max()
        if not error < ROWS * max(1, abs(expected).max()):
            return f"{what} off by {error:.1e}"
    if row.logits is not None:
        expected = run.logits if row.logits.ndim == 2 else run.logits[-1]
        error = abs(row.logits - expected).max()
        if not error < LOGITS * max(1, abs(expected).max()):
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


def _library(case: Case, weights: dict[str, np.ndarray]) -> list[_Row]:
    model, B = _model(case, weights), len(case.lengths)
    lengths = np.array(case.lengths)
    settings: dict[str, Any] = dict(
        policy=case.policy,
        budget=None if case.policy == "full" else case.budget,
        block=case.block,
        when=case.when,
        question=None if case.question is None else np.array(case.question),
        page_size=case.page_size,
        butler=reference.butler(case.config, case.seed) if case.base == "butler" else None,
        scorer=reference.scorer(case.config, case.seed) if case.base == "zap" else None,
        cache_dtype=case.cache_dtype,
    )
    tokens: list[list[int]] | list[None] = [None] * B
    logits: Any = [None] * B
    blocks: list[_Held] = []
    steps: list[_Held] = []
    if case.entry in ("prefill", "prefill all"):
        outputs = "all" if case.entry == "prefill all" else "last"
        cache, logits = models.prefill(model, case.prompts(), lengths, outputs=outputs, **settings)
        logits = np.asarray(logits, np.float64)
        if outputs == "all":
            logits = [logits[row, :n] for row, n in enumerate(lengths)]
        held = _held(cache)
    else:
        settings |= dict(lengths=lengths, max_new_tokens=case.new, evict_every=case.evict_every, end=case.end)
        if case.entry == "generate":
            out = models.generate(model, case.prompts(), **settings)
            host, counts = np.asarray(out.tokens), np.asarray(out.lengths)
            tokens = [host[row, :n].tolist() for row, n in enumerate(counts)]
            assert all((host[row, n:] == case.config.pad).all() for row, n in enumerate(counts)), (
                "tokens behind the end"
            )
            held = _held(out.cache)
        else:
            tokens, held = [[] for _ in range(B)], None
            for step, cache in models.stream(
                model, case.prompts(), on_cache=lambda c: blocks.append(_held(c)), **settings
            ):
                held = _held(cache)
                steps.append(held)
                for row, token in enumerate(step.tolist()):
                    if token >= 0:
                        tokens[row].append(token)  # type: ignore[union-attr]
    questions = np.zeros(B, int) if case.question is None else np.array(case.question)
    counts = -(-(lengths - questions) // case.block)  # of each row's blocks before its question, which end together
    rows = []
    for row in range(B):
        history = blocks[counts.max() - counts[row] : counts.max()] + steps[1:]
        kept, key, value, following = held  # type: ignore[misc]
        rows.append(
            _Row(
                tokens[row], logits[row], kept[:, row], key[:, row], value[:, row], int(following[row]),
                [then[0][:, row] for then in history],
            )
        )  # fmt: skip
    return rows


_Held = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _held(cache: Any) -> _Held:
    """Which positions each head holds, [L, B, K, P], their keys and values, and the next position of each row."""
    if isinstance(cache, SplitCache):
        layers = [cache.layer(layer) for layer in range(cache.heads_shape[0])]
        cache = dataclasses.replace(jax.tree.map(lambda *x: np.stack(x), *layers), next_position=cache.next_position)
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
    return count.astype(bool), *rows, np.asarray(cache.next_position)  # type: ignore[return-value]


def _floats(cache: Any, side: str) -> np.ndarray:
    rows, scale = getattr(cache, side), getattr(cache, f"{side}_scale")
    wide = np.asarray(rows).astype(np.float64)
    return wide if scale is None else wide * np.asarray(scale, np.float64)[..., None]


def _model(case: Case, weights: dict[str, np.ndarray]) -> Decoder:
    if case.mesh is None:
        return reference.decoder(case.config, weights)
    data, tensor = case.mesh
    mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    return Decoder(
        case.config, {n: jax.device_put(a, NamedSharding(mesh, partition(n, mesh))) for n, a in weights.items()}
    )
