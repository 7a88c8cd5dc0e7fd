"""Plain English to hide facts in: sentences that were written for this project, the same wherever they are read.

A line of `haystack.txt` beside this file is a sentence, or several that differ in a few words: ``{salt|smoke}`` stands
for either word. A text takes one sentence of a line, so that nothing in it comes twice. Every fourth line is for
training; the others are never trained on. No sentence says what a question asks for.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from kvjax._src.checks import check_names

HAYSTACK_FILE = Path(__file__).with_name("haystack.txt")
Part = Literal["train", "test"]

# First and second words of the keys. All of them are single tokens of the retriever's tokenizer.
ADJECTIVES = """amber ancient arctic autumn azure bitter bold brave bright broken bronze calm cedar clever cobalt
copper coral cosmic crimson crooked crystal curious dapper daring distant dusty eager early ebony electric elegant
emerald fabled faint fancy fierce floral foggy frosty frozen gentle giant gilded glass golden grand granite hazel
hidden hollow humble icy indigo iron ivory jade jolly lavish lazy linen little lively lonely lucky lunar magic maple
marble mellow misty modest mossy narrow noble olive opal orange orchid pale patient pearl plain polar proud purple
quiet rapid rare royal ruby rustic sacred sandy scarlet secret shady silent silver simple sleepy smooth snowy solar
solemn spicy stormy sunny swift tender timid topaz tranquil velvet violet vivid wandering warm wild windy wise
wooden young""".split()

NOUNS = """acorn anchor anvil apple arrow badger banner barrel basket beacon beaver bell blossom bottle boulder
bridge brook bucket button cabin camel candle canyon carpet castle cellar cherry chimney circle citadel cliff cloak
clover comet compass cottage cradle crane cricket crown dagger daisy desert dolphin dragon drum eagle ember engine
falcon feather fern fiddle flute forest fountain fox garden gate glacier goblet hammer harbor harp hawk helmet heron
hill island jacket jaguar kettle kitten ladder lagoon lantern leaf lemon leopard lily lion lizard locket lynx magnet
mantle marsh meadow medal melon mill mirror monkey moth mountain needle oak oasis orchard otter owl oyster paddle
palace panda panther parrot pebble pepper pigeon pillar pilot pine pirate planet plum pond poppy prairie puzzle
quarry rabbit raven reef ribbon river robin rocket rose saddle sailor salmon scarf shadow shell ship spider sparrow
spruce stable statue stone stream summit sword tailor temple thistle thunder tiger timber torch tower trumpet tulip
tunnel turtle valley violin walnut walrus whale willow window wizard wolf zebra""".split()

ATTRIBUTES = "code weight price height number score".split()


def draw(rng: np.random.Generator, part: Part = "test") -> Iterator[str]:
    """Draw sentences without end; no line of the file comes again until all lines of the part have come."""
    lines = _lines(part)
    while True:
        for line in rng.permutation(len(lines)):
            yield lines[line][int(rng.integers(len(lines[line])))]


def sentences(part: Part = "test") -> tuple[str, ...]:
    """Return all sentences of a part, in the order of the file."""
    return tuple(itertools.chain.from_iterable(_lines(part)))


def text(part: Part = "test") -> str:
    """Return the first sentence of each line of a part as one text."""
    return " ".join(line[0] for line in _lines(part))


@functools.cache
def digest() -> str:
    """Return a digest of the file (SHA-256, 16 digits), which is recorded with every figure that may depend on it."""
    return hashlib.sha256("\n".join(_file()).encode()).hexdigest()[:16]


@functools.cache
def _lines(part: Part) -> tuple[tuple[str, ...], ...]:
    """Return the sentences of each line of a part, or raise ValueError."""
    check_names("part of the haystack", part, ("train", "test"))
    return tuple(_choices(line) for i, line in enumerate(_file()) if (i % 4 == 0) == (part == "train"))


@functools.cache
def _file() -> tuple[str, ...]:
    return tuple(HAYSTACK_FILE.read_text(encoding="utf-8").splitlines())


def _choices(line: str) -> tuple[str, ...]:
    """Return the sentences that a line stands for: every choice of one of the words in each pair of braces."""
    texts = re.split(r"[{}]", line)  # every second one was in braces
    choices = [text.split("|") if place % 2 else [text] for place, text in enumerate(texts)]
    return tuple(map("".join, itertools.product(*choices)))
