"""What evaluations on published data sets share: records from a folder or the hub, prompts cut in the middle."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
from evals import evaluator
from evals.evaluator import Answer, Group, TextSample
from evals.ruler import common_prefix
from models import commands, provenance


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a data set.

    Attributes:
        prompt: with ``{context}`` and the other fields of a record, or those that ``fields`` makes of one.
        new_tokens: how many tokens an answer may have.
        metric: from an answer, a reference and its record to a number in [0, 1]; the best reference counts.
        references: the references of a record.
        first_line: only an answer's first line counts.
        line: an answer ends with its line.
        chat: the prompt goes into the model's chat template, where that is asked for.
    """

    prompt: str
    new_tokens: int
    metric: Callable[[str, Any, Mapping[str, Any]], float]
    references: Callable[[Mapping[str, Any]], Sequence[Any]]
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    first_line: bool = False
    line: bool = False
    chat: bool = True


def make_sample(
    task: Task, record: Mapping[str, Any], tokenizer: models.Tokenizer, length: int, *, chat: bool = False
) -> TextSample:
    """A record's prompt, at most ``length`` tokens: of a longer one the middle is left out.

    The tokens before the end of ``{context}`` are known when the question is not yet.
    """
    fields = {name: str(value) for name, value in task.fields(record).items()}
    before, after = task.prompt.split("{context}", 1)
    known = before.format(**fields) + fields["context"]
    text = known + after.format(**fields)
    special = not (chat and task.chat)
    if not special:
        whole = tokenizer.chat([{"role": "user", "content": text}])
        start = known.strip()  # a template may strip its messages
        known, text = whole[: whole.find(start) + len(start)], whole
    tokens = tokenizer.encode(text, add_special_tokens=special)
    context_end = common_prefix(tokenizer.encode(known, add_special_tokens=special), tokens)
    tokens, context_end = cut_middle(tokens, context_end, length)
    return TextSample(tokens, context_end, tuple(task.references(record)), record)


def cut_middle(tokens: Sequence[int], context_end: int, length: int) -> tuple[list[int], int]:
    """The first and last half of a prompt that is too long, and where its context ends now.

    Example:
        >>> from evals import documents
        >>> documents.cut_middle(list(range(10)), 8, 6)
        ([0, 1, 2, 7, 8, 9], 4)
    """
    left = len(tokens) - length
    if left <= 0:
        return list(tokens), context_end
    head = length // 2
    tail = length - head
    kept = [*tokens[:head], *tokens[len(tokens) - tail :]]
    return kept, max(head, context_end - left) if context_end > head else context_end


def score(task: Task, answer: Answer, sample: TextSample) -> float:
    """The best of the references' scores."""
    text = answer.text.lstrip("\n").split("\n")[0] if task.first_line else answer.text
    return max((task.metric(text, reference, sample.extra) for reference in sample.references), default=0.0)


def read_records(source: str, file: str, hub: Callable[[str], Iterator[str]]) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file in a folder, or of the hub where ``source`` is "hub".

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a line that is no JSON object.
    """
    lines = hub(file) if source == "hub" else _lines(Path(source), file)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number}, of {source} is no JSON object; download the file again.")
        yield record


def hub_file(repository: str, file: str) -> Path:
    """A data set's file from the hub, as huggingface_hub keeps it.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: the hub or the file cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ImportError(
            "data from the hub needs huggingface_hub; install it with: pip install 'kvjax[hub]'."
        ) from None
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # the library raises many kinds
        raise FileNotFoundError(
            f"cannot get {file} of {repository} from the hub ({type(error).__name__}); name a local folder by --data."
        ) from None


def lines_of_zip(path: Path, name: str) -> Iterator[str]:
    """The lines of the file in a zip archive whose path ends with ``/name``.

    Raises:
        FileNotFoundError: it is not among them.
    """
    with zipfile.ZipFile(path) as archive:
        found = [member for member in archive.namelist() if member.rpartition("/")[2] == name]
        if not found:
            raise FileNotFoundError(f"{path} holds no {name}; name a local folder by --data.")
        with archive.open(found[0]) as content:
            yield from io.TextIOWrapper(content, encoding="utf-8")


def add_flags(flags: argparse.ArgumentParser, tasks: Sequence[str], prompts: str) -> None:
    """The flags of an evaluation on published data."""
    evaluator.add_model_flags(flags)
    evaluator.add_setting_flags(flags, budgets="256", when="prompt")
    flags.add_argument("--data", help="a folder with a .jsonl file for each task, or 'hub'")
    flags.add_argument("--tasks", default="all", help=f"{', '.join(tasks)}; several by comma")
    flags.add_argument("--samples", type=int, help="the first samples of each task only")
    flags.add_argument(
        "--length", type=int, help="tokens of a prompt, its middle left out beyond; what the model has by default"
    )
    flags.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    flags.add_argument("--prompts", type=Path, help=prompts)
    flags.add_argument("--out", type=Path, help="a folder for the results; a killed run goes on there")


def check(
    flags: argparse.Namespace,
    tasks: Mapping[str, Task],
    file_of: Callable[[str], str],
    read: Callable[[Path], Mapping[str, Task]],
) -> None:
    """Refuses flags that could not work, and a folder in which a task's file is missing."""
    if flags.data is None:
        raise ValueError("no data was named; give a folder with .jsonl files, or 'hub', by --data.")
    for name in ("samples", "length"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise ValueError(f"--{name} is {getattr(flags, name)}; give at least 1.")
    chosen = evaluator.choose("--tasks", flags.tasks, list(tasks))
    if flags.data != "hub":
        if not Path(flags.data).is_dir():
            raise FileNotFoundError(f"there is no folder {flags.data}; name one with .jsonl files by --data.")
        missing = [file_of(task) for task in chosen if not (Path(flags.data) / file_of(task)).is_file()]
        if missing and (flags.tasks != "all" or len(missing) == len(chosen)):
            raise FileNotFoundError(
                f"{flags.data} has no {', '.join(missing)}; name the tasks that are there by --tasks."
            )
    if flags.prompts is not None:
        read(flags.prompts)


def present(flags: argparse.Namespace, tasks: Mapping[str, Task], file_of: Callable[[str], str]) -> list[str]:
    """The chosen tasks; of all, those whose files are there."""
    chosen = evaluator.choose("--tasks", flags.tasks, list(tasks))
    return [t for t in chosen if flags.data == "hub" or (Path(flags.data) / file_of(t)).is_file()]


def make_groups(
    flags: argparse.Namespace,
    config: models.Config,
    tokenizer: models.Tokenizer,
    tasks: Mapping[str, Task],
    file_of: Callable[[str], str],
    hub: Callable[[str], Iterator[str]],
) -> list[Group]:
    """A group a task."""
    groups = []
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
    for name in present(flags, tasks, file_of):
        task = tasks[name]
        length = flags.length or config.max_positions - task.new_tokens
        if length < 2:
            raise ValueError(
                f"the task {name} answers with up to {task.new_tokens} tokens, and the model has "
                f"{config.max_positions} positions; give --length, or leave the task out."
            )
        records = list(read_records(flags.data, file_of(name), hub))[: flags.samples]
        if not records:
            raise ValueError(f"{file_of(name)} of {flags.data} is empty; download it again.")
        groups.append(
            Group(
                name,
                None,
                len(records),
                functools.partial(_draw, name, task, records, tokenizer, length, flags.chat),
                task.new_tokens,
                functools.partial(score, task),
                end=(*config.eos, *newline) if task.line else None,
                data=provenance.digest(records),
            )
        )
    return groups


def with_prompts(
    tasks: Mapping[str, Task], prompts: Mapping[str, Any], lengths: Mapping[str, Any], source: Path
) -> dict[str, Task]:
    """The tasks with other prompts and numbers of new tokens.

    Raises:
        ValueError: a prompt without {context}, or a number that is none.
    """
    found = dict(tasks)
    for name, task in tasks.items():
        prompt, new = prompts.get(name, task.prompt), lengths.get(name, task.new_tokens)
        if not isinstance(prompt, str) or prompt.count("{context}") != 1:
            raise ValueError(f"{source}: the prompt of {name} has no {{context}}, or several; write it once.")
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise ValueError(f"{source}: {name} may answer with {new!r} tokens; give an integer from 1.")
        found[name] = dataclasses.replace(task, prompt=prompt, new_tokens=new)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another content.
    """
    text = commands.read_text(path, "JSON")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; expected prompts by task.")
    return content


def _draw(
    name: str, task: Task, records: Sequence[Mapping[str, Any]], tokenizer: Any, length: int, chat: bool
) -> list[TextSample]:
    found = []
    for number, record in enumerate(records, 1):
        try:
            found.append(make_sample(task, record, tokenizer, length, chat=chat))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{name}, record {number}, lacks what its prompt or score needs ({error}); is it the published file?"
            ) from None
    return found


def _lines(folder: Path, file: str) -> Iterator[str]:
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; name a folder with it by --data.")
    with path.open(encoding="utf-8") as content:
        try:
            yield from content
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; download it again.") from None
