"""Two levels under a predictor, simulated: pages first, and logits only for the tokens of the best pages.

The predictor's logits grow with the length of the text. One key per page, the mean of its tokens' predicted keys, would
take a page's worth fewer: its logit is the mean of the page's logits, by which this source ranks pages. All logits are
computed here, so it saves nothing; it shows what the tokens that are chosen that way are worth.

    python -m papers predictor accuracy --import papers.predictor.two_levels --sparsity 0.9 \\
        --select "quest,two_levels(pages=0.2)"
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax._src.checks import check_count
from kvjax._src.short_names import check_number
from kvjax.sources import Reading, Source, register


@register
def two_levels(*, pages: float = 0.2, page_size: int = 16, by: Literal["mean", "max"] = "mean") -> Source:
    """Use the predictor's logits in the best pages, and none in the others.

    Args:
        pages: the share of the pages seen that are opened, rounded up; more than the share of tokens to be read.
        page_size: tokens per page.
        by: what ranks pages: the "mean" of their logits, or the "max", which no bound from fewer keys can beat.

    Example:
        >>> import jax
        >>> import numpy as np
        >>> from papers.predictor.two_levels import two_levels
        >>> from kvjax.sources import Reading
        >>> given = np.array([[[[1.0, 2.0, 9.0, -9.0, 3.0, 3.0]]]], np.float32)
        >>> query, place = np.ones((1, 1, 1, 2), np.float32), np.arange(6)[None, None]
        >>> reading = Reading(query, np.array([[5]]), place, 1, predicted=given)
        >>> source = two_levels(pages=0.4, page_size=2)
        >>> found = jax.jit(lambda: source.importance((), reading))()
        >>> np.array(found)[0, 0, 0].tolist()
        [1.0, 2.0, -inf, -inf, 3.0, 3.0]
    """
    check_number("two_levels", "pages", pages, 0, 1, "a share of the pages in [0, 1]")
    check_count("two_levels: page_size", page_size, 1, "give a number of tokens, an int from 1")

    def importance(_: Any, reading: Reading) -> Float[Array, "B N T S"]:
        if reading.predicted is None:
            raise ValueError("'two_levels' reads the predictor's logits, but none were given; hand over predicted=.")
        logits = reading.predicted.astype(jnp.float32)
        B, N, T, S = logits.shape
        position = jnp.repeat(reading.position, N // reading.position.shape[1], axis=1)[:, :, None]
        seen = (position >= 0) & (position <= reading.query_position[:, None, :, None])
        short = ((0, 0),) * 3 + ((0, -S % page_size),)
        parts, there = (jnp.pad(x, short).reshape(B, N, T, -1, page_size) for x in (logits, seen))
        of_page = {
            "mean": jnp.sum(jnp.where(there, parts, 0), axis=-1) / jnp.maximum(jnp.sum(there, axis=-1), 1),
            "max": jnp.max(jnp.where(there, parts, -jnp.inf), axis=-1),
        }[by]
        some = jnp.any(there, axis=-1)
        rank = jnp.argsort(jnp.argsort(jnp.where(some, -of_page, jnp.inf), axis=-1), axis=-1)
        wanted = jnp.ceil(pages * jnp.sum(some, axis=-1, keepdims=True))
        opened = jnp.repeat(rank < wanted, page_size, axis=-1)[..., :S]
        return jnp.where(opened, logits, -jnp.inf)

    return Source("two_levels", importance, reads=frozenset({"predicted"}))
