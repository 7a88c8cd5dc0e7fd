"""Long English texts from Debian's packages, for evaluations such as perplexity and choices.

They are written into the user's cache folder as plain UTF-8: paragraphs with an empty line between them, and each book
or chapter after its title, as in "== Genesis ==". Every ``--text`` takes their names. Debian's releases have different
editions of a text, so its SHA-256 is printed and is recorded with all figures made from it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import posixpath
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from evals import prose
from kvjax.checks import check_names
from models import commands

EXAMPLES = """examples:
  python -m evals texts
  python -m evals texts king-james-bible debian-handbook
  python -m evals perplexity --text king-james-bible --chunk 1024 --sequences 32 --policies h2o,snapkv --budgets 256
"""
TITLE = "== {} =="  # a line of its own; "#" begins comments in code
HELD_OUT = ":held-out"  # after the name of a published text
DOCUMENT = 8_000  # characters


class Published(NamedTuple):
    """The source of a text: a package of Debian, and the size of the download as users read it.

    ``needs`` is a pattern for the dependency of the package that holds the text, or None where the package itself holds
    it. ``read`` makes the text from the unpacked files.
    """

    package: str
    needs: str | None
    read: Callable[[Path], str]
    size: str


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
        FileNotFoundError: the file does not exist, or the text has not been fetched yet.
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
    """Return the path of a text in the user's cache folder, fetched or not.

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
    """Return the file of a text that has been fetched.

    Args:
        name: one of :data:`PUBLISHED`.
        environment: see :func:`place`.

    Raises:
        FileNotFoundError: it has not been fetched yet; the message says how to fetch it.

    Example:
        >>> from evals.texts import find
        >>> find("king-james-bible", {"XDG_CACHE_HOME": "nowhere"})
        Traceback (most recent call last):
        ...
        FileNotFoundError: king-james-bible is not here yet; fetch it once (2 MB) with: python -m evals texts king-...
    """
    file = place(name, environment)
    if not file.is_file():
        raise FileNotFoundError(
            f"{name} is not here yet; fetch it once ({PUBLISHED[name].size}) with: python -m evals texts {name}."
        )
    return file


def fetch(name: str) -> bool:
    """Fetch a text into the user's cache folder, whole or not at all.

    Packages that were downloaded before an interruption are not downloaded again.

    Args:
        name: one of :data:`PUBLISHED`.

    Returns:
        Whether anything was fetched; a text that is already there is kept.

    Raises:
        FileNotFoundError: apt-get or dpkg-deb is missing, or a package cannot be downloaded.
        ValueError: the name is unknown, or the package does not hold the text as expected.

    Example:
        >>> from evals.texts import fetch
        >>> fetch("iliad")
        Traceback (most recent call last):
        ...
        ValueError: unknown text 'iliad'; expected one of king-james-bible, debian-handbook, python-doc.
    """
    check_names("text", name, PUBLISHED)
    published, file = PUBLISHED[name], place(name)
    if file.is_file():
        return False
    packages = file.with_suffix(".packages")
    packages.mkdir(parents=True, exist_ok=True)
    package = _download(published.package, packages)
    if published.needs is not None:
        package = _download(_needed(package, published.needs), packages)
    unpacked = packages / "unpacked"
    _run(["dpkg-deb", "--extract", str(package), str(unpacked)], f"dpkg-deb did not unpack {package.name}")
    text = published.read(unpacked)
    if not text.strip():
        raise ValueError(f"{package.name} holds no text in the expected layout; give --text a file of your own.")
    with commands.replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    shutil.rmtree(packages)
    return True


def king_james(unpacked: Path) -> str:
    """Make the text of the Bible: one section per book, one paragraph per chapter, without the verses' numbers.

    Raises:
        ValueError: the package's file is missing or damaged.
    """
    file = unpacked / "usr/lib/bible.data"
    try:
        lines = _windows(file.read_bytes()).decode("ascii").splitlines()
    except (OSError, ValueError, struct.error):
        raise ValueError(
            f"{file.name} of bible-kjv-text is missing or damaged; remove {unpacked.parent} and try again."
        ) from None
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
    "king-james-bible": Published("bible-kjv-text", None, king_james, "2 MB"),
    "debian-handbook": Published("debian-handbook", None, handbook, "35 MB"),
    "python-doc": Published("python3-doc", r"python3\.\d+-doc", python_doc, "13 MB"),
}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument(
        "names", nargs="*", metavar="NAME", help=f"the texts to fetch: {', '.join(PUBLISHED)} (default: all)"
    )


def command(flags: argparse.Namespace) -> None:
    """Fetch the texts that are not there yet, and print each text's path and SHA-256."""
    names = list(dict.fromkeys(flags.names)) or list(PUBLISHED)
    check_names("text", names, PUBLISHED)
    with commands.progress_bar("text", total=len(names)) as progress:
        for name in names:
            progress.set_description(f"{name}, {PUBLISHED[name].size}")
            fetched = fetch(name)
            text = place(name).read_bytes()
            tqdm.write(f"{name}: {'fetched to' if fetched else 'is there:'} {place(name)}", file=sys.stdout)
            tqdm.write(f"  {len(text.split()):,} words, SHA-256 {hashlib.sha256(text).hexdigest()}", file=sys.stdout)
            progress.update()
        progress.set_description("done")


def add_text_flag(flags: argparse.ArgumentParser) -> None:
    """Add the flag that :func:`read_text` reads."""
    flags.add_argument(
        "--text",
        help=f"a UTF-8 file, or a fetched text: {', '.join(PUBLISHED)} (with {HELD_OUT} its last tenth, which no "
        "predictor is trained on); by default held-out sentences that ship with kvjax",
    )


def _download(package: str, folder: Path) -> Path:
    """Download a package and return its file; apt-get skips one that is already there and whole."""
    # Started by root, apt-get switches to a user that may not write here.
    command = ["apt-get", "--quiet", "--option", "APT::Sandbox::User=root", "download", package]
    _run(command, f"apt-get did not get {package}", folder)
    file = max(folder.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime, default=None)
    if file is None:
        raise FileNotFoundError(f"apt-get gave no file for {package}; run 'apt-get download {package}' to see why.")
    return file


def _needed(package: Path, pattern: str) -> str:
    field = _run(["dpkg-deb", "--field", str(package), "Depends"], f"dpkg-deb did not read {package.name}")
    found = re.search(pattern, field)
    if found is None:
        raise ValueError(
            f"{package.name} has no dependency like {pattern}, which should hold the text; give --text your own file."
        )
    return found[0]


def _run(command: Sequence[str], failure: str, folder: Path | None = None) -> str:
    """Run a program of Debian and return what it prints.

    Raises:
        FileNotFoundError: the program is not installed, or it failed.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{command[0]} is not installed, but the texts come from Debian's packages; fetch them on a Debian or "
            "Ubuntu system, or give --text a file of your own."
        ) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        reason = next((line for line in said if line.startswith("E:")), said[-1]).removeprefix("E:").strip()[:200]
        raise FileNotFoundError(
            f"{failure} ({reason.rstrip('.')}); check the network, and apt's lists (apt-get update renews them)."
        )
    return done.stdout


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
