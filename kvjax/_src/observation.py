"""The data of a block on its way from attention to eviction: Context -> Observation -> Evidence.

    Context       what a layer provides besides its queries, keys and values; the caller fills it in
    Observation   what a score may read of a block, after its tokens were inserted; `observe` fills it in
    Evidence      a policy's scores of a layer's slots; `evict` acts on it

What of an observation a score reads, it says in :class:`Needs`; nothing else is computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import ColumnStatistics, Order
from kernels_pallas.dispatch import Implementation
from kernels_pallas.order_tokens.reference import by_position
from kvjax._src.checks import fields_given
from kvjax._src.projection import OutputProjection
from kvjax._src.reconstruction import Reconstructed, Reconstruction


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


class Prediction(NamedTuple):
    """Hold what a small network predicts for a block in one layer; None for what it does not.

    ``query`` and ``key``, one per query head: importance is ``query . key / sqrt(dim)``, a logit. Later blocks read the
    keys again, so a policy stores them with the tokens; a selection, which stores none, gets those of all tokens,
    ``[B, N, S, dim]``. ``score``, one per KV head: the logarithm of the token's retention score, which
    :func:`kvjax.zap` stores. ``retention``, one per KV head: the logarithm of what each later token leaves of the
    token's score, which :func:`kvjax.trimkv` stores.
    """

    query: Float[Array, "B T N dim"] | None = None
    key: Float[Array, "B T N dim"] | Float[Array, "B N S dim"] | None = None
    score: Float[Array, "B T K"] | None = None
    retention: Float[Array, "B T K"] | None = None


@dataclasses.dataclass(frozen=True)
class Needs:
    """Declares the parts of an observation that a score or a link reads; nothing else is computed; ``a | b`` has both.

    Attributes:
        statistics: the column statistics (``kernels_pallas.STATISTICS`` and ``ONLY_REFERENCE``).
        window: the observation window of the "window_" statistics, in queries.
        errors: take the statistics of each query's squared change of output without a token, in place of its weight:
            of the heads' outputs ("value"), or of a group's part of the layer's output, behind W_O ("output").
        over: "max" takes the largest of a window's errors where a base score reads their mean.
        projections: parts of the layer's output projection (see :func:`kvjax.output_projection`).
        rotary: the rotary frequencies.
        queries: those of earlier blocks, which a link keeps as they were rotated, for keys that stay as they are.
        order: the slots in the order of their tokens. Without it :func:`kvjax.pooled` sorts them in every decode step.
        predicted: fields of :class:`Prediction`, which a small network fills in.
        reconstruction: the attention of tokens that are fed after the prompt and taken back.

    Example:
        >>> import kvjax
        >>> (kvjax.Needs(rotary=True) | kvjax.Needs(window=8)).window
        8
    """

    statistics: frozenset[str] = frozenset()
    window: int = 0
    errors: Literal["value", "output"] | None = None
    over: Literal["mean", "max"] = "mean"
    projections: frozenset[str] = frozenset()
    rotary: bool = False
    queries: bool = False
    order: bool = False
    predicted: frozenset[str] = frozenset()
    reconstruction: Reconstruction | None = None

    __repr__ = fields_given

    def __post_init__(self) -> None:
        for name in ("statistics", "projections", "predicted"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise ValueError(f"{name} is {given!r}; give a collection of names, such as {{{given!r}}}.")
            object.__setattr__(self, name, frozenset(given))

    @property
    def text_positions(self) -> bool:
        """Say whether keys must be rotated at their positions in the text, to compare with queries or for a loss."""
        return self.rotary or self.queries or (self.reconstruction is not None and self.reconstruction.loss is not None)

    @property
    def all_statistics(self) -> frozenset[str]:
        """Return the column statistics that are read of the text and of its repetition."""
        return self.statistics | (frozenset() if self.reconstruction is None else self.reconstruction.statistics)

    def __or__(self, other: Needs) -> Needs:
        windows = sorted({self.window, other.window} - {0})
        if len(windows) > 1:
            raise ValueError(f"observation windows of {windows} queries meet in one policy; expected one size.")
        return Needs(
            self.statistics | other.statistics,
            max(windows, default=0),
            self.errors if other.errors is None else other.errors,
            "max" if "max" in (self.over, other.over) else "mean",
            self.projections | other.projections,
            self.rotary or other.rotary,
            self.queries or other.queries,
            self.order or other.order,
            self.predicted | other.predicted,
            self.reconstruction or other.reconstruction,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Everything that a layer provides to attention, scores and eviction besides queries, keys and values.

    Attributes:
        layer: the layer's number, which some scores read; it picks the layer of a cache of several.
        sliding_window: how many positions a query sees; None where all layers see all. In a model with windows in some
            layers, give the others a number that no position reaches.
        frequency: the rotary angle per position of each pair of elements, one row for all or one per row. Needed where
            keys are turned (``positions`` of the cache), or where a score asks for it.
        projection: the parts of the layer's output projection that the policy reads (:func:`kvjax.output_projection`).
        predicted: what small networks predict for the block in this layer, for a policy that reads it.
        reconstructed: the part of the prompt that the block repeats; None for a block of the text.
        tokens: the ids of the block's tokens, for a policy that has the model repeat them (:func:`kvjax.kvzip`).
        gradient: for a block that repeats a part of the prompt, the derivative of a loss with respect to the layer's
            attention output, behind W_O, or its length for each token; see ``loss`` of :class:`kvjax.Reconstruction`.
        input_length: the length of what the layer's queries, keys and values are made of, for each token of the block,
            where a score divides by it; see ``input_length`` of :class:`kvjax.Reconstruction`.
        scale: factor of the logits, D ** -0.5 by default.
        soft_cap: a number c that the scaled logits x are bent to, c tanh(x / c); None for no cap.
        sink_logits: a logit per query head that takes a share of its attention and has no value (gpt-oss); the tokens'
            weights, in the output and in all statistics, are what it leaves them.
        compressed: whether the context was compressed before this block, as in decode or when a question follows; by
            default True for a block of one token.
        filled: a promise that slots from this one on are free, so that attention skips them.
        excess: a promise that no head will hold more than ``budget + excess`` tokens, for which there is room; see
            :func:`kvjax.evict`. With 1, a policy that reads the tokens' order continues that of the step before.
        slots: the most slots per head of any layer, where this one may have fewer for its window: a row loses nothing,
            and its observation window goes on, only if its budget is above these; see :func:`kvjax.evict`.
        implementation: of attention, and of an eviction by CAOTE; see :func:`kernels_pallas.cache_attention` and
            :func:`kernels_pallas.caote_topk`. What a link observes has that of other operations: "auto" or "reference".

    Example:
        >>> import kvjax
        >>> kvjax.Context(layer=2, sliding_window=4096).layer
        2
    """

    layer: int | Int[Array, ""] | None = None
    sliding_window: int | Int[Array, ""] | None = None
    frequency: Float[Array, "rows half"] | None = None
    projection: OutputProjection | None = None
    predicted: Prediction | None = None
    reconstructed: Reconstructed | None = None
    tokens: Int[Array, "B T"] | None = None
    gradient: Float[Array, "B T _"] | None = None
    input_length: Float[Array, "B T"] | None = None
    sink_logits: Float[Array, "N"] | None = None
    scale: float | None = _static(None)
    soft_cap: float | None = _static(None)
    compressed: bool | None = _static(None)
    filled: int | None = _static(None)
    excess: int | None = _static(None)
    slots: int | None = _static(None)
    implementation: Implementation = _static("auto")

    __repr__ = fields_given

    def factor(self, head_dim: int) -> float:
        """Return the factor of the logits of heads of a dimension."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def rotary(self, who: str) -> Float[Array, "rows half"]:
        """Return the frequencies, which somebody cannot do without."""
        if self.frequency is None:
            raise ValueError(f"{who}, but no rotary frequencies were given; hand over Context(frequency=...).")
        return self.frequency

    @property
    def end(self) -> Int[Array, "B"] | None:
        """Return the position from which on tokens are taken back; None where none are."""
        return None if self.reconstructed is None else self.reconstructed.end


class Observation(NamedTuple):
    """One block in one layer, as a score sees it after its T tokens were inserted.

    ``columns`` are the block's attention statistics that the policy needs, as ``[B, K, G, S]`` (a group's own as
    ``[B, K, 1, S]``, all weights as ``[B, K, G, T, S]``); ``query`` and ``key`` are rotated; ``query_position`` is -1
    for padding; ``position`` is -1 where a slot is free; ``budget`` has one number per row. ``protected`` are the slots
    that stay whatever they score. ``head`` has the numbers of these KV heads (None for all of the layer). ``context``
    is what the layer provides. ``order`` is that of the slots by position, where a link needs it (:meth:`ordered`).
    ``left`` is the share of the queries' attention that a model's sinks leave to the tokens, in the mean; None without
    sinks, or without a statistic that says so.
    """

    columns: ColumnStatistics
    query: Float[Array, "B T N D"]
    query_position: Int[Array, "B T"]
    key: Float[Array, "B K S D"]
    value: Float[Array, "B K S D"]
    position: Int[Array, "B K S"]
    next_position: Int[Array, "B"]
    budget: Int[Array, "B"]
    protected: Bool[Array, "B K S"] = None  # type: ignore[assignment]
    head: Int[Array, "K"] | None = None
    context: Context = Context(layer=0)
    order: Order | None = None
    left: Float[Array, "B K G 1"] | None = None

    @property
    def ordered(self) -> Order:
        """Return each head's slots in the order of their tokens, and the tokens' ranks."""
        return by_position(self.position) if self.order is None else self.order

    @property
    def live(self) -> Array:
        """Return a mask of the slots that hold a token, bool ``[B, K, S]``."""
        return self.position >= 0

    @property
    def live_key(self) -> Array:
        """Return the keys in float32, with 0 in free slots, which may hold what was there before."""
        return jnp.where(self.live[..., None], self.key.astype(jnp.float32), 0)

    @property
    def live_value(self) -> Array:
        """Return the values in the same way."""
        return jnp.where(self.live[..., None], self.value.astype(jnp.float32), 0)

    @property
    def layer(self) -> int | Int[Array, ""]:
        """Return the layer's number, 0 where none was given."""
        return 0 if self.context.layer is None else self.context.layer

    @property
    def compressed(self) -> bool:
        """Tell whether the context was compressed before this block."""
        known = self.context.compressed
        return self.query.shape[1] == 1 if known is None else known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Scores that are not computed yet: CAOTE's errors under these weights, for one operation that scores and evicts.

    A chain returns them if the last link that changes its scores is CAOTE with ``target="value"``. Rows need not
    sum to 1: each is divided by its sum over the live slots. ``fast``, ``norm`` and ``group`` are those of
    :func:`kvjax.score`.
    """

    weights: Float[Array, "B K _ S"]
    fast: bool = _static(False)
    norm: Literal[1, 2, "inf"] = _static(2)
    group: Literal["exact", "mean"] = _static("exact")

    def __post_init__(self):
        if self.norm not in (1, 2, "inf") or self.group not in ("exact", "mean"):
            given = f"norm is {self.norm!r} and group {self.group!r}"
            raise ValueError(f"{given}; expected 1, 2 or 'inf' and 'exact' or 'mean'.")

    @property
    def kind(self) -> dict[str, Any]:
        """Return how the errors are measured, as arguments of an operation."""
        return dict(fast=self.fast, norm=self.norm, group=self.group)
