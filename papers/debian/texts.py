"""Makes long English texts of Debian's packages, which every ``--text`` takes by their names.

The packages are unpacked by Debian's own programs, and the texts are written into the user's cache folder:

    apt-get download bible-kjv-text debian-handbook python3.13-doc
    for package in *.deb; do dpkg-deb -x "$package" debian; done
    python -m papers texts debian

Debian's releases have different editions of a text, so its SHA-256 is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import posixpath
import re
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from evals import sweep
from evals.texts import PUBLISHED, TITLE, place
from kvjax._src.checks import check_names
from models import files


def make(name: str, folder: Path) -> Path:
    """Make a text, one of :data:`PUBLISHED`, of its package unpacked in a folder; return its file in the user's cache.

    Raises:
        ValueError: the folder does not hold the text as expected.
    """
    file, text = place(name), READERS[name](folder)
    if not text.strip():
        raise ValueError(
            f"{folder} does not hold {name} in the expected layout; unpack Debian's package {PUBLISHED[name]} there "
            f"(dpkg-deb -x), or give --text a file of your own."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def king_james(unpacked: Path) -> str:
    """Make the text of the Bible: one section per book, one paragraph per chapter, without the verses' numbers."""
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
    """Return a page as plain text: paragraphs, and code as it is, without navigation and tables of contents."""
    reader = _Page()
    reader.feed(page)
    reader.close()
    return reader.text()


BOOKS: dict[str, str] = sweep.read(Path(__file__).with_name("books.toml"))
READERS = {"king-james-bible": king_james, "debian-handbook": handbook, "python-doc": python_doc}


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
