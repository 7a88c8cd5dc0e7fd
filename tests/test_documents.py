"""The code in the documents runs, from top to bottom, as a reader would paste it; what they cite is what is there."""

import importlib.util
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models import published
from models.commands import ask

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def cells(notebook: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


PACKAGES = ("kernels_pallas", "kvjax", "models", "evals", "train")
EXAMPLES = [path for package in PACKAGES for path in sorted(ROOT.glob(f"{package}/**/*.py"))]
INDENTED = re.compile(r"\n\n((?:    .*\n(?:\n(?=    ))?)+)")  # not the text of an item of a list


def code_of(document: Path) -> list[str]:
    """The lines of a page's code blocks, or of the examples in a module's docstrings."""
    text = document.read_text()
    if document.suffix == ".py":
        return [line.strip() for line in re.findall(r"^ +(?:>>>|\.\.\.) .*$", text, re.MULTILINE)]
    blocks = re.findall(r"^```(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = [block for language, block in blocks if not language.startswith("{")]
    indented = [block for block in INDENTED.findall(text) if not re.search(r"^    +(?:[-*]|\d\.) ", block)]
    return "\n".join(fenced + [re.sub("^    ", "", block, flags=re.MULTILINE) for block in indented]).splitlines()


@pytest.mark.parametrize("documents", [DOCUMENTS, EXAMPLES], ids=["pages", "docstrings"])
def test_code_of_pages_is_at_most_80_columns_wide(documents):
    found = {str(path.relative_to(ROOT)): [line for line in code_of(path) if len(line) > 80] for path in documents}
    assert {name: lines for name, lines in found.items() if lines} == {}


def links(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)


# The others compile whole runs, or an operation at a time; the dearest show nothing that other tests do not.
CHEAP = ("docs/memory-model.md", "docs/how-to/load-a-model.md", "docs/how-to/your-own-package.md")
DEAR = ("index.md", "your-own-model.md", "choose-a-policy.md", "compress-once.md", "add-an-eval.md", "add-a-score.md")


def with_code() -> Iterator[Any]:
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        marks = [] if name in CHEAP else [pytest.mark.nightly if document.name in DEAR else pytest.mark.matrix]
        if python_blocks(document):
            yield pytest.param(document, id=name, marks=marks)


@pytest.mark.parametrize("document", list(with_code()))
def test_the_python_blocks_of_a_document_run_and_print_what_they_say(document, monkeypatch, tmp_path, capsys):
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # README reads an example's text
    monkeypatch.chdir(tmp_path)
    source = "\n".join(python_blocks(document))
    if "smollm2" in source and not published.place("smollm2").is_file():
        pytest.skip("needs smollm2; run python -m models.get smollm2")
    exec(compile(source, str(document), "exec"), {"__name__": "__main__"})
    printed = tuple(filter(None, map(str.strip, capsys.readouterr().out.splitlines())))
    said = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)  # the line, and perhaps its unit
    assert [text for text in said if not text.startswith(printed)] == []


@pytest.mark.smollm2
@pytest.mark.matrix
def test_the_first_command_of_the_readme_answers_with_the_one_right_code(monkeypatch, capsys):
    if not published.place("smollm2").is_file():
        pytest.skip("needs smollm2; run python -m models.get smollm2")
    (line,) = {line for line in COMMANDS if line.startswith("python -m models.ask ")}
    monkeypatch.chdir(ROOT)
    assert ask.main(shlex.split(line)[3:]) == 0
    assert re.findall(r"\d+", capsys.readouterr().out) == ["4719"]


@pytest.mark.nightly
@pytest.mark.parametrize("program", sorted(ROOT.glob("docs/examples/*.py")), ids=lambda p: p.name)
def test_a_program_that_a_page_leads_to_runs(program):
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    found = (document.parent / target for target in links(document.read_text()))
    # The tutorial's pages are written when the documentation is built, from the notebooks.
    pages = {ROOT / "docs/tutorial" / notebook.name for notebook in NOTEBOOKS}
    assert [str(target) for target in found if not target.exists() and target.resolve() not in pages] == []


def whole_lines(page: Path) -> str:
    return re.sub(r" \\\n\s+", " ", page.read_text())


COMMANDS = {
    found.group().split("  #")[0]
    for page in (ROOT / "README.md", ROOT / "docs/commands.md")
    for found in re.finditer(r"python -m .*", "\n".join(re.findall("^    .*", whole_lines(page), re.MULTILINE)))
}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_a_command_of_the_documents_has_the_flags_and_files_that_it_names(line, capsys):
    words = shlex.split(line)
    module, *rest = words[2:]
    subcommand = rest[:1] if module in ("evals", "benchmarks", "papers") else []
    name = {"train.butler": "train.cli"}.get(words[2], words[2].replace("models.", "models.commands."))
    main = importlib.import_module(name if "." in name else f"{name}.__main__").main
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*subcommand, "--help"]))
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [word for word in rest if word.startswith("--") and word not in shown] == []
    files = [after for word, after in itertools.pairwise(rest) if word == "--prompt-file"]
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_a_notebook_and_its_plain_file_hold_the_same(notebook):
    source = notebook.with_suffix(".py").read_text().split("\n# ---\n", 1)[1]
    plain = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        body = re.sub(r"^# (?=%)", "", body)  # a magic is a comment in Python
        plain.append(("markdown" if "[markdown]" in head else "code", body.strip()))
    stored = [
        (cell["cell_type"], "".join(cell["source"]).strip()) for cell in json.loads(notebook.read_text())["cells"]
    ]
    assert plain == stored


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_a_notebook_has_outputs_without_errors_links_that_lead_somewhere_and_one_beginning(notebook):
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    assert {output.get("name") for output in outputs} <= {None, "stdout"}
    assert "error" not in {output["output_type"] for output in outputs}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert re.findall(r"/(?:home|root|tmp|usr|work|Users|content)/\S+", json.dumps(outputs)) == []
    assert all(cell["execution_count"] for cell in cells(notebook, "code"))
    text = "\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))
    assert [target for target in links(text) if not (notebook.parent / target).exists()] == []
    # It begins by installing and naming the device.
    first, second = ("".join(cell["source"]) for cell in cells(notebook, "code")[:2])
    assert "KVJAX_WHEEL" in first and "device_kind" in second


@pytest.mark.parametrize("place", ["checkout", "wheel", "url", "beside", "gpu", "nowhere", "installed"])
@pytest.mark.parametrize("notebook", NOTEBOOKS[3:4], ids=lambda n: n.stem)
def test_a_notebook_installs_from_its_checkout_or_else_from_the_wheel(notebook, place, tmp_path, capsys, monkeypatch):
    named = {"beside": None, "nowhere": None, "url": "git+https://example.org/kvjax"}.get(place, "my.whl")
    monkeypatch.delenv("KVJAX_WHEEL", raising=False)
    if named is not None:
        monkeypatch.setenv("KVJAX_WHEEL", named)
    monkeypatch.chdir(notebook.parent if place in ("checkout", "installed") else tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi" if place == "gpu" else None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: tmp_path.iterdir() if "whl" in pattern else [])
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: ran.append(words[1:]))
    if place == "beside":
        (tmp_path / "kvjax-0.2.0.whl").touch()
    if place != "installed":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    cell = "".join(cells(notebook, "code")[0]["source"])
    if place == "nowhere":
        with pytest.raises(Exception, match="kvjax is not here: put its wheel") as caught:
            exec(cell, {})
        assert caught.value._render_traceback_() == [str(caught.value)]  # one sentence in a notebook
        return
    exec(cell, {})
    source = {"checkout": str(ROOT), "beside": str(tmp_path / "kvjax-0.2.0.whl")}.get(place, named)
    what = f"kvjax[train,plot] @ {named}" if place == "url" else f"{source}[train,plot{',cuda' * (place == 'gpu')}]"
    expected = ["-m", "pip", "install", "--quiet", *(["-e"] if place == "checkout" else []), what]
    assert ran == ([] if place == "installed" else [expected])
    said = "is installed, from this checkout" if place == "installed" else f"was installed from {source}"
    assert capsys.readouterr().out == f"kvjax {said}\n"


def test_the_first_cells_name_the_repository_that_the_package_names_and_no_other():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    firsts = ["".join(cells(notebook, "code")[0]["source"]) for notebook in NOTEBOOKS]
    expected = [url for name, url in urls.items() if name == "Source"]
    assert all(re.findall(r"git\+(https?://[^\s\"']+)", first) == expected for first in firsts)


def test_a_notebook_that_takes_too_long_is_named_with_the_flag(monkeypatch):
    spec = importlib.util.spec_from_file_location("notebooks_run", ROOT / "notebooks" / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)

    def execute(client):
        raise runner.CellTimeoutError("a cell timed out")

    monkeypatch.setattr(runner.NotebookClient, "execute", execute)
    with pytest.raises(ValueError, match=r"1-quickstart\.py: a cell took more than 7 s; give it longer with --timeout"):
        runner.execute(NOTEBOOKS[0].with_suffix(".py"), 7)
