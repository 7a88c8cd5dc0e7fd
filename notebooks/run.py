"""Runs the notebooks.

`python notebooks/run.py` checks that each .py and .ipynb are a pair, and executes all of them.
One that needs a package with an environment of its own is executed there, or where it is named.
`--write` stores what came out in the .ipynb files, made anew from the .py files. A cell that
fails, a pair that is out of step, and output that does not belong into a repository (error
streams, paths of this machine) end in exit code 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
OUTSIDE = {"6-rollouts-in-tunix": "tunix"}  # what needs a package that has its own environment
sys.path.insert(0, str(ROOT))

from models import commands, files  # noqa: E402

EXAMPLES = """examples:
  python notebooks/run.py
  python notebooks/run.py 1-quickstart --write
"""


def pairs() -> list[Path]:
    """Return the notebooks' sources, in order."""
    return sorted(FOLDER.glob("[0-9]-*.py"))


def difference(source: Path) -> str | None:
    """Return what keeps a .py and its .ipynb from being a pair; None where they are one."""
    stored = source.with_suffix(".ipynb")
    if not stored.is_file():
        return f"{stored.name} is missing"
    ours, theirs = (
        [(cell.cell_type, cell.source) for cell in notebook.cells]
        for notebook in (jupytext.read(source), nbformat.read(stored, as_version=4))
    )
    if len(ours) != len(theirs):
        return f"{source.name} has {len(ours)} cells, {stored.name} {len(theirs)}"
    number = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None
    )
    return (
        None if number is None else f"cell {number} of {source.name} and {stored.name} differ"
    )


def unfit(notebook: Any) -> Iterator[str]:
    """Yield what does not belong into a repository: error streams, paths of this machine."""
    paths = {str(ROOT), str(Path.home()), sys.prefix}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error" or output.get("name") == "stderr":
                text = output.get("text", "").strip()[:200]
                yield f"cell {number} writes to the error stream: {text!r}"
            elif any(path in str(output) for path in paths):
                yield f"cell {number} shows a path of this machine"


def joined(outputs: Sequence[Any]) -> list[Any]:
    """Join outputs printed in a row: how they were split depends on the machine's haste."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == "stream" and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def execute(source: Path, timeout: int) -> Any:
    """Return the notebook of a source with its outputs, run in a new kernel.

    Raises:
        ValueError: a cell failed, or its output is unfit.
    """
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random ones would make each run a change
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(ROOT)}},
    )
    try:
        client.execute()
    except CellTimeoutError:
        raise ValueError(
            f"{source.name}: a cell took more than {timeout} s; give it longer with --timeout."
        ) from None
    except CellExecutionError as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
        raise ValueError(f"{source.name}: {plain}") from None
    # AssertionError is nbclient's own, when it clears up behind a dead kernel.
    except (DeadKernelError, AssertionError):
        raise ValueError(
            f"{source.name}: its kernel died, perhaps for want of memory; run it again alone."
        ) from None
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
    found = list(unfit(notebook))
    if found:
        raise ValueError(f"{source.name}: {'; '.join(found)}.")
    notebook.metadata["language_info"] = {"name": "python"}  # without the interpreter's version
    return notebook


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    flags = argparse.ArgumentParser(
        prog="python notebooks/run.py",
        description="Checks that the notebooks are pairs and executes them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("names", nargs="*", help="which, such as 1-quickstart; all by default")
    flags.add_argument(
        "--write", action="store_true", help="store the outputs in the .ipynb files"
    )
    flags.add_argument("--check", action="store_true", help="only check that they are pairs")
    flags.add_argument(
        "--timeout", type=int, default=600, help="seconds that a cell may take (default 600)"
    )
    parsed = flags.parse_args(arguments)
    return commands.run(lambda: _run(parsed), "notebooks")


def _run(flags: argparse.Namespace) -> None:
    known = {source.stem: source for source in pairs()}
    unknown = [name for name in flags.names if name not in known]
    if unknown:
        raise ValueError(f"there is no notebook {unknown[0]!r}; there are {', '.join(known)}.")
    chosen = [known[name] for name in flags.names] or list(known.values())
    if not flags.write:
        differing = [text for text in map(difference, chosen) if text is not None]
        if differing:
            raise ValueError(f"{'; '.join(differing)}; run python notebooks/run.py --write.")
    if flags.check:
        print(f"{len(chosen)} pairs are in step")
        return
    for source in chosen:
        package = OUTSIDE.get(source.stem)
        if package and not flags.names and importlib.util.find_spec(package) is None:
            print(f"{source.stem}: left out, {package} is missing; run make outside-{package}")
            continue
        begun = time.monotonic()
        notebook = execute(source, flags.timeout)
        if flags.write:
            with files.replacing(source.with_suffix(".ipynb")) as temporary:
                nbformat.write(notebook, temporary)
        print(f"{source.stem}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
