"""Reads what published data sets need: records from a folder or the hub, published prompts, in a chat or not, cut in
the middle.
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
import json
import string
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import models
from evals import evaluator
from evals.evaluator import Answer, Group, TextSample
from models import commands, provenance

OFFICIAL = Path("official")  # what --prompts says for the published wording


class Published(NamedTuple):
    """A file that a project publishes beside its data: its address, and the SHA-256 of what it holds."""

    address: str
    sha256: str


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
        answer: what the answer begins with, behind the prompt; in a chat behind the header of the assistant's turn.
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


def make_sample(
    task: Task, record: Mapping[str, Any], tokenizer: models.Tokenizer, length: int | None, *, chat: bool = False
) -> TextSample:
    """Makes a record's prompt, of at most ``length`` tokens: of a longer one the middle is left out.

    The tokens before the end of ``{context}`` are known when the question is not yet.

    Args:
        task: says how the prompt is made.
        record: as it was read.
        tokenizer: the model's.
        length: None leaves nothing out.
        chat: put the prompt into the model's chat template, if the task goes there.

    Returns:
        The sample; what its score reads is the record.

    Raises:
        KeyError: a field that the prompt needs is not in the record.
        ValueError: a chat is asked for, and the tokenizer has no template for it.

    Example:
        >>> import models
        >>> from evals import documents
        >>> task = documents.Task("Read.\\n{context}\\nWho?", 4, None, lambda record: [record["answer"]])
        >>> _, tokenizer = models.load("retriever")
        >>> found = documents.make_sample(task, {"context": "A fox ran.", "answer": "fox"}, tokenizer, 100)
        >>> tokenizer.decode(found.tokens[found.context_end :]), found.references
        ('\\nWho?', ('fox',))
    """
    fields = {name: str(value) for name, value in task.fields(record).items()}
    before, after = task.prompt.split("{context}", 1)
    known = before.format(**fields) + fields["context"]
    chat = chat and task.chat
    known, text = written_out(tokenizer, known, after.format(**fields), task.answer.format(**fields), chat=chat)
    tokens = tokenizer.encode(text, add_special_tokens=not chat)
    context_end = common_prefix(tokenizer.encode(known, add_special_tokens=not chat), tokens)
    if length is not None:
        tokens, context_end = cut_middle(tokens, context_end, length)
    return TextSample(tokens, context_end, tuple(task.references(record)), record)


def written_out(
    tokenizer: models.Tokenizer, known: str, question: str, answer: str = "", *, chat: bool = False
) -> tuple[str, str]:
    """Writes a prompt out, in a chat as the user's turn; ``answer`` begins the answer, and is in nobody's turn.

    Args:
        tokenizer: has the chat template.
        known: what is known when the question is not yet.
        question: the rest of the prompt.
        answer: what the answer begins with.
        chat: put known and question into the chat template; the text then holds all special tokens.

    Returns:
        The text up to the end of ``known``, and the whole.

    Raises:
        ValueError: a chat is asked for, and the tokenizer has no template for it.

    Example:
        >>> import tokenizers
        >>> from evals import documents
        >>> from models.tokenizer import Tokenizer
        >>> template = "[{{ messages[0].content }}] "
        >>> tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, template)
        >>> documents.written_out(tokenizer, "A fox ran.", " Who?", "It was", chat=True)
        ('[A fox ran.', '[A fox ran. Who?] It was')
    """
    if not chat:
        return known, known + question + answer
    whole = tokenizer.chat([{"role": "user", "content": known + question}])
    start = known.strip()  # a template may strip its messages
    place = whole.find(start)
    return whole[: place + len(start)] if place >= 0 else "", whole + answer


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts how many first tokens two texts share. A token across the boundary belongs to neither.

    Example:
        >>> from evals import documents
        >>> documents.common_prefix([1, 2, 3], [1, 2, 4, 5])
        2
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cut_middle(tokens: Sequence[int], context_end: int, length: int) -> tuple[list[int], int]:
    """Gives the first and last half of a prompt that is too long, and where its context ends now.

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
    """Gives the best of the references' scores.

    Example:
        >>> from evals import documents
        >>> from evals.evaluator import Answer, TextSample
        >>> task = documents.Task("{context}", 4, lambda said, right, record: float(said == right), None)
        >>> documents.score(task, Answer([], "fox"), TextSample([], 0, ("owl", "fox"), {}))
        1.0
    """
    text = answer.text.lstrip("\n").split("\n")[0] if task.first_line else answer.text
    return max((task.metric(text, reference, sample.extra) for reference in sample.references), default=0.0)


def read_records(source: str, file: str, hub: Callable[[str], Iterator[str]]) -> Iterator[dict[str, Any]]:
    """Reads the records of a .jsonl or .csv file in a folder, or of the hub where ``source`` is "hub".

    Args:
        source: a folder, or "hub".
        file: its name in there.
        hub: gives the lines of a file of the hub.

    Yields:
        A record for each line, or each row below the names of the columns.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: a line that is no JSON object, or a file that is no CSV.

    Example:
        >>> import pathlib, tempfile
        >>> from evals import documents
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "test.csv").write_text('chapter,summary\\n"One,\\ntwo.",Short.\\n')
        >>> list(documents.read_records(str(folder), "test.csv", iter))
        [{'chapter': 'One,\\ntwo.', 'summary': 'Short.'}]
    """
    lines = hub(file) if source == "hub" else _lines(Path(source), file)
    if file.endswith(".csv"):
        yield from _rows(source, file, lines)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {number}, of {source} is no JSON object; download the file again.")
        yield record


def hub_file(repository: str, file: str) -> Path:
    """Gets a data set's file from the hub, as huggingface_hub keeps it.

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


def lines_of_hub(repository: str, file: str) -> Iterator[str]:
    """Reads the lines of a data set's file from the hub.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: the hub or the file cannot be reached.
    """
    path = hub_file(repository, file)
    try:
        with path.open(encoding="utf-8") as content:
            yield from content
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); remove it, so that it is downloaded again.") from None


def published_text(file: Published) -> str:
    """Reads a published file: out of the user's cache folder, or from its address, once.

    Args:
        file: where it lies, and what it must be.

    Returns:
        Its text.

    Raises:
        FileNotFoundError: the address cannot be reached.
        ValueError: what lies there is another file by now.

    Example:
        >>> from evals import documents
        >>> documents.published_text(documents.Published("file:/nowhere/prompts.json", "0" * 64))
        Traceback (most recent call last):
        ...
        FileNotFoundError: cannot get file:/nowhere/prompts.json (...); get it elsewhere, and name it by --prompts.
    """
    kept = None
    with contextlib.suppress(OSError):  # no cache folder, or nothing in it yet
        kept = commands.cache_folder() / "published" / f"{file.sha256[:16]}-{file.address.rpartition('/')[2]}"
        content = kept.read_bytes()
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content.decode()
    try:
        with urllib.request.urlopen(file.address, timeout=60) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        reason = (commands.sentence(cause) if isinstance(cause, Exception) else str(cause)).rstrip(".")
        raise FileNotFoundError(
            f"cannot get {file.address} ({reason}); get it elsewhere, and name it by --prompts."
        ) from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(
            f"{file.address} is not the file that kvjax knows the digest of; look at it, and name it by --prompts."
        )
    if kept is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written to: it is fetched again the next time
            commands.write_files(kept.parent, {kept.name: content})
    return content.decode()


def lines_of_zip(path: Path, name: str) -> Iterator[str]:
    """Reads the lines of the file in a zip archive whose path ends with ``/name``.

    Raises:
        FileNotFoundError: it is not among them.

    Example:
        >>> import io, zipfile
        >>> from evals import documents
        >>> held = io.BytesIO()
        >>> with zipfile.ZipFile(held, "w") as archive:
        ...     archive.writestr("data/trec.jsonl", "{}")
        >>> list(documents.lines_of_zip(held, "trec.jsonl"))
        ['{}']
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.namelist() if member.rpartition("/")[2] == name]
            if not found:
                raise FileNotFoundError(f"{path} holds no {name}; name a local folder by --data.")
            with archive.open(found[0]) as content:
                yield from io.TextIOWrapper(content, encoding="utf-8")
    except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, so that it is downloaded again.") from None


def add_flags(flags: argparse.ArgumentParser, tasks: Sequence[str], prompts: str) -> None:
    """Adds the flags of an evaluation on published data.

    Args:
        flags: the command's.
        tasks: their names.
        prompts: what --prompts names, for people.
    """
    evaluator.add_model_flags(flags)
    evaluator.add_setting_flags(flags, budgets="256", when="prompt")
    flags.add_argument("--data", help="the folder with the published files, one for each task, or 'hub'")
    flags.add_argument("--tasks", default="all", help=f"{', '.join(tasks)}; several by comma")
    flags.add_argument("--samples", type=int, help="the first samples of each task only")
    flags.add_argument(
        "--length", type=int, help="tokens of a prompt, its middle left out beyond; what the model has by default"
    )
    flags.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    flags.add_argument("--prompts", type=Path, help=prompts)
    flags.add_argument("--out", type=Path, help="a folder for the results; a killed run goes on there")


def check(flags: argparse.Namespace, tasks: Iterable[str], file_of: Callable[[str], str]) -> None:
    """Refuses flags that could not work, and a folder in which a task's file is missing.

    Raises:
        FileNotFoundError: no such folder, or a task's file is not in it.
        ValueError: no data, an unknown task, or a number below 1.
    """
    if flags.data is None:
        raise ValueError("no data was named; give the folder with the published files, or 'hub', by --data.")
    for name in ("samples", "length"):
        if getattr(flags, name, None) is not None and getattr(flags, name) < 1:
            raise ValueError(f"--{name} is {getattr(flags, name)}; give at least 1.")
    chosen = evaluator.choose("--tasks", flags.tasks, list(tasks))
    if flags.data != "hub":
        if not Path(flags.data).is_dir():
            raise FileNotFoundError(f"there is no folder {flags.data}; name one with the published files by --data.")
        missing = [file_of(task) for task in chosen if not (Path(flags.data) / file_of(task)).is_file()]
        if missing and (flags.tasks != "all" or len(missing) == len(chosen)):
            raise FileNotFoundError(
                f"{flags.data} has no {', '.join(missing)}; name the tasks that are there by --tasks."
            )


def present(flags: argparse.Namespace, tasks: Iterable[str], file_of: Callable[[str], str]) -> list[str]:
    """Lists the chosen tasks; of all, those whose files are there."""
    chosen = evaluator.choose("--tasks", flags.tasks, list(tasks))
    return [t for t in chosen if flags.data == "hub" or (Path(flags.data) / file_of(t)).is_file()]


def make_groups(
    flags: argparse.Namespace,
    config: models.Config,
    tokenizer: models.Tokenizer,
    tasks: Mapping[str, Task],
    file_of: Callable[[str], str],
    hub: Callable[[str], Iterator[str]],
    *,
    cut: bool = True,
) -> list[Group]:
    """Makes a group of each chosen task's records.

    Args:
        flags: with data, tasks, samples and chat, and length where prompts are cut.
        config, tokenizer: the model's.
        tasks: all there are, by name.
        file_of: the file of a task.
        hub: gives the lines of a file of the hub.
        cut: leave out the middle of prompts that are too long.

    Raises:
        ValueError: an empty file, or a record that lacks something.
    """
    groups = []
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
    for name in present(flags, tasks, file_of):
        task = tasks[name]
        length = (flags.length or config.max_positions - task.new_tokens) if cut else None
        if length is not None and length < 2:
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
                data=provenance.digest([task.prompt, task.answer, task.new_tokens, records]),
            )
        )
    return groups


def with_prompts(
    tasks: Mapping[str, Task], prompts: Mapping[str, Any], lengths: Mapping[str, Any], source: str | Path
) -> dict[str, Task]:
    """Gives the tasks other prompts and numbers of new tokens.

    Raises:
        ValueError: a prompt without {context}, or a number that is none.
    """
    found = dict(tasks)
    for name, task in tasks.items():
        prompt, new = prompts.get(name, task.prompt), lengths.get(name, task.new_tokens)
        if not isinstance(prompt, str) or prompt.count("{context}") != 1:
            raise ValueError(f"{source}: the prompt of {name} has no {{context}}, or several; write it once.")
        try:
            list(string.Formatter().parse(prompt))
        except ValueError as error:
            raise ValueError(
                f"{source}: the prompt of {name} has a stray brace ({error}); write {{{{ or }}}}."
            ) from None
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise ValueError(f"{source}: {name} may answer with {new!r} tokens; give an integer from 1.")
        found[name] = dataclasses.replace(task, prompt=prompt, new_tokens=new)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another content.
    """
    return parse_object(commands.read_text(path, "JSON"), path)


def parse_object(text: str, source: str | Path) -> dict[str, Any]:
    """Parses the object in a JSON text.

    Args:
        text: the text.
        source: where it came from, for people.

    Raises:
        ValueError: another content.

    Example:
        >>> from evals import documents
        >>> documents.parse_object('{"trec": 64}', "lengths.json")
        {'trec': 64}
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{source} is no JSON object; expected prompts by task.")
    return content


def _draw(
    name: str, task: Task, records: Sequence[Mapping[str, Any]], tokenizer: Any, length: int | None, chat: bool
) -> list[TextSample]:
    found = []
    for number, record in enumerate(records, 1):
        try:
            found.append(make_sample(task, record, tokenizer, length, chat=chat))
            score(task, Answer([], ""), found[-1])  # what a score lacks is better known before the answers
        except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{name}, record {number}, lacks what its prompt or score needs ({error}); is it the published file?"
            ) from None
    return found


def _rows(source: str, file: str, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # a field may be a whole book
    try:
        for number, row in enumerate(csv.DictReader(lines, restkey="", strict=True), 1):
            if "" in row or None in row.values():
                raise csv.Error(f"record {number} has other columns than the first line")
            yield row
    except csv.Error as error:
        raise ValueError(f"{file} of {source} is no CSV ({error}); download the file again.") from None


def _lines(folder: Path, file: str) -> Iterator[str]:
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; name a folder with it by --data.")
    with path.open(encoding="utf-8") as content:
        try:
            yield from content
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text; download it again.") from None
