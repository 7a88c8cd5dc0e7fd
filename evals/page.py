"""A self-contained page of a results folder: accuracy against memory and time, one panel per task, a sortable table."""

from __future__ import annotations

import argparse
import html
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals import command_line, evaluations, results, run_settings, statistics, summaries, sweep
from models import commands, files

LEAST_BATCHES = 3  # for an interval of the time per token
TEMPLATE = Path(__file__).with_name("page.html")
EXAMPLES = """examples:
  python -m evals report runs/small
  python -m evals report runs/ruler --html ruler.html
"""


def figures(folder: Path) -> dict[str, Any]:
    """Return what the page shows: the lines of all settings, the command that reproduces each, and the environments."""
    header = results.read_header(folder)
    records = results.read_records(folder)
    if not records:
        raise ValueError(f"{folder} holds no results yet; run its command first: {header['command']}")
    if "cache_bytes" not in records[0]:
        raise ValueError(f"{folder} is of {header['evaluation']}, whose records are no answers under a budget.")
    parts: dict[tuple[str, str], sweep.Part] = {}
    if header["evaluation"] == "sweep":
        content = {name: value for name, value in header["settings"].items() if not name.endswith(" holds")}
        parts = {(part.flags.model, part.flags.name): part for part in sweep.plan(content)}
    lines = summaries.summarise(records)
    times = _decode_times(records)
    for line in lines:
        line["decode_milliseconds"] = times.get(tuple(line[name] for name in results.SETTING))
        part = parts.get((line["model"], line["evaluation"]))
        command = header["command"] if part is None else command_line.command_text(part.flags)
        of_any_length = part is not None and not hasattr(part.flags, "lengths")
        line["command"] = _line_command(command, {**line, "length": None} if of_any_length else line)
        line["kind"] = {"full": "full", run_settings.RECENCY: "recency"}.get(line["policy"], "policy")
    short: dict[str, str] = {}
    for evaluation in {line["evaluation"] for line in lines}:
        short |= getattr(evaluations.with_own().get(evaluation), "SHORT", {})
    return {
        "title": f"{header['evaluation']}: {folder.resolve().name}",
        "command": header["command"],
        "environments": header["environments"],
        "samples": len(records),
        "short": short,
        "rows": lines,
    }


def _decode_times(records: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], tuple[float, float, float]]:
    """Return the milliseconds of a decoded token for each setting: the mean over batches, with its 95% interval."""
    batches: dict[tuple[Any, ...], set[tuple[str, float]]] = {}
    for record in records:
        tokens, seconds = record["decode"]
        if tokens:
            setting = tuple(record.get(name) for name in results.SETTING)
            batches.setdefault(setting, set()).add((record["task"], 1000 * seconds / tokens))
    return {
        setting: statistics.mean_interval(sorted(time for _, time in found))
        for setting, found in batches.items()
        if len(found) >= LEAST_BATCHES
    }


def _line_command(command: str, line: Mapping[str, Any]) -> str:
    """Return the command line of one line, from that of the whole run."""
    wanted = {"--policies": line["policy"], "--when": line["when"], "--question": line["question"]}
    if line["budget"] is not None:
        wanted["--budgets"] = str(line["budget"])
    if line["length"] is not None:
        wanted["--lengths"] = str(line["length"])
    made, words = list[str](), iter(shlex.split(command))
    for word in words:
        if word in wanted or word in ("--allocations", "--against"):
            made += [word, wanted.pop(word)] if word in wanted else []
            next(words, None)  # its value
        else:
            made.append(word)
    return commands.shell_line([*made, *itertools.chain.from_iterable(wanted.items())])


def render(template: Path, title: str, data: Mapping[str, Any]) -> str:
    """Fill ``{{title}}`` and ``{{data}}`` of a template, and return the page.

    It takes one pass: filled-in text is not searched again, and nothing in the data can end the script that holds it.
    """
    content = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    content = content.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    parts = {"title": html.escape(title), "data": content}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template.read_text(encoding="utf-8"))


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("folder", type=Path, help="a folder that --out or sweep made; its run may still be going")
    flags.add_argument("--html", type=Path, help="where to write the page (default: report.html in the folder)")


def command(flags: argparse.Namespace) -> None:
    """Write the page."""
    path = flags.folder / "report.html" if flags.html is None else flags.html
    found = figures(flags.folder)
    with files.replacing(path) as temporary:
        temporary.write_text(render(TEMPLATE, found["title"], found), encoding="utf-8")
    print(f"page: {path} ({len(found['rows'])} rows, {found['samples']:,} samples)")
