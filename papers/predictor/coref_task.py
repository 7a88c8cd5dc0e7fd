"""The co-reference task: a place is named, three distractions follow, and the name has to be repeated.

The template is that of arXiv 2503.07518 (section 4.2 and appendix A.1): an introduction that ends with "The place is:"
and an invented name, a philosophical reflection, a dish, a short calculation, and a sentence that leads back to the
name. The pools in `coref_pools.json` were written for this project. Three fifths of each pool are for training, the
rest for tests: no name, introduction or distraction of a test sample was trained on. A seed decides everything.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from evals import tasks

POOLS_FILE = Path(__file__).with_name("coref_pools.json")

Split = Literal["train", "test"]


class Pools(NamedTuple):
    """The parts that samples of one split are made of."""

    names: tuple[str, ...]
    places: tuple[tuple[str, str], ...]  # introduction and the sentence that leads back
    reflections: tuple[str, ...]
    dishes: tuple[str, ...]
    problems: tuple[str, ...]


class Story(NamedTuple):
    """The parts of one sample in reading order; the name follows the first part and the last."""

    introduction: str
    name: str
    distractions: tuple[str, str, str]
    tie_back: str


class CorefSample(NamedTuple):
    """One place to name again."""

    prompt: str
    name: str
    tokens: list[int]  # of the prompt, with BOS
    answer_tokens: list[int]  # of a space and the name


@functools.cache
def pools(split: Split) -> Pools:
    """Return the pools of one split; the two splits share no entry."""
    raw = json.loads(POOLS_FILE.read_text(encoding="utf-8"))
    places = tuple((place["introduction"], place["tie_back"]) for place in raw["places"][split])
    names, reflections, dishes, problems = (
        tuple(raw[pool][split]) for pool in ("names", "reflections", "dishes", "problems")
    )
    return Pools(names, places, reflections, dishes, problems)


def story(rng: np.random.Generator, split: Split) -> Story:
    """Draw the parts of one sample, each from its pool."""
    drawn = pools(split)
    name, reflection, dish, problem = (
        tasks.pick(rng, pool) for pool in (drawn.names, drawn.reflections, drawn.dishes, drawn.problems)
    )
    introduction, tie_back = drawn.places[int(rng.integers(len(drawn.places)))]
    return Story(introduction, name, (reflection, dish, problem), tie_back)


def sample(seed: int, tokenizer: Any) -> CorefSample:
    """Make the test sample of a seed: about 170 words, at whose end the introduction's place has to be named again.

    The tokenizer has ``encode(text)``, which gives ids, or an object with ``.ids``, with BOS in front.
    """
    parts = story(np.random.default_rng(seed), "test")
    prompt = " ".join([f"{parts.introduction} {parts.name}.", *parts.distractions, f"{parts.tie_back}:"])
    tokens = tasks.ids(tokenizer, prompt)
    return CorefSample(prompt, parts.name, tokens, tasks.ids(tokenizer, f"{prompt} {parts.name}")[len(tokens) :])
