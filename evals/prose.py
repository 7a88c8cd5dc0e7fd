"""Plain English to hide facts in: sentences from templates, from the standard library's documentation, and our own.

The templates are random and endless. The library's sentences (docstrings and licence of the running Python) are read
when they are needed, so they differ a little between Python versions; every JSON file made from them records their
:func:`digest`. `haystack.txt` beside this file was written for this project and is the same everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Literal

import numpy as np

HAYSTACK_FILE = Path(__file__).with_name("haystack.txt")
Source = Literal["train", "test", "fixed"]

MODULES = """abc argparse ast asyncio base64 bisect calendar cmd codecs collections configparser contextlib copy csv
dataclasses datetime decimal difflib dis doctest email enum filecmp fileinput fnmatch fractions ftplib functools
getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http.client http.cookiejar imaplib importlib
inspect io ipaddress itertools json keyword linecache locale logging mailbox mimetypes multiprocessing netrc
ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint
profile pstats pydoc queue quopri random re reprlib sched secrets selectors shelve shlex shutil signal site smtplib
socket socketserver sqlite3 ssl stat statistics string struct subprocess symtable sysconfig tarfile tempfile
textwrap threading timeit token tokenize trace traceback turtle types typing unicodedata unittest.mock
unittest.case urllib.parse urllib.request uuid venv warnings wave weakref webbrowser wsgiref.handlers xml.dom
xml.sax.handler xmlrpc.client zipapp zipfile zoneinfo""".split()

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

_PEOPLE = """baker farmer teacher doctor singer painter captain soldier merchant judge miller gardener hunter
traveler brother sister mother father neighbor stranger child student king queen friend writer""".split()
_VERBS = """carried watched found followed painted repaired opened sold bought described remembered visited crossed
admired lost guarded cleaned moved touched passed measured wanted kept left studied""".split()
_ADVERBS = "slowly quickly quietly often never always sometimes carefully gladly suddenly".split()
_TIMES = """in the morning|at night|before dawn|after the rain|during the winter|last summer|on the first day|every
evening|for many years|at the end of the week|when the bells rang|while the others slept|as usual|once again""".replace(
    "\n", " "
).split("|")
_PLACES = """near the river|behind the old house|in the market|on the hill|beside the road|under the bridge|at the
edge of the village|in the great hall|by the sea|inside the barn|across the field|along the wall|in the north|next to
the well""".replace("\n", " ").split("|")
_FEELINGS = "tired happy certain worried pleased afraid ready late hungry surprised".split()


def template_sentence(rng: np.random.Generator) -> str:
    """Return a random sentence about people, places and things; it never states a fact that a question asks for.

    >>> template_sentence(np.random.default_rng(0)).endswith(".")
    True
    """
    one = lambda words: words[int(rng.integers(len(words)))]  # noqa: E731
    thing = lambda: f"the {one(ADJECTIVES)} {one(NOUNS)}" if rng.random() < 0.4 else f"the {one(NOUNS)}"  # noqa: E731
    who = f"{'The' if rng.random() < 0.6 else 'A'} {one(_PEOPLE)}"
    match int(rng.integers(9)):
        case 0:
            return f"{who} {one(_VERBS)} {thing()} {one(_TIMES)}."
        case 1:
            return f"{who} {one(_ADVERBS)} {one(_VERBS)} {thing()} {one(_PLACES)}."
        case 2:
            start = one(_TIMES)
            return f"{start[0].upper()}{start[1:]}, the {one(_PEOPLE)} {one(_VERBS)} {thing()}."
        case 3:
            return f"{who} was {one(_FEELINGS)}, because the {one(_PEOPLE)} {one(_VERBS)} {thing()}."
        case 4:
            return f"There was a {one(NOUNS)} {one(_PLACES)}, and nobody {one(_VERBS)} it."
        case 5:
            return f"{who} and the {one(_PEOPLE)} {one(_VERBS)} {thing()} {one(_PLACES)} {one(_TIMES)}."
        case 6:
            return f"Nobody knew who {one(_VERBS)} {thing()} {one(_PLACES)}."
        case 7:
            return f"{who} {one(_VERBS)} {thing()}, then {one(_VERBS)} {thing()}, and was {one(_FEELINGS)}."
        case _:
            count = int(rng.integers(2, 100))
            return f"{who} counted {count} steps from {thing()} to {thing()}."


@functools.cache
def sentences(source: Source = "train") -> tuple[str, ...]:
    """Return the sentences to draw from.

    Args:
        source: "train" and "test" are the standard library's, of which every eighth is held out as "test"; "fixed" are
            our own.

    Raises:
        ValueError: the source is unknown, or this Python runs without docstrings.

    >>> from evals import prose
    >>> set(prose.sentences("train")).isdisjoint(prose.sentences("test")), len(prose.sentences("fixed"))
    (True, 291)
    """
    if source not in ("train", "test", "fixed"):
        raise ValueError(f"the source of sentences is {source!r}; expected 'train', 'test' or 'fixed'.")
    if source == "fixed":
        return tuple(HAYSTACK_FILE.read_text(encoding="utf-8").splitlines())
    return tuple(line for i, line in enumerate(_library()) if (i % 8 == 0) == (source == "test"))


@functools.cache
def digest() -> str:
    """Return a digest of the library's sentences, for JSON files whose figures may depend on them.

    >>> from evals import prose
    >>> len(prose.digest())
    16
    """
    return hashlib.sha256("\n".join(_library()).encode()).hexdigest()[:16]


@functools.cache
def _library() -> tuple[str, ...]:
    if sys.flags.optimize > 1:
        raise ValueError("this Python runs without docstrings, but the texts are made from them; leave -OO out.")
    with warnings.catch_warnings():  # some attributes of the library warn when they are accessed
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(collect())


def collect(limit: int = 2400) -> list[str]:
    """Return sentences from this interpreter's docstrings and licence, in a fixed order, without repeats."""
    texts = [_licence()]
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # a build of Python without, say, sqlite3
        texts.append(module.__doc__ or "")
        for _, member in sorted(vars(module).items()):
            if getattr(member, "__module__", None) == module.__name__:
                texts.append(inspect.getdoc(member) or "")
                if inspect.isclass(member):
                    texts += [inspect.getdoc(part) or "" for _, part in sorted(vars(member).items()) if callable(part)]
    found = dict.fromkeys(sentence for text in texts for sentence in _sentences(text))
    every = max(1, len(found) // limit)
    return list(found)[::every][:limit]


def _licence() -> str:
    for folder in (os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "..", "..")):
        for name in ("LICENSE.txt", "LICENSE"):
            path = Path(folder, name)
            if path.exists():
                return path.read_text(encoding="utf-8", errors="ignore")
    return ""


def _sentences(text: str) -> list[str]:
    """Return the plain sentences of a text: no code, no digits, moderate length."""
    out = []
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph:
            continue
        for sentence in re.split(r"(?<=[.])\s+(?=[A-Z])", " ".join(paragraph.split())):
            plain = re.fullmatch(r"[A-Z][a-z]*( [A-Za-z'\-]+[,;:]?)+\.", sentence)
            if plain and 40 <= len(sentence) <= 150 and sentence.count(" ") >= 5:
                out.append(sentence)
    return out
