"""The language of what users read: one name for a thing, percentages for answers, no more words than a limit."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted(page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts and "api" not in page.parts)
PAGES = [ROOT / "README.md", *DOCS]
NOTEBOOKS = sorted(ROOT.glob("notebooks/[0-9]-*.py"))

# What a page does not say, and what it says instead.
LOST = {
    r"after every block": "by block",
    r"evict\w* (?:from )?(?:after each block|block by block)": "evicted by block",
    r"\brecency\b": "the newest tokens",
    r"\bzap\b": "the gate",
    r"Fast KVzip's gate|learned retention score": "the gate",
    r"(?:importance|eviction) scores?\b": "retention score",
    r"window of observation|observing window": "observation window",
    r"(?:uncompressed|complete|unevicted) cache": "full cache",
    r"questions? (?:is |are |was |were )?(?:un|not )known|unknown questions?|\bunknown, (?:once|by block|after)": (
        "question later"
    ),
    r"heads? group\b|group of (?:query )?heads": "query group",
    r"\b(?:answers?|answered|knows|knew|recalls?|recalled|finds?|found) (?:with it )?0\.\d\d\b": "a percentage",
    r"\d to \d+ of \d+ MiB": "the largest bytes, and those of the full cache apart",
    r"none of that name": "is not there",
    r"the `python` of": "the commands below assume this environment",
}


def text_of(page: Path) -> str:
    """Return a page's text, that of a notebook's Markdown cells, or a package's public docstrings without examples."""
    if page.suffix == ".md":
        return page.read_text("utf-8")
    if page.suffix == ".py":
        cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n)*)", page.read_text("utf-8"), re.MULTILINE)
        return re.sub("^# ?", "", "\n".join(cells), flags=re.MULTILINE)
    nodes = [node for path in sorted(page.glob("**/*.py")) for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    said = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    texts = [ast.get_docstring(node) or "" for node in said if not getattr(node, "name", "").startswith("_")]
    text = re.sub(r"^ *>>> .*?(?:\n\n|\Z)", "", "\n\n\n".join(texts), flags=re.MULTILINE | re.DOTALL)
    return re.sub("^ +", "", text, flags=re.MULTILINE)  # not the indented lines that prose takes for code


def prose(page: Path) -> str:
    """Return a page's text without code, commands, policies' names in tables, addresses and comments."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"``[^`]*``|`[^`]*`|\]\([^)]*\)|https?://\S+", "", text)
    text = re.sub(r"(?<=\|) *[a-z_0-9]+(?:[+@(][^|\s]*)? *(?=\|)", "", text)  # a cell of a policy's name alone
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    "page", [*PAGES, *NOTEBOOKS, ROOT / "kvjax", ROOT / "models"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_thing_has_one_name(page):
    text = prose(page)
    found = {
        text[max(0, at.start() - 30) : at.end() + 20]: instead
        for lost, instead in LOST.items()
        for at in re.finditer(lost, text, re.IGNORECASE)
    }
    assert found == {}, "write the other name"


def count(page: Path) -> int:
    return len(page.read_text("utf-8").split())


@pytest.mark.parametrize(
    ("name", "most"), [("README.md", 900), ("docs/results/CLAIMS.md", 1200), ("docs/architecture.md", 4000)]
)
def test_a_page_has_no_more_words_than_its_limit(name, most):
    assert count(ROOT / name) <= most


def test_a_page_for_users_is_read_in_ten_minutes():
    named = ("index", "install", "commands", "limitations", "glossary", "memory-model")
    pages = [page for page in DOCS if page.parent.name in ("how-to", "tutorial") or page.parent == ROOT / "docs"]
    pages = [page for page in pages if page.parent.name != "docs" or page.stem in named]
    assert {page.name: count(page) for page in pages if count(page) > 1500} == {}


def test_the_site_is_read_in_an_afternoon():
    assert sum(map(count, DOCS)) <= 45_000
