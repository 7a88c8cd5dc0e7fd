"""Long English texts from Debian's packages, for evaluations such as perplexity and choices.

The packages are unpacked by Debian's own programs, and ``python -m evals texts`` makes the texts of the folder:

    apt-get download bible-kjv-text debian-handbook python3.13-doc
    for package in *.deb; do dpkg-deb -x "$package" debian; done
    python -m evals texts debian

The texts are written into the user's cache folder as plain UTF-8: paragraphs with an empty line between them, and each
book or chapter after its title, as in "== Genesis ==". Every ``--text`` takes their names. Debian's releases have
different editions of a text, so its SHA-256 is printed and is recorded with all figures made from it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import posixpath
import re
import struct
import subprocess
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from evals import prose
from kvjax.checks import check_names
from models import commands

EXAMPLES = """examples:
  python -m evals texts debian
  python -m evals texts debian king-james-bible
  python -m evals perplexity --text king-james-bible --chunk 1024 --sequences 32 --policies h2o,snapkv --budgets 256
"""
TITLE = "== {} =="  # a line of its own; "#" begins comments in code
HELD_OUT = ":held-out"  # after the name of a published text
DOCUMENT = 8_000  # characters


class Published(NamedTuple):
    """The source of a text: a package of Debian, and what makes the text from the folder that it is unpacked in."""

    package: str
    read: Callable[[Path], str]


class Parts(NamedTuple):
    """The documents of a text: those to train on, and its end, which is held out."""

    training: list[str]
    held_out: list[str]


def parts(text: str) -> Parts:
    """Cut a text into documents of whole paragraphs, at least 8,000 characters each; hold out the last tenth of them.

    Example:
        >>> from evals.texts import parts
        >>> training, held_out = parts("\\n\\n".join(["word " * 1_000] * 40))
        >>> len(training), len(held_out), training[0].count("word")
        (18, 2, 2000)
    """
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

    Example:
        >>> from evals.texts import read_text
        >>> len(read_text(None)) > 10_000
        True
    """
    if name is None:
        return prose.text("test")
    published = str(name).removesuffix(HELD_OUT)
    if published in PUBLISHED:
        text = find(published).read_text(encoding="utf-8")
        return text if published == name else "\n\n".join(parts(text).held_out)
    path = Path(name)
    text = commands.read_text(path, "text")
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with text.")
    return text


def digest(text: str) -> str:
    """Return the SHA-256 of a text, which is recorded with figures made from it.

    Example:
        >>> from evals.texts import digest
        >>> digest("calm")[:8]
        '2b4b2ead'
    """
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


def place(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a text in the user's cache folder, made or not.

    Args:
        name: one of :data:`PUBLISHED`.
        environment: its XDG_CACHE_HOME may name another folder than ~/.cache.

    Raises:
        FileNotFoundError: the user has no home and XDG_CACHE_HOME is not set.

    Example:
        >>> from evals.texts import place
        >>> place("king-james-bible", {"XDG_CACHE_HOME": "cache"}).as_posix()
        'cache/kvjax/texts/king-james-bible.txt'
    """
    return commands.cache_folder(environment) / "texts" / f"{name}.txt"


def find(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a text that has been made.

    Args:
        name: one of :data:`PUBLISHED`.
        environment: see :func:`place`.

    Raises:
        FileNotFoundError: it has not been made yet; the message says how to make it.

    Example:
        >>> from evals.texts import find
        >>> find("king-james-bible", {"XDG_CACHE_HOME": "nowhere"})
        Traceback (most recent call last):
        ...
        FileNotFoundError: king-james-bible is not here yet; make it once with: apt-get download bible-kjv-text && ...
    """
    file = place(name, environment)
    if not file.is_file():
        package = PUBLISHED[name].package
        raise FileNotFoundError(
            f"{name} is not here yet; make it once with: apt-get download {package} && "
            f"dpkg-deb -x {package}_*.deb debian && python -m evals texts debian {name}."
        )
    return file


def make(name: str, folder: Path) -> Path:
    """Make a text of the packages that are unpacked in a folder, and write it into the user's cache folder.

    Args:
        name: one of :data:`PUBLISHED`.
        folder: where its package is unpacked.

    Returns:
        The text's file.

    Raises:
        ValueError: the name is unknown, or the folder does not hold the text as expected.

    Example:
        >>> from pathlib import Path
        >>> from evals.texts import make
        >>> make("iliad", Path("debian"))
        Traceback (most recent call last):
        ...
        ValueError: unknown text 'iliad'; expected one of king-james-bible, debian-handbook, python-doc.
    """
    check_names("text", name, PUBLISHED)
    published, file = PUBLISHED[name], place(name)
    text = published.read(folder)
    if not text.strip():
        raise ValueError(
            f"{folder} does not hold {name} in the expected layout; unpack Debian's package {published.package} there "
            f"(dpkg-deb -x), or give --text a file of your own."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with commands.replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def king_james(unpacked: Path) -> str:
    """Make the text of the Bible: one section per book, one paragraph per chapter, without the verses' numbers.

    Raises:
        ValueError: the package's file is damaged.
    """
    file = unpacked / "usr/lib/bible.data"
    if not file.is_file():
        return ""
    try:
        lines = _windows(file.read_bytes()).decode("ascii").splitlines()
    except (OSError, ValueError, struct.error):
        raise ValueError(f"{file} of bible-kjv-text is damaged; download and unpack it again.") from None
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if verse := re.fullmatch(r"(\d?[A-Za-z]+?)(\d+):\d+ (.*)", line):
            chapters.setdefault((BOOKS.get(verse[1], verse[1]), verse[2]), []).append(verse[3])
    parts: list[str] = []
    for (book, number), verses in chapters.items():
        parts += [TITLE.format(book)] if number == "1" else []
        parts.append("\n".join(verses))
    return "\n\n".join(parts) + "\n" if parts else ""


def handbook(unpacked: Path) -> str:
    """Make the text of the Debian Administrator's Handbook in English, in reading order."""
    return _book(unpacked / "usr/share/doc/debian-handbook/html/en-US", "index.html", "(?!index)")


def python_doc(unpacked: Path) -> str:
    """Make the text of Python's tutorial, reference, library, guides and FAQ, in reading order."""
    folder = next((path.parent.parent for path in sorted(unpacked.glob("**/html/tutorial/index.html"))), unpacked)
    return _book(folder, "tutorial/index.html", r"(tutorial|reference|library|howto|faq)/")


def plain(page: str) -> str:
    """Return a page as plain text: paragraphs, and code as it is, without navigation, scripts and tables of contents.

    Example:
        >>> from evals.texts import plain
        >>> page = "<nav>Home</nav><h1>Rivers</h1><p>The <i>river</i>\\n was calm."
        >>> plain(page + "</p><pre>a\\n  b</pre>")
        '== Rivers ==\\n\\nThe river was calm.\\n\\na\\n  b'
    """
    reader = _Page()
    reader.feed(page)
    reader.close()
    return reader.text()


PUBLISHED = {
    "king-james-bible": Published("bible-kjv-text", king_james),
    "debian-handbook": Published("debian-handbook", handbook),
    "python-doc": Published("python3.13-doc", python_doc),
}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("folder", type=Path, help="where Debian's packages are unpacked, by dpkg-deb -x")
    flags.add_argument(
        "names", nargs="*", metavar="NAME", help=f"the texts to make: {', '.join(PUBLISHED)} (default: all)"
    )


def command(flags: argparse.Namespace) -> None:
    """Make the texts, and print each text's path and SHA-256."""
    if not flags.folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {flags.folder}; unpack Debian's packages there first (dpkg-deb -x)."
        )
    names = list(dict.fromkeys(flags.names)) or list(PUBLISHED)
    check_names("text", names, PUBLISHED)
    for name in names:
        file = make(name, flags.folder)
        text = file.read_bytes()
        print(f"{name}: {file}\n  {len(text.split()):,} words, SHA-256 {hashlib.sha256(text).hexdigest()}")


def add_text_flag(flags: argparse.ArgumentParser) -> None:
    """Add the flag that :func:`read_text` reads."""
    flags.add_argument(
        "--text",
        help=f"a UTF-8 file, or a text of `python -m evals texts`: {', '.join(PUBLISHED)} (with {HELD_OUT} its last "
        "tenth, which no predictor is trained on); by default held-out sentences that ship with kvjax",
    )


def _windows(content: bytes) -> bytes:
    """Unpack the file of bible-kjv: windows that ``compress`` packed one by one, each without its first three bytes."""
    if content[:4] != b"EC02":
        raise ValueError("no file of bible-kjv")
    size, count = struct.unpack(">II", content[84:92])
    starts = struct.unpack(f">{count + 1}I", content[92 : 96 + 4 * count])
    if starts[-1] != len(content):
        raise ValueError("cut off")
    out = []
    for start, end in itertools.pairwise(starts):
        packed = b"\x1f\x9d\x90" + content[start:end]
        done = subprocess.run(["gzip", "--decompress", "--stdout"], input=packed, capture_output=True, check=False)
        out.append(done.stdout)
    if any(len(window) != size for window in out[:-1]):
        raise ValueError("a window of another size")
    return b"".join(out)


def _book(folder: Path, first: str, wanted: str) -> str:
    """Join the pages of a folder whose names match ``wanted``, following each page's link to the next."""
    parts: list[str] = []
    read: set[str] = set()
    name: str | None = first
    while name is not None and name not in read and (folder / name).is_file():
        read.add(name)
        page = (folder / name).read_text(encoding="utf-8")
        if re.match(wanted, name):
            parts.append(plain(page))
        name = _next(page, name)
    return "\n\n".join(part for part in parts if part) + "\n" if parts else ""


def _next(page: str, name: str) -> str | None:
    """Return the name of the page that follows this one, relative to the same folder."""
    for link in re.findall(r"<link\s[^>]*>", page):
        if re.search(r'rel="next"', link) and (target := re.search(r'href="([^"#]+)', link)):
            return posixpath.normpath(posixpath.join(posixpath.dirname(name), target[1]))
    return None


class _Page(HTMLParser):
    """The parser that collects the text of a page; see :func:`plain`."""

    BLOCKS = frozenset(
        "address article aside blockquote br body dd div dl dt figcaption figure h1 h2 h3 h4 h5 h6 hr li main ol p pre "
        "section table td th tr ul".split()
    )
    # Elements, and the classes and ids of others, that are not part of a page's content.
    DROPPED = frozenset("footer head nav script style".split())
    MARGINS = frozenset(
        "docnav headerlink indextable related sphinxsidebar toc toctree-wrapper #banner p#title".split()
    )
    VOID = frozenset("br hr img input link meta".split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.within: list[str] = []  # the dropped element, and elements of the same name inside it
        self.form = "{}"
        self.code = 0

    def text(self) -> str:
        """Return the paragraphs so far."""
        self._end()
        return "\n\n".join(self.paragraphs)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.within:
            self.within += [tag] if tag == self.within[0] else []
            return
        given = dict(attrs)
        names = {*(given.get("class") or "").split(), f"#{given.get('id')}", f"{tag}#{given.get('id')}"}
        if tag in self.DROPPED or (names & self.MARGINS and tag not in self.VOID):
            self.within = [tag]
            return
        if tag in self.BLOCKS and not self.code:
            self._end()
        self.form = TITLE if tag == "h1" else self.form
        self.code += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self.within:
            if tag == self.within[0]:
                self.within.pop()
            return
        if tag in self.BLOCKS and (tag == "pre" or not self.code):
            self._end()
        self.code -= tag == "pre" and self.code > 0

    def handle_data(self, data: str) -> None:
        if not self.within:
            self.parts.append(data)

    def _end(self) -> None:
        """End a paragraph; empty lines are removed from code, since they would end the paragraph, too."""
        whole = "".join(self.parts)
        if self.code:
            text = "\n".join(line.rstrip() for line in whole.splitlines() if line.strip())
        else:
            text = " ".join(whole.split())
        if text:
            self.paragraphs.append(self.form.format(text))
            self.form = "{}"
        self.parts = []


# The package's abbreviations.
BOOKS = {
    short: name.strip()
    for short, name in zip(
        """Ge Exo Lev Num Deu Josh Jdgs Ruth 1Sm 2Sm 1Ki 2Ki 1Chr 2Chr Ezra Neh Est Job Psa Prv Eccl SSol Isa Jer Lam
        Eze Dan Hos Joel Amos Obad Jonah Mic Nahum Hab Zep Hag Zec Mal Mat Mark Luke John Acts Rom 1Cor 2Cor Gal Eph Phi
        Col 1Th 2Th 1Tim 2Tim Titus Phmn Heb Jas 1Pet 2Pet 1Jn 2Jn 3Jn Jude Rev""".split(),
        """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings|
        1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|Song of Solomon|Isaiah|Jeremiah|
        Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|
        Malachi|Matthew|Mark|Luke|John|Acts|Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|
        Colossians|1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|
        1 John|2 John|3 John|Jude|Revelation""".split("|"),
        strict=True,
    )
}
