"""Shared by evaluations on published data: records from a folder or the hub, published prompts, chat templates,
and prompts shortened in the middle.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import hashlib
import http.client
import io
import string
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import models
from evals import command_line, evaluator
from evals.evaluator import Answer, Group, TextSample
from kvjax._src import install
from models import commands, files, fingerprints
from models.commands.shared_flags import add_shared_flags, count

OFFICIAL = Path("official")  # the value of --prompts for the published wording


class PublishedFile(NamedTuple):
    """A file that a project publishes beside its data: its address, and the SHA-256 of its content."""

    address: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a data set.

    Attributes:
        prompt: a template with ``{context}`` and other fields, which ``fields`` makes of a record.
        new_tokens: the largest number of tokens of an answer.
        metric: maps an answer, a reference and its record to a number in [0, 1]; the best reference counts.
        references: returns the references of a record.
        first_line: only an answer's first line counts.
        line: an answer ends with its first line.
        chat: the prompt goes into the model's chat template, if that is asked for.
        answer: the beginning of the answer, after the prompt; in a chat after the header of the assistant's turn.
    """

    prompt: str
    new_tokens: int
    metric: Callable[[str, Any, Mapping[str, Any]], float]
    references: Callable[[Mapping[str, Any]], Sequence[Any]]
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    first_line: bool = False
    line: bool = False
    chat: bool = True
    answer: str = ""


def metric_of(function: Callable[..., float], **more: Any) -> Callable[[str, Any, Mapping[str, Any]], float]:
    """Return a task's metric from a function of an answer and a reference, which does not see the record."""
    return lambda answer, reference, record: function(answer, reference, **more)


def make_sample(
    task: Task, record: Mapping[str, Any], tokenizer: models.Tokenizer, length: int | None, *, chat: bool = False
) -> TextSample:
    """Make a record's prompt of at most ``length`` tokens; the middle of a longer one is left out.

    The tokens before the end of ``{context}`` are known before the question is. The record is the sample's ``extra``.
    In a ``chat`` the prompt goes into the model's chat template, unless the task excludes it.

    Raises:
        KeyError: the record lacks a field that the prompt needs.
        ValueError: ``chat`` is asked of a tokenizer without a chat template.
    """
    fields = {name: str(value) for name, value in task.fields(record).items()}
    before, after = task.prompt.split("{context}", 1)
    known = before.format(**fields) + fields["context"]
    chat = chat and task.chat
    known, text = prompt_text(tokenizer, known, after.format(**fields), task.answer.format(**fields), chat=chat)
    tokens = tokenizer.encode(text, add_special_tokens=not chat)
    context_end = common_prefix(tokenizer.encode(known, add_special_tokens=not chat), tokens)
    if length is not None:
        tokens, context_end = cut_middle(tokens, context_end, length)
    return TextSample(tokens, context_end, tuple(task.references(record)), record)


def prompt_text(
    tokenizer: models.Tokenizer, known: str, question: str, answer: str = "", *, chat: bool = False
) -> tuple[str, str]:
    """Return a prompt's text up to the end of ``known``, which is known before the question is, and the whole text.

    In a chat both parts are the user's turn, and the text holds all special tokens; ``answer``, the beginning of the
    answer, follows the template and is in no turn.

    Raises:
        ValueError: ``chat`` is asked of a tokenizer without a chat template.
    """
    if not chat:
        return known, known + question + answer
    whole = tokenizer.chat([{"role": "user", "content": known + question}])
    start = known.strip()  # a template may strip its messages
    place = whole.find(start)
    return whole[: place + len(start)] if place >= 0 else "", whole + answer


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that two texts share. A token across the boundary is not counted."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cut_middle(tokens: Sequence[int], context_end: int, length: int) -> tuple[list[int], int]:
    """Return the first and last half of a prompt that is too long, and the new end of its context."""
    left = len(tokens) - length
    if left <= 0:
        return list(tokens), context_end
    head = length // 2
    tail = length - head
    kept = [*tokens[:head], *tokens[len(tokens) - tail :]]
    return kept, max(head, context_end - left) if context_end > head else context_end


def score(task: Task, answer: Answer, sample: TextSample) -> float:
    """Return the best score of an answer over the references."""
    text = answer.text.lstrip("\n").split("\n")[0] if task.first_line else answer.text
    return max((task.metric(text, reference, sample.extra) for reference in sample.references), default=0.0)


def read_records(source: str, file: str, hub: Callable[[str], Iterator[str]] | None) -> Iterator[dict[str, Any]]:
    """Yield the records of a .jsonl or .csv file in a folder, or where ``source`` is "hub", from the lines on the hub.

    Raises:
        FileNotFoundError: the folder or file does not exist.
        ValueError: a line is no JSON object, or the file is no CSV.
    """
    lines = hub(file) if source == "hub" and hub is not None else _lines(Path(source), file)
    if file.endswith(".csv"):
        yield from _csv_records(source, file, lines)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = files.json_object(line)
        if record is None:
            raise ValueError(f"{file}, line {number}, of {source} is no JSON object; download the file again.")
        yield record


def hub_file(repository: str, file: str) -> Path:
    """Return the path of a data set's file from the hub; huggingface_hub downloads it and caches it.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: the hub or the file cannot be reached.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ImportError(f"{repository} is on the hub: {install.needed(['huggingface_hub'], 'hub')}") from None
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # the library raises many kinds
        raise FileNotFoundError(
            f"cannot get {file} of {repository} from the hub ({type(error).__name__}); name a local folder with --data."
        ) from None


def lines_of_hub(repository: str, file: str) -> Iterator[str]:
    """Read the lines of a data set's file from the hub; see :func:`hub_file`."""
    path = hub_file(repository, file)
    try:
        with path.open(encoding="utf-8") as content:
            yield from content
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); remove it, so that it is downloaded again.") from None


def published_text(file: PublishedFile) -> str:
    """Return the text of a published file, downloaded once and then kept in the user's cache folder.

    Raises:
        FileNotFoundError: the address cannot be reached.
        ValueError: the file at the address has another digest.
    """
    kept = None
    with contextlib.suppress(OSError):  # no cache folder, or nothing in it yet
        kept = files.cache_folder() / "published" / f"{file.sha256[:16]}-{file.address.rpartition('/')[2]}"
        content = kept.read_bytes()
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content.decode()
    try:
        with urllib.request.urlopen(file.address, timeout=60) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        reason = (commands.sentence(cause) if isinstance(cause, Exception) else str(cause)).rstrip(".")
        raise FileNotFoundError(f"cannot get {file.address} ({reason}); name a copy with --prompts.") from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(f"{file.address} has another digest than expected; look at it, and name it with --prompts.")
    if kept is not None:
        with contextlib.suppress(OSError):  # without a writable cache, the file is fetched again next time
            files.write_files(kept.parent, {kept.name: content})
    return content.decode()


def lines_of_zip(path: Path, name: str) -> Iterator[str]:
    """Read the lines of the file in a zip archive whose path ends with ``/name``.

    Raises:
        FileNotFoundError, ValueError: the archive holds no such file, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.namelist() if member.rpartition("/")[2] == name]
            if not found:
                raise FileNotFoundError(f"{path} holds no {name}; name a local folder with --data.")
            with archive.open(found[0]) as content:
                yield from io.TextIOWrapper(content, encoding="utf-8")
    except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, so that it is downloaded again.") from None


class DataSet(NamedTuple):
    """An evaluation on published data. Its module has these methods as its functions.

    Attributes:
        title: of the table and the picture.
        tasks: all tasks by name, in our own wording.
        prompts: the help text of ``--prompts``.
        read_tasks: returns the tasks with the prompts that the flags ask for.
        notes: returns the lines below the table about prompts and metrics.
        hub: returns the lines of a file on the hub; None if it has none.
        file: returns the file of a task.
        cut: whether the middle of a prompt that is too long is left out.
    """

    title: str
    tasks: Mapping[str, Task]
    prompts: str
    read_tasks: Callable[[argparse.Namespace], Mapping[str, Task]]
    notes: Callable[[argparse.Namespace], list[str]]
    hub: Callable[[str], Iterator[str]] | None = None
    file: Callable[[str], str] = "{}.jsonl".format
    cut: bool = True

    def add_flags(self, flags: argparse.ArgumentParser) -> None:
        """Add the command's flags."""
        command_line.add_model_flags(flags)
        command_line.add_setting_flags(flags, budgets="256", when="prompt")
        flags.add_argument("--data", help="the folder with the published files, one per task, or 'hub'")
        flags.add_argument("--tasks", default="all", help=f"{', '.join(self.tasks)}; several by comma")
        flags.add_argument("--samples", type=count, help="use only the first so many samples of each task")
        flags.add_argument(
            "--length", type=count,
            help="most tokens per prompt; the middle of longer ones is left out (default: what the model takes)",
        )  # fmt: skip
        add_shared_flags(flags, "chat", "out")
        flags.add_argument("--prompts", type=Path, help=self.prompts)

    def check(self, flags: argparse.Namespace) -> None:
        """Check the flags, and that the folder has each task's file, before any work.

        Raises:
            FileNotFoundError, ValueError: the folder or a task's file does not exist, or a flag is out of range.
        """
        if flags.data is None:
            raise ValueError("no data was named; give the folder with the published files, or 'hub', with --data.")
        if flags.data == "hub" and self.hub is None:
            raise ValueError(
                "--data is hub, but the records of these tasks come from files; give a folder with them, such as "
                f"{self.file(next(iter(self.tasks)))}."
            )
        chosen = command_line.choose("--tasks", flags.tasks, list(self.tasks))
        if flags.data != "hub" and not Path(flags.data).is_dir():
            raise FileNotFoundError(f"there is no folder {flags.data}; give --data a folder with the published files.")
        missing = [self.file(task) for task in chosen if not self._has(flags, task)]
        if missing and (flags.tasks != "all" or len(missing) == len(chosen)):
            raise FileNotFoundError(f"{flags.data} has no {', '.join(missing)}; name what is there with --tasks.")
        self.read_tasks(flags)

    def _has(self, flags: argparse.Namespace, task: str) -> bool:
        return flags.data == "hub" or (Path(flags.data) / self.file(task)).is_file()

    def make_groups(self, flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[Group]:
        """Make one group per chosen task from its records; ValueError where there are none, or no room for a prompt."""
        groups, tasks = [], self.read_tasks(flags)
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
        for name in command_line.choose("--tasks", flags.tasks, list(tasks)):
            if not self._has(flags, name):
                continue  # of all tasks, those whose files are there
            task = tasks[name]
            length = (flags.length or config.max_positions - task.new_tokens) if self.cut else None
            if length is not None and length < 2:
                raise ValueError(
                    f"the task {name} answers with {task.new_tokens} of {config.max_positions} positions; set --length."
                )
            records = list(read_records(flags.data, self.file(name), self.hub))[: flags.samples]
            if not records:
                raise ValueError(f"{self.file(name)} of {flags.data} is empty; download it again.")
            groups.append(
                Group(
                    name,
                    None,
                    len(records),
                    functools.partial(_draw, name, task, records, tokenizer, length, flags.chat),
                    task.new_tokens,
                    functools.partial(score, task),
                    end=(*config.eos, *newline) if task.line else None,
                    data=fingerprints.digest([task.prompt, task.answer, task.new_tokens, records]),
                )
            )
        return groups

    def command(self, flags: argparse.Namespace) -> None:
        """Run the evaluation."""
        evaluator.command(flags, self.make_groups, title=self.title, notes=self.notes, check=self.check)


def with_prompts(
    tasks: Mapping[str, Task], prompts: Mapping[str, Any], lengths: Mapping[str, Any], source: str | Path
) -> dict[str, Task]:
    """Return the tasks with other prompts and numbers of new tokens.

    Raises:
        ValueError: a prompt does not have {context} once, or a number of new tokens is no integer of at least 1.
    """
    found = dict(tasks)
    for name, task in tasks.items():
        prompt, new = prompts.get(name, task.prompt), lengths.get(name, task.new_tokens)
        if not isinstance(prompt, str) or prompt.count("{context}") != 1:
            raise ValueError(f"{source}: the prompt of {name} does not have {{context}} exactly once; write it once.")
        try:
            list(string.Formatter().parse(prompt))
        except ValueError as error:
            raise ValueError(f"{source}: the prompt of {name} has a stray brace ({error}); double it.") from None
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise ValueError(f"{source}: the answer of {name} has {new!r} tokens; give an integer of at least 1.")
        found[name] = dataclasses.replace(task, prompt=prompt, new_tokens=new)
    return found


def read_tasks(tasks: Mapping[str, Task], path: Path | None) -> Mapping[str, Task]:
    """Return the tasks with the prompts of a JSON file (:func:`with_prompts`); without one, as they are."""
    return tasks if path is None else with_prompts(tasks, read_object(path), {}, path)


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; see :func:`parse_object`."""
    return parse_object(files.read_text(path, "JSON"), path)


def parse_object(text: str, source: str | Path) -> dict[str, Any]:
    """Parse the object in a JSON text; ``source`` says in the ValueError where it came from."""
    content = files.json_object(text)
    if content is None:
        raise ValueError(f"{source} is no JSON object; expected prompts by task.")
    return content


def _draw(
    name: str, task: Task, records: Sequence[Mapping[str, Any]], tokenizer: Any, length: int | None, chat: bool
) -> list[TextSample]:
    found = []
    for number, record in enumerate(records, 1):
        try:
            found.append(make_sample(task, record, tokenizer, length, chat=chat))
            score(task, Answer([], ""), found[-1])  # a record that cannot be scored fails before anything is answered
        except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{name}, record {number}, lacks what its prompt or score needs ({error}); is it the published file?"
            ) from None
    return found


def _csv_records(source: str, file: str, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # a field may be a whole book
    try:
        for number, record in enumerate(csv.DictReader(lines, restkey="", strict=True), 1):
            if "" in record or None in record.values():
                raise csv.Error(f"record {number} has other columns than the header")
            yield record
    except csv.Error as error:
        raise ValueError(f"{file} of {source} is no CSV ({error}); download the file again.") from None


def _lines(folder: Path, file: str) -> Iterator[str]:
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; name a folder that has it with --data.")
    with path.open(encoding="utf-8") as content:
        try:
            yield from content
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; download it again.") from None
