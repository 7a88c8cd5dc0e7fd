"""Sweeps: a file of models, policies, allocations, budgets and tasks becomes one folder of results.

The examples below begin with such a file. ``tasks`` has a table per evaluation, with its own flags. ``first = 100``
answers the first 100 samples of each task and length alone, and may grow later. A killed run is resumed.
``python -m evals report FOLDER`` makes a page of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tqdm import tqdm

from evals import command_line, evaluations, evaluator, report, results, run_settings, summaries
from models import commands, files, hosts
from models.commands import provenance
from models.commands.shared_flags import HOSTS, add_shared_flags

# What all evaluations of a sweep share: names that may be lists in the file, and single values.
SHARED = ("policies", "allocations", "against", "budgets", "when", "evict_every", "question")
PLAIN = ("block", "batch", "seed", "dtype", "cache_dtype", "reading_budget", "mesh", "import")
OWN = ("models", "tasks", "first")  # of the sweep itself
EXAMPLES = """a file:
  models = ["retriever"]
  policies = ["full", "snapkv", "snapkv+caote"]
  allocations = ["uniform", "adakv"]
  budgets = [64, 0.25]
  when = ["prompt"]
  [tasks.needle]
  lengths = [512]
  [tasks.ruler]
  tasks = ["niah_single_1", "vt"]
  lengths = [1024]
  samples = 4

examples:
  python -m evals sweep small.toml --out runs/small
  python -m evals report runs/small
"""


class Part(NamedTuple):
    """One model in one evaluation: the flags of the evaluation's own command line, and their settings."""

    flags: argparse.Namespace
    settings: list[run_settings.Setting]


def plan(content: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a sweep, model by model, with their settings checked; ValueError where one is invalid."""
    if unknown := set(content) - {*OWN, *SHARED, *PLAIN}:
        raise ValueError(f"the sweep has {', '.join(sorted(unknown))}; expected {', '.join((*OWN, *SHARED, *PLAIN))}.")
    models, tasks = content.get("models", ["retriever"]), content.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not all(isinstance(options, dict) for options in tasks.values()):
        raise ValueError("the sweep has no tasks; write one table per evaluation, such as [tasks.ruler].")
    if not isinstance(models, list) or not models or not all(isinstance(model, str) for model in models):
        raise ValueError(f"models is {models!r}; give a list of folders or names.")
    if not isinstance(first := content.get("first", 1), int) or first < 1:
        raise ValueError(f"first is {first!r}; give the number of a task's samples that are answered, from 1.")
    if not isinstance(modules := content.get("import", ""), str):
        raise ValueError(f"import is {modules!r}; give the name of a module, or several by comma.")
    commands.import_modules(modules)
    return [_part(content, model, name, options) for model in models for name, options in tasks.items()]


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("file", type=Path, help="a TOML file: models, policies, allocations, budgets, tasks")
    add_shared_flags(flags, "out", *HOSTS, out=dict(required=True))


def command(flags: argparse.Namespace) -> None:
    """Run a sweep: check all of it, then run model by model and task by task, and name what failed at the end."""
    content = read(flags.file)
    answered = answer(content, flags, f"python -m evals sweep {flags.file} --out {flags.out}")
    compared = summaries.compare(answered.store.records, run_settings.baseline(answered.parts[0].flags))
    if lines := summaries.summarise(answered.store.records):
        figures = {"evaluation": "sweep", "settings": content, "results": lines, "comparisons": compared}
        made = provenance.facts(flags.invocation, content.get("seed", 0), answered.store.fingerprints)
        files.write_json(flags.out / "figures.json", {**made, **figures})
    show(lines, compared)
    print(f"results: {flags.out}; a page of them: python -m evals report {flags.out}")
    answered.check()


class SweepRun(NamedTuple):
    """A sweep that was run: its records, and the groups that failed, with their errors."""

    store: results.Results
    parts: list[Part]
    failed: list[str]

    def check(self) -> None:
        """Raise ValueError if a group failed."""
        if self.failed:
            count, named = len(self.failed), "; ".join(self.failed)
            raise ValueError(f"{count} of the sweep's groups failed, the others are done: {named}")


def answer(content: Mapping[str, Any], flags: argparse.Namespace, written: str) -> SweepRun:
    """Check all of a sweep, then answer its samples, model by model and task by task; a killed run goes on.

    ``flags`` say where to write (``out``), and which process of several this is; ``written`` is the command that makes
    the records.

    Raises:
        ValueError: the content cannot be run, or the folder holds something else.
    """
    parts = plan(content)
    for part in parts:
        _evaluation(part.flags.name).check(part.flags)
    digests = {
        f"{part.flags.name} {name}": value
        for part in parts
        for name, value in command_line.decisive_flags(part.flags).items()
        if name.endswith(" holds")
    }
    store = results.Results(flags.out, "sweep", {**content, **digests}, written)
    store.check()
    by_model = {
        name: [part for part in parts if part.flags.model == name]
        for name in dict.fromkeys(part.flags.model for part in parts)
    }
    if wrong := [line for own in by_model.values() for line in _cannot_be(own)]:
        raise ValueError(f"{len(wrong)} of the sweep's groups cannot run; correct or leave out: {'; '.join(wrong)}")
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        progress: Any = None
        for own in by_model.values():
            try:
                model, tokenizer = command_line.load(own[0].flags)
                aids_of_each = [evaluator.load_aids(part.flags, part.settings, model, tokenizer) for part in own]
                for part, aids in zip(own, aids_of_each, strict=True):
                    feed = evaluator.feed_of(part.flags, aids)
                    evaluator.check_groups(model, _groups(part, model.config, tokenizer), part.settings, feed)
            except ValueError as error:
                if progress is None or hosts.several():  # of several processes only this one may have it
                    raise
                failed.append(f"{own[0].flags.model}: {error}")  # an earlier model has run, and its results stay
                continue
            if progress is None:  # only now, so that nothing is printed before an error
                stack.enter_context(store)
                progress = stack.enter_context(commands.progress_bar("sample", total=0))
            for part, aids in zip(own, aids_of_each, strict=True):
                failed += _run(part, aids, model, tokenizer, store, progress)
        progress.set_description("done")
    return SweepRun(store, parts, failed)


def show(lines: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]] = ()) -> None:
    """Print a table per evaluation, and one of its comparisons."""
    for name in dict.fromkeys(line["evaluation"] for line in lines):
        found = [line for line in lines if line["evaluation"] == name]
        short = getattr(_evaluation(name), "SHORT", {})
        of_it = [line for line in compared if line["evaluation"] == name]
        report.show(report.task_table(found, recency=run_settings.RECENCY, short=short), report.comparison_table(of_it))
        print()


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file; ValueError where it is none."""
    text = files.read_text(path, "TOML")
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}); correct that line.") from None


def _part(content: Mapping[str, Any], model: str, name: str, options: Mapping[str, Any]) -> Part:
    parser = _Flags(add_help=False, allow_abbrev=False)
    _evaluation(name).add_flags(parser)
    closed = {"model", "json", "plot", "out", *HOSTS, *SHARED, *PLAIN}
    line = ["--model", model]
    for option, value in options.items():
        if option in closed or not any(action.dest == option for action in parser._actions):
            known = sorted(action.dest for action in parser._actions if action.dest not in closed)
            raise ValueError(f"[tasks.{name}] has {option!r}; expected {', '.join(known)}.")
        line += _flag(parser, option, value)
    for option in (*SHARED, *PLAIN):
        if option in content:
            line += _flag(parser, option, content[option])
    try:
        flags = parser.parse_args(line)
    except ValueError as error:
        raise ValueError(f"the sweep, [tasks.{name}]: {error}") from None
    flags.name, flags.first = name, content.get("first")
    del flags.invocation  # which is the sweep's
    return Part(flags, run_settings.make_settings(flags))


def _flag(parser: argparse.ArgumentParser, option: str, value: Any) -> list[str]:
    """Return a value of the file as words of a command line: a list by comma, or as several words for such a flag."""
    name = f"--{option.replace('_', '-')}"
    several = next(action for action in parser._actions if action.dest == option).nargs == "+"
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, list):
        words = [str(part) for part in value]
        return [name, *words] if several else [name, ",".join(words)]
    if isinstance(value, str | int | float):
        return [name, str(value)]
    raise ValueError(f"{option} is {value!r}; give a text, a number, or a list of these.")


def _run(
    part: Part, aids: evaluator.Aids, model: Any, tokenizer: Any, store: results.Results, progress: tqdm
) -> list[str]:
    """Answer a part's groups, and return which of them failed and why."""
    flags, settings = part
    labels = {"model": flags.model, "evaluation": flags.name}
    failed = []
    groups = _groups(part, model.config, tokenizer)
    try:
        found = evaluator.digests(model, tokenizer, aids.networks, groups)
        store.check_digests(labels, found, [network.name for network in aids.networks])
    except ValueError as error:
        if hosts.several():
            raise
        return [f"{flags.model}, {flags.name}: {error}"]
    counts = [group.size * sum(setting.question in group.questions for setting in settings) for group in groups]
    progress.total = (progress.total or 0) + sum(counts)
    own = getattr(_evaluation(flags.name), "run", None)  # which may read a text once for several groups
    for together in [[group] for group in groups] if own is None else [groups]:
        try:
            (own or evaluator.run)(
                model, tokenizer, together, settings, store, labels=labels, progress=progress,
                feed=evaluator.feed_of(flags, aids),
            )  # fmt: skip
        except ValueError as error:
            if hosts.several():
                raise
            failed.append(_label(flags, together[0], error))
    return failed


def _groups(part: Part, config: Any, tokenizer: Any) -> list[evaluator.Group]:
    groups = _evaluation(part.flags.name).make_groups(part.flags, config, tokenizer)
    return groups if part.flags.first is None else [group.first(part.flags.first) for group in groups]


def _evaluation(name: str) -> Any:
    known = evaluations.with_own()
    found = known.find(name)
    if not hasattr(found, "make_groups"):
        able = [own for own in known if hasattr(known[own], "make_groups")]
        raise ValueError(f"the sweep has the unknown evaluation {name!r}; expected {', '.join(able)}.")
    return found


def _cannot_be(parts: Sequence[Part]) -> list[str]:
    """Return which parts of one model cannot be answered, and why, without reading its weights."""
    config, tokenizer = command_line.describe(parts[0].flags)
    wrong = []
    for part in parts:
        flags = part.flags
        try:
            groups = _groups(part, config, tokenizer)
        except ValueError as error:
            wrong.append(f"{flags.model}, {flags.name}: {error}")
            continue
        for group in groups:
            try:
                group.few()
            except ValueError as error:
                wrong.append(_label(flags, group, error))
    return wrong


def _label(flags: argparse.Namespace, group: evaluator.Group, error: ValueError) -> str:
    where = "" if group.length is None else f" at {group.length}"
    return f"{flags.model}, {group.task}{where}: {error}"


class _Flags(commands.Parser):
    """A parser that raises a ValueError in place of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}.")
