"""The choice of the next token: greedy, or by sampling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax._src.checks import check_count, check_types, shown
from kvjax.schedule import HostOrDevice


class Sampling(NamedTuple):
    """A choice of tokens, see :class:`models.Options`: without a temperature the most likely one, else drawn.

    A compiled program fits any numbers; None is for what changes nothing, and no program computes that.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, **given: Any) -> Sampling:
        """Make a choice from fields, whose types are checked: a temperature of 0, for example, is none."""
        checked = check_types(given, get_type_hints(cls))
        return cls(**{name: None if value == OFF.get(name) else value for name, value in checked.items()})

    @property
    def greedy(self) -> bool:
        """Tell whether it takes the largest of the model's logits."""
        return self.temperature is None and self.repetition_penalty is None


OFF = {"temperature": 0, "top_p": 1, "repetition_penalty": 1}  # what changes nothing


class Draws(NamedTuple):
    """Holds what one choice of a token leaves the next: a random key, and which tokens each row's text has so far.

    As an argument, ``seen`` says it of the text that a cache has seen, which only a ``repetition_penalty`` reads.

    Example:
        >>> import models, numpy
        >>> model = models.Decoder.tiny()
        >>> cache, _ = models.prefill(model, [range(40)])
        >>> seen = numpy.arange(model.config.vocab_size) < 40
        >>> out = models.generate(
        ...     model, [[7, 3]], cache=cache, key=models.Draws(seen=seen[None]),
        ...     repetition_penalty=1.2, max_new_tokens=4
        ... )
        >>> out.tokens.shape
        (1, 4)
    """

    key: Array | None = None
    seen: Bool[HostOrDevice, "B V"] | None = None


def sample(logits: Float[Array, "B V"], draws: Draws, sampling: Sampling) -> tuple[Int[Array, "B"], Draws]:
    """Choose the next token of each row, and return what the next choice needs."""
    key, seen = draws
    if sampling.repetition_penalty is not None:
        assert seen is not None
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature is None:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        assert key is not None
        key, draw = jax.random.split(key)
        token = _drawn(logits, draw, sampling)
    if seen is not None:
        seen = jnp.asarray(seen).at[jnp.arange(len(token)), token].set(True)
    return token, Draws(key, seen)


def _drawn(logits: Float[Array, "B V"], key: Array, sampling: Sampling) -> Int[Array, "B"]:
    """Draw the next token of each row."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    tiny = float(jnp.finfo(logits.dtype).tiny)
    temperature = jnp.clip(sampling.temperature, tiny, 1 / tiny)  # XLA may multiply by 1 / temperature
    # The largest logit is subtracted first: logits / temperature may overflow, and inf - inf is not a number.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(logits == largest, 0, (logits - largest) / temperature)
    if sampling.top_k is not None or sampling.top_p is not None:
        # Ranked by the unscaled logits, ties by the lower id: at a high temperature, different logits become equal.
        rank = jnp.argsort(jnp.argsort(logits, axis=-1, descending=True), axis=-1)
    if sampling.top_k is not None:
        scaled = jnp.where(rank < sampling.top_k, scaled, -jnp.inf)
    if sampling.top_p is not None:
        descending = jnp.sort(jax.nn.softmax(scaled, axis=-1), axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        needed = jnp.sum(before < sampling.top_p, axis=-1, keepdims=True)
        scaled = jnp.where(rank < jnp.maximum(needed, 1), scaled, -jnp.inf)
    if sampling.min_p is not None:
        scaled = jnp.where(scaled >= jnp.log(sampling.min_p), scaled, -jnp.inf)  # the most likely token's is 0
    return jax.random.categorical(key, scaled, axis=-1).astype(jnp.int32)


class Repetition:
    """Finds an answer that says the same again and again, in at most 256 tokens; 32 last ones must repeat others."""

    def __init__(self) -> None:
        self.least, self.last = np.maximum(2 * np.arange(1, 257), 32), np.full(256, -1)
        self.same = np.zeros(256, int)  # for each distance, the number of last tokens that equal those before

    def add(self, token: int) -> bool:
        """Tell whether the last tokens say the same three times or more, with a further token."""
        self.same = np.where(self.last == token, self.same + 1, 0)
        self.last = np.concatenate([[token], self.last[:-1]])
        return bool((self.same >= self.least).any())


def check_end(end: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(end, Iterable):
        raise ValueError(f"end is {shown(end)}; give a tuple of token ids, () for none.")
    return tuple(check_count("a token of end", token, 0, "give a tuple of token ids, () for none") for token in end)


def check_sampling(key: Array | None, **given: Any) -> Sampling:
    """Return how tokens are drawn, from fields of Sampling, after a check of them and of the key."""
    sampling = Sampling.of(**given)
    if sampling != Sampling() or key is not None:
        _check_draws(sampling, key)
    return sampling


def _check_draws(sampling: Sampling, key: Array | None) -> None:
    if sampling.temperature is not None and sampling.temperature < 0:
        raise ValueError(f"temperature is {sampling.temperature}; give 0 for the most likely token, or more to draw.")
    if sampling.top_k is not None:
        check_count("top_k", sampling.top_k, 1, "draw from at least 1 token")
    for name, share in (("top_p", sampling.top_p), ("min_p", sampling.min_p)):
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{name} is {share}; give a share in (0, 1].")
    if sampling.repetition_penalty is not None and sampling.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty is {sampling.repetition_penalty}; give a factor above 0, or 1 for none.")
    if key is not None and not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        old = " of the old kind (jax.random.PRNGKey)" if getattr(key, "dtype", None) == np.uint32 else ""
        raise ValueError(f"key is a {type(key).__name__}{old}; give a random key, such as jax.random.key(0).")
    if sampling.temperature is not None and key is None:
        raise ValueError("temperature is above 0 but no key was given; pass key=jax.random.key(0), for example.")
