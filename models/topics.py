"""Episodes of a long conversation or text, each of which gets a cache of its own (EpiCache, arXiv 2509.17396)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax._src.checks import check_count
from kvjax.schedule import power_of_two
from models.decoder import Decoder
from models.tokenizer import Tokenizer


class Episode(NamedTuple):
    """A topic of a text: the part that stands for it, and the mean embedding of all its parts, of length 1."""

    text: str
    centre: Float[np.ndarray, "E"]


def episodes(
    model: Decoder, tokenizer: Tokenizer, parts: Sequence[str], count: int = 4, *, seed: int = 0
) -> list[Episode]:
    """Group the parts of a conversation by topic, to read it once for each topic under ``kvjax.prompted``.

    A part, such as a few turns, is embedded as the mean of its tokens' embeddings, as the authors' code offers; k-means
    groups them (section 3.1). The part nearest to a group's centre is the text whose attention decides what the
    episode's cache keeps, and a question goes to the cache whose centre is nearest (:func:`episode_of`). So ``count``
    caches of a budget are held, of which one answers; each reads the whole text.

    Args:
        parts: pieces of the text, in any order.
        count: how many episodes; fewer are returned if there are fewer groups.
        seed: of k-means' first centres.

    Raises:
        ValueError: there is no part, or one has no tokens.

    Example:
        >>> import models
        >>> model, tokenizer = models.load("retriever")
        >>> turns = ["Rye bread.", "Bread and rolls.", "The ferry was late."]
        >>> len(models.episodes(model, tokenizer, turns, 2))
        2
    """
    from scipy.cluster.vq import kmeans2  # takes a tenth of a second to import

    count = check_count("count", count, 1, "give the number of episodes, an int from 1")
    if not parts:
        raise ValueError("no part of a text was given; give its pieces, such as a few turns of a conversation each.")
    embedded = np.stack([_embedded(model, tokenizer, part) for part in parts])
    _, groups = kmeans2(embedded, min(count, len(parts)), minit="++", rng=np.random.default_rng(seed))
    found = []
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        centre = _of_length_one(embedded[own].mean(axis=0))
        found.append(Episode(parts[own[np.argmax(embedded[own] @ centre)]], centre))
    return found


def episode_of(model: Decoder, tokenizer: Tokenizer, found: Sequence[Episode], question: str) -> int:
    """Return the number of the episode that a question is nearest to, by the cosine of their embeddings.

    Example:
        >>> import models
        >>> model, tokenizer = models.load("retriever")
        >>> turns = ["Rye bread.", "The ferry was late."]
        >>> found = models.episodes(model, tokenizer, turns, 2)
        >>> question = "When did the ferry leave?"
        >>> found[models.episode_of(model, tokenizer, found, question)].text
        'The ferry was late.'
    """
    centres = np.stack([episode.centre for episode in found])
    return int(np.argmax(centres @ _embedded(model, tokenizer, question)))


def _embedded(model: Decoder, tokenizer: Tokenizer, text: str) -> Float[np.ndarray, "E"]:
    tokens: Int[np.ndarray, "T"] = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    if not len(tokens):
        raise ValueError(f"{text!r} has no tokens; give words.")
    padded = np.resize(tokens, power_of_two(len(tokens)))  # few shapes, so few programs
    rows = np.asarray(model.embedding[...][padded], np.float64)[: len(tokens)]
    return _of_length_one(rows.mean(axis=0))


def _of_length_one(x: Float[np.ndarray, "E"]) -> Float[np.ndarray, "E"]:
    return x / np.linalg.norm(x)
