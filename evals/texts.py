"""Long texts for evaluations such as perplexity and choices: a file, or a text of the user's cache folder by its name.

Those of the cache folder are plain UTF-8: paragraphs with an empty line between them, and each book or chapter after
its title, as in "== Genesis ==". ``python -m papers texts`` makes them of Debian's packages. A text's SHA-256 is
recorded with all figures made from it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from evals import prose
from models import files

PUBLISHED = {  # the texts, and the package of Debian that holds each
    "king-james-bible": "bible-kjv-text",
    "debian-handbook": "debian-handbook",
    "python-doc": "python3.13-doc",
}
TITLE = "== {} =="  # a line of its own; "#" begins comments in code
HELD_OUT = ":held-out"  # after the name of a published text
DOCUMENT = 8_000  # characters


class Parts(NamedTuple):
    """The documents of a text: those to train on, and its end, which is held out."""

    training: list[str]
    held_out: list[str]


def parts(text: str) -> Parts:
    """Cut a text into documents of whole paragraphs, of 8,000 characters or more; hold out the last tenth of them."""
    documents: list[str] = []
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        held.append(paragraph)
        if sum(map(len, held)) >= DOCUMENT:
            documents.append("\n\n".join(held))
            held = []
    documents += ["\n\n".join(held)] if any(held) else []
    kept = len(documents) - -(-len(documents) // 10)
    return Parts(documents[:kept], documents[kept:])


def read_text(name: str | Path | None) -> str:
    """Read a text by its name or file, or our own held-out sentences.

    Args:
        name: one of :data:`PUBLISHED`, a UTF-8 file, or None for the sentences that no model or predictor was trained
            on. After a published name, ":held-out" asks for the part that nothing is trained on; see :func:`parts`.

    Raises:
        FileNotFoundError: the file does not exist, or the text has not been made yet.
        ValueError: the file is empty or not UTF-8.
    """
    if name is None:
        return prose.text("test")
    published = str(name).removesuffix(HELD_OUT)
    if published in PUBLISHED:
        text = find(published).read_text(encoding="utf-8")
        return text if published == str(name) else "\n\n".join(parts(text).held_out)
    path = Path(name)
    text = files.read_text(path, "text")
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with text.")
    return text


def digest(text: str) -> str:
    """Return the SHA-256 of a text, which is recorded with figures made from it."""
    return hashlib.sha256(text.encode()).hexdigest()


def sections(text: str) -> dict[str, list[str]]:
    """Cut a text into its sections by their titles, each a list of paragraphs with single spaces.

    Paragraphs before the first title are the section ""; so are all paragraphs of a text without titles.

    Example:
        >>> from evals.texts import sections
        >>> text = "== One ==\\n\\nFirst\\nparagraph.\\n\\nSecond.\\n\\n"
        >>> sections(text + "== Two ==\\n\\nThird.\\n")
        {'One': ['First paragraph.', 'Second.'], 'Two': ['Third.']}
    """
    found: dict[str, list[str]] = {}
    title = ""
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if titled := re.fullmatch(re.escape(TITLE).replace(r"\{\}", "(.+)"), line):
            title = titled[1]
        elif line:
            found.setdefault(title, []).append(line)
    return found


def place(name: str) -> Path:
    """Return the path of one of :data:`PUBLISHED` in the user's cache folder, made or not."""
    return files.cache_folder() / "texts" / f"{name}.txt"


def find(name: str) -> Path:
    """Return the file of one of :data:`PUBLISHED`; FileNotFoundError, which says how to make it, without one."""
    file = place(name)
    if not file.is_file():
        package = PUBLISHED[name]
        raise FileNotFoundError(
            f"{name} is not here yet; make it once, in a checkout: apt-get download {package} && "
            f"dpkg-deb -x {package}_*.deb debian && python -m papers texts debian {name}."
        )
    return file


def add_text_flag(flags: argparse.ArgumentParser, otherwise: str = "held-out sentences that ship with kvjax") -> None:
    """Add the flag that :func:`read_text` reads; ``otherwise`` says what a command takes without it."""
    flags.add_argument(
        "--text",
        help=f"a UTF-8 file, or a text of `python -m papers texts`: {', '.join(PUBLISHED)} (with {HELD_OUT} its last "
        f"tenth, which no predictor is trained on); by default {otherwise}",
    )
