"""Selections by their short names, and the flags of commands that measure them.

A selection is given by its short name:

- a source of importance (:mod:`kvjax.sources`, such as quest): nothing is lost, the next query may read what this
  one left out;
- an eviction policy (:func:`kvjax.parse`), as permanent selection, token by token: the library's own decode steps on a
  cache of one layer. Query i reads the tokens kept after query i - 1, and its own; then the worst token is evicted. The
  first ``sinks`` tokens are protected and added to the budget, so that no policy holds less than a source may read.
  A policy that protects more than an early query's budget (a window of 32 in query 20) keeps its newest tokens there;
- "oracle_eviction": each query reads the best of the remaining tokens by its own true logits, and evicts the others;
- "full".

A name that is both a source and a policy, such as streaming, is the source. "snapkv" alone is
:func:`rolling_snapkv`, SnapKV as arXiv 2503.07518 reads it. With arguments, ``snapkv(window=32)``, it is the
library's policy: in a decode step its window is one query, and the window's tokens are kept.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvjax
import models
from evals import command_line
from kvjax import sources
from kvjax._src.checks import check_count
from kvjax._src.selection import share_of_tokens
from kvjax._src.short_names import called, makers, registered, written
from kvjax._src.transforms import check_kernel, pooled
from models import commands
from models.commands.shared_flags import add_shared_flags
from models.networks import Network, wanted_by

Heads = Literal["query", "group"]
ORACLE_EVICTION = "oracle_eviction"
_MADE = makers("selection", None, kvjax.Policy)


@functools.partial(registered, _MADE)
def rolling_snapkv(*, window: int = 32, kernel: int = 7, pooling: Literal["avg", "max"] = "max") -> kvjax.Policy:
    """Make SnapKV as arXiv 2503.07518 simulates it: it scores by the mean attention of the last queries, across steps.

    The window's own tokens are scored and pooled like all others, and are not protected. A token within the window has
    no attention from queries before it.

    Args:
        window: the number of queries that are remembered per slot and query head.
        kernel: the width of the pooling over neighbours in position order among the live tokens, an odd number.

    Raises:
        ValueError: the window is below 1, or the kernel is even.
    """
    check_count("rolling_snapkv: window", window, 1, "give a number of queries, an int from 1")
    check_kernel("rolling_snapkv", kernel)

    def init(B: int, K: int, G: int, S: int, D: int) -> Array:
        return jnp.zeros((B, K, S, G, window), jnp.float32)

    def update(_: Array, state: Array, o: kvjax.Observation) -> tuple[Array, Array]:
        now = (o.next_position - 1) % window  # [B]
        here = jnp.arange(window) == now[:, None, None, None, None]
        state = jnp.where(here, jnp.moveaxis(o.columns.last, 2, 3)[..., None], state)
        queries = jnp.minimum(o.next_position, window)[:, None, None, None]
        return pooled(jnp.moveaxis(jnp.sum(state, axis=-1), 3, 2) / queries, o, kernel, pooling), state

    name = written(rolling_snapkv, window=window, kernel=kernel, pooling=pooling)
    return kvjax.Policy(name, init, update, kvjax.Needs(frozenset({"last"}), order=True), base=True, nonnegative=True)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A method to simulate: a source that selects, or a policy that evicts.

    ``name`` is the resolved name. "full" and "oracle_eviction" have neither source nor policy.
    """

    name: str
    source: sources.Source | None = None
    policy: kvjax.Policy | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def wanted(self) -> frozenset[str]:
        """Return what the method reads of a network; see :func:`models.networks.wanted_by`."""
        return wanted_by(self.policy, self.source)


@functools.cache
def parse_selection(name: str, *, page_size: int = 16) -> Selection:
    """Parse the short name of a selection; ``page_size`` is that of "quest" without arguments.

    Raises:
        ValueError: the name or an argument is unknown, or the policy cannot be run layer by layer.
    """
    name = name.strip()
    if name in ("full", ORACLE_EVICTION):
        return Selection(name)
    if name == "quest":
        name = f"quest(page_size={page_size})"
    if name == "snapkv":
        name = "rolling_snapkv"
    first = name.split("(")[0].strip()
    if not {"+", "@"} & set(name) and sources.SOURCES.find(first) is not None:
        try:
            source = sources.parse_source(name)
            return Selection(source.name, source=source)
        except ValueError:
            with contextlib.suppress(ValueError):  # a policy of the same name, such as streaming(sinks=8)
                return Selection(name, policy=kvjax.parse(name))
            raise
    if first in _MADE:
        try:
            tree = ast.parse(name, mode="eval").body
        except SyntaxError:
            raise ValueError(f"the selection {name!r} is malformed; write it like '{first}(window=16)'.") from None
        policy = called(tree, _MADE, name, f"write it like '{first}(window=16)'")
    else:
        try:
            policy = kvjax.parse(name)
        except ValueError as error:
            others = ", ".join(sorted({"full", ORACLE_EVICTION, *_MADE, *sources.SOURCES.names()}))
            raise ValueError(f"{str(error).rstrip('.')}; other selections are {others}.") from None
    if not policy.allocation.one_layer:
        raise ValueError(
            f"{policy.name!r} lets layers compete, but here each layer is run by itself, token by token; write "
            f"{policy.chain_name}@uniform."
        )
    return Selection(policy.name, policy=policy)


def parse_selections(text: str, *, page_size: int = 16) -> list[Selection]:
    """Parse the selections of a command line, several by comma, each once; see :func:`parse_selection`."""
    names = commands.listed("selection", text, "--select oracle,quest,h2o")
    return list(dict.fromkeys(parse_selection(name, page_size=page_size) for name in names))


def kept_tokens(length: int, sparsity: float) -> Int[np.ndarray, "T"]:
    """Return ``ceil((i + 1)(1 - sparsity))`` for each query i, with the sparsity rounded to four digits.

    Example:
        >>> from evals.selections import kept_tokens
        >>> # in floats (1 - 0.7) * 10 is 3.0000000000000004
        >>> kept_tokens(10, 0.7).tolist()
        [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    """
    so_far = np.arange(1, length + 1, dtype=np.int32)
    return np.asarray(share_of_tokens(1 - sparsity, so_far), np.int32)


def parse_sparsities(text: str) -> list[float]:
    """Parse sparsities from a command line, several by comma; "..." continues with the step of the two before it.

    Example:
        >>> from evals.selections import parse_sparsities
        >>> parse_sparsities("0,0.1,...,0.4")
        [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    how = "give numbers in [0, 1), such as 0.3,0.5 or 0,0.1,...,0.7"
    found: list[Decimal] = []
    going_on = False
    for part in commands.split_list(text):
        if part in ("...", "\N{HORIZONTAL ELLIPSIS}"):
            if len(found) < 2 or going_on or found[-1] == found[-2]:
                raise ValueError(f"the sparsities {text!r}: '...' follows two different numbers, its step; {how}.")
            going_on = True
            continue
        try:
            value = Decimal(part)
        except InvalidOperation:
            value = Decimal(-1)
        if not value.is_finite() or not 0 <= value < 1:
            raise ValueError(f"the sparsity {part!r} is not the share of tokens that are not read; {how}.")
        if going_on:
            step, last = found[-1] - found[-2], found[-1]
            count = (value - last) / step
            if count <= 0 or count != int(count):
                raise ValueError(f"the sparsities {text!r}: {value} is not reached from {last} by {step}; {how}.")
            found += [last + step * i for i in range(1, int(count) + 1)]
            going_on = False
        else:
            found.append(value)
    if going_on or not found:
        raise ValueError(f"the sparsities {text!r} {'do not end' if going_on else 'are empty'}; {how}.")
    return list(dict.fromkeys(float(value) for value in found))


def add_flags(flags: argparse.ArgumentParser, *, select: str | None, sparsity: str, batch: int) -> None:
    """Add the flags of every command that measures selections."""
    flags.add_argument(
        "--select", default=select, help="sources of importance, eviction policies, oracle_eviction, full; by comma"
    )
    flags.add_argument(
        "--sparsity", default=sparsity, help="shares of the tokens that are not read, such as 0.5 or 0,0.1,...,0.7"
    )
    flags.add_argument(
        "--heads",
        choices=get_args(Heads),
        default="query",
        help="under a simulated policy, tokens are kept per query head, as published, or per group of query heads",
    )
    add_shared_flags(flags, "networks", "sinks", "model", "batch", "dtype", "json", "plot", batch=batch)


def load(flags: argparse.Namespace, selections: Sequence[Selection]) -> tuple[models.Decoder, Any, tuple[Network, ...]]:
    """Load the model of a command line, its tokenizer, and the networks that --networks names or selections read."""
    model, tokenizer = command_line.load(flags)
    return model, tokenizer, command_line.networks_for(flags, selections, model)
