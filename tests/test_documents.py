"""The code in the documents runs, from top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if python_blocks(d)], ids=lambda d: str(d.relative_to(ROOT)))
def test_the_python_blocks_of_a_document_run(document, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = "\n".join(python_blocks(document))
    exec(compile(source, str(document), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []
