"""Texts out of Debian's packages, unpacked: pages and the packed Bible by hand."""

import struct
from pathlib import Path

import pytest

from evals import texts
from papers.__main__ import main
from papers.debian.texts import plain

VERSES = ["Title", "Ge1:1 In the beginning.", "Ge1:2 And the earth.", "Ge2:1 Thus the heavens.", "1Sm1:1 Now a man."]
BIBLE = "== Genesis ==\n\nIn the beginning.\nAnd the earth.\n\nThus the heavens.\n\n== 1 Samuel ==\n\nNow a man.\n"
PAGE = """<html><head><title>no</title><link rel="next" href="{next}" /></head><body><div class="related"><p>no</p>
<div>no</div></div><h1>{title}<a class="headerlink" href="#">no</a></h1><p>{text}</p></body></html>"""


def packed(window):
    """Return what compress makes of letters that never repeat its table: nine bits each, the first bit lowest."""
    number = sum(byte << 9 * place for place, byte in enumerate(window))
    return number.to_bytes(-(-9 * len(window) // 8), "little")


def bible_data(text, size=32):
    windows = [packed(text[start : start + size]) for start in range(0, len(text), size)]
    starts = [96 + 4 * len(windows)]
    for window in windows:
        starts.append(starts[-1] + len(window))
    head = b"EC02".ljust(84, b"\0") + struct.pack(f">II{len(starts)}I", size, len(windows), *starts)
    return head + b"".join(windows)


def write(folder, files):
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def page(title, text, following=""):
    return PAGE.format(title=title, text=text, next=following)


UNPACKED = {
    "usr/lib/bible.data": bible_data("\n".join(VERSES).encode() + b"\n"),
    "usr/share/doc/debian-handbook/html/en-US/index.html": page("Cover", "no", "one.html"),
    "usr/share/doc/debian-handbook/html/en-US/one.html": page("One", "A caf\N{LATIN SMALL LETTER E WITH ACUTE}."),
    "usr/share/doc/python3.13/html/tutorial/index.html": page("Tutorial", "First.", "../c-api/index.html"),
    "usr/share/doc/python3.13/html/c-api/index.html": page("C", "no", "../library/os.html"),
    "usr/share/doc/python3.13/html/library/os.html": page("os", "Last.", "../tutorial/index.html"),
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Unpack made-up packages into a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "debian", UNPACKED)
    return tmp_path / "debian"


def test_navigation_goes_and_code_stays_as_it_is():
    shown = plain(
        "<nav>no<nav>no</nav>no</nav><h1>One &amp;\n<b>two</b></h1><p>A <code>b</code>\n c<br/>d</p><ul><li>e</li></ul>"
        "<pre>if x:\n\n    y <i>= 1</i>\n</pre><div class='toc'><div>no</div></div><script>no</script>"
        "<hr class='docnav'>f"
    )
    assert shown == "== One & two ==\n\nA b c\n\nd\n\ne\n\nif x:\n    y = 1\n\nf"


def test_texts_are_made_of_the_folder_and_read_by_their_names(folder, capsys):
    assert main(["texts", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert texts.read_text("king-james-bible") == BIBLE
    assert texts.read_text("debian-handbook") == "== One ==\n\nA caf\N{LATIN SMALL LETTER E WITH ACUTE}.\n"
    assert texts.read_text("python-doc") == "== Tutorial ==\n\nFirst.\n\n== os ==\n\nLast.\n"
    assert all(f"SHA-256 {texts.digest(texts.read_text(name))}" in printed for name in texts.PUBLISHED)


DAMAGED = "of bible-kjv-text is damaged"
EMPTY = "does not hold king-james-bible in the expected layout"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((data, DAMAGED) for data in (b"", b"EC02", b"EC02" + bytes(200), bible_data(b"Ge1:1 A river.")[:-1])),
        (None, EMPTY),
    ],
)
def test_a_damaged_package_leaves_no_text(folder, capsys, content, said):
    file = folder / "usr/lib/bible.data"
    file.unlink() if content is None else file.write_bytes(content)
    assert main(["texts", str(folder), "king-james-bible"]) == 2
    assert said in capsys.readouterr().err
    assert not texts.place("king-james-bible").exists()
