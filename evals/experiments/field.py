"""All methods in one picture: recall against the bytes that a cache takes, from the JSON of studies that were run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evals import report
from models import commands

EXAMPLES = """examples:
  python -m evals field docs/results/smollm2/methods.json docs/results/smollm2/eight-bits.json --plot field.png
"""
PANELS = {"known": "question known", "unknown": "question unknown"}
WIDE = ("float32", "bfloat16", "float16")
NAMED = 7  # methods with a colour and a name, per panel; both panels share the colours
MARKERS = "osv^"


class Place(NamedTuple):
    """A run's place in the picture: ``share`` is its cache's bytes over those of the full cache of its own floats.

    A cache in eight bits counts against the full cache in the floats that its study names beside it.
    """

    method: str
    question: str
    share: float
    recall: float
    eight_bits: bool


def places(study: dict[str, Any]) -> list[Place]:
    """Return the runs of a study's JSON, by their bytes; a full cache is left out, except in eight bits.

    Raises:
        ValueError: the study has no run of the full cache in floats for a question.

    Example:
        >>> from evals.experiments.field import places
        >>> full = dict(
        ...     policy="full", budget=None, question="known", cache_bytes=100,
        ...     recall=0.8
        ... )
        >>> places(
        ...     {
        ...         "results": [
        ...             full,
        ...             full | dict(policy="h2o", budget=8, cache_bytes=25, recall=0.4),
        ...         ]
        ...     }
        ... )
        [Place(method='h2o', question='known', share=0.25, recall=0.4, eight_bits=False)]
    """
    full = [result for result in study["results"] if result["budget"] is None and _is_wide(result)]
    whole = {(result["question"], result.get("cache_dtype")): result["cache_bytes"] for result in full}
    named = {result["cache_dtype"] for result in full if result.get("cache_dtype")}
    found = []
    for result in study["results"]:
        question, eight_bits = result["question"], not _is_wide(result)
        # None is the model's dtype; eight bits are compared with the floats that were asked for beside them.
        floats = min(named, default=None) if eight_bits else result.get("cache_dtype")
        if (question, floats) not in whole:
            raise ValueError(f"the study {study.get('study')!r} has no run of the full cache, question {question!r}.")
        if result["budget"] is not None or eight_bits:
            share = result["cache_bytes"] / whole[question, floats]
            found.append(Place(result["policy"], question, share, result["recall"], eight_bits))
    return found


def _is_wide(result: dict[str, Any]) -> bool:
    return result.get("cache_dtype") in (None, *WIDE)


def best(found: Iterable[Place]) -> list[Place]:
    """Return the places that no other reaches with as few bytes, fewest bytes first."""
    kept: list[Place] = []
    for place in sorted(found, key=lambda place: (place.share, -place.recall)):
        if not kept or place.recall > kept[-1].recall:
            kept.append(place)
    return kept


def table(found: Sequence[Place]) -> str:
    """Return a table of the best places for each question."""
    rows = [
        (PANELS[question], f"{place.share:.0%}", f"{place.recall:.2f}", _name(place))
        for question in PANELS
        for place in best(place for place in found if place.question == question)
    ]
    return report.Table(("question", "bytes", "recall", "policy"), rows, left=1)


def _name(place: Place) -> str:
    method = re.sub("file='[^']*'", "file", place.method)  # its path is in the study's JSON
    return f"{method}, eight bits" if place.eight_bits else method


def figure(found: Sequence[Place], full: dict[str, float], path: Path) -> None:
    """Draw a panel per question: all methods in grey, those of the best places in colour, and the best places' line."""
    plt = report.pyplot()
    drawing, axes = plt.subplots(1, 2, figsize=(11, 6.8), sharey=True, layout="constrained")
    fronts = {asked: best(place for place in found if place.question == asked) for asked in PANELS}
    names = {
        asked: list(dict.fromkeys(_name(place) for place in reversed(front)))[:NAMED] for asked, front in fronts.items()
    }
    coloured = list(dict.fromkeys(name for some in names.values() for name in some))
    for axis, (question, title) in zip(axes, PANELS.items(), strict=True):
        own = [place for place in found if place.question == question]
        front, named = fronts[question], names[question]
        for method in dict.fromkeys(_name(place) for place in own):
            line = sorted((place for place in own if _name(place) == method), key=lambda place: place.share)
            chosen = method in named
            number = coloured.index(method) if chosen else 0
            marker = MARKERS[number // len(report.COLOURS) % len(MARKERS)]
            axis.plot(
                [place.share for place in line], [place.recall for place in line],
                color=report.colour(number) if chosen else report.GREY, marker=marker, markersize=5 if chosen else 3,
                markerfacecolor="none" if line[0].eight_bits else None, linewidth=1.6 if chosen else 0.6,
                alpha=1 if chosen else 0.35, label=method if chosen else None, zorder=3 if chosen else 2,
            )  # fmt: skip
        axis.step(
            [place.share for place in front], [place.recall for place in front], where="post", color="#999999",
            linewidth=1, linestyle=":", label="the best for its bytes", zorder=1,
        )  # fmt: skip
        axis.axhline(full[question], color="#999999", linewidth=1, linestyle="--", label="full cache", zorder=1)
        axis.set_xscale("log", base=2)
        ticks = [share for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if share <= 1.3 * max(p.share for p in own)]
        axis.set_xticks(ticks, [f"{100 * share:.3g}%" for share in ticks])
        axis.minorticks_off()
        report.plain(axis)
        axis.tick_params(labelsize=9.5)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("bytes, over those of the full cache of floats", fontsize=10)
        axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12))
    axes[0].set_ylabel("exact recall", fontsize=10)
    axes[0].set_ylim(-0.03, 1.03)
    drawing.suptitle(f"{len({place.method for place in found})} methods: recall against bytes", fontsize=13)
    with commands.replacing(path) as temporary:
        drawing.savefig(temporary, dpi=130)
    plt.close(drawing)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("studies", nargs="+", type=Path, help="JSON files of `evals ablation`, of one model and length")
    flags.add_argument("--plot", type=Path, help="write the picture here (.png, .svg or .pdf)")


def command(flags: argparse.Namespace) -> None:
    """Read the studies, print the best places, and draw all."""
    if flags.plot is not None:
        report.check_plot(flags.plot)
    commands.check_outputs([flags.plot])
    found: list[Place] = []
    full: dict[str, float] = {}
    for path in flags.studies:
        study = _read(path)
        found += places(study)
        for result in study["results"]:
            if result["budget"] is None and _is_wide(result):
                full.setdefault(result["question"], result["recall"])
    missing = [title for question, title in PANELS.items() if question not in full]
    if missing:
        raise ValueError(f"no study has runs with the {missing[0]}; give one that has, such as that of methods.")
    print(table(found))
    if flags.plot is not None:
        figure(found, full, flags.plot)
        print(f"picture: {flags.plot}")


def _read(path: Path) -> dict[str, Any]:
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON; give a file that `evals ablation --json` wrote.") from None
    if not isinstance(study, dict) or "results" not in study or "study" not in study:
        raise ValueError(f"{path} is not a study; give a file that `evals ablation --json` wrote.")
    needed = ("policy", "budget", "question", "cache_bytes", "recall")
    missing = [name for name in needed if any(name not in result for result in study["results"])]
    if missing:
        raise ValueError(f"{path} has results without {missing[0]}; give a study of recall, such as that of methods.")
    return study
