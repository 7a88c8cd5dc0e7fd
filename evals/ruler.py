"""RULER's 13 tasks: needles, variable tracking, common and frequent words, and questions among documents.

The structure is that of RULER (Hsieh et al. 2024, arXiv 2404.06654), generated here at any length. A sample's length
counts its prompt and the tokens that the answer may take. The wording is our own. The essays and the documents of the
two QA tasks come from files that the user names. Without them, the essays are built-in prose and the QA tasks are left
out, which a note below the table states. With ``--data`` nothing is generated: samples are read from the files of
RULER's own scripts, ``TASK/validation.jsonl`` per task.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import models
from evals import command_line, documents, evaluator
from evals.evaluator import Group, TextSample
from evals.ruler_tasks import (
    ESSAYS,
    NEW_TOKENS,
    QA,
    SHORT,
    TASKS,
    Documents,
    Sources,
    builder,
    check_fits,
    encoded,
    sample,
)
from models import files
from models.commands.shared_flags import add_shared_flags, count

LENGTHS, SAMPLES = "1024", 8  # the defaults of what is generated
EXAMPLES = """examples:
  python -m evals ruler --lengths 1024 --samples 4 --policies full,snapkv,snapkv+caote --budgets 0.25 --when prompt
  python -m evals ruler --model path/to/Llama-3.1-8B-Instruct --lengths 4096,32768 --essays PaulGrahamEssays.json
      --qa squad.json hotpotqa.json --chat --budgets 0.2 --when prompt --question known,unknown --out runs/ruler
  python -m evals ruler --model path/to/Llama-3.1-8B-Instruct --data RULER/4096 --chat --budgets 0.2 --out runs/ruler
"""


def recall(answer: str, references: Sequence[str]) -> float:
    """Return the share of the references that an answer contains, ignoring case."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_of(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer contains any reference, ignoring case, and 0 otherwise."""
    return float(any(reference.lower() in answer.lower() for reference in references))


# What the question begins with in RULER's files, by the first word of the task's name. The last one counts: an example
# may ask it, too, and the end of a chat template may follow.
QUESTIONS = {
    "niah": r"What (?:is|are all) the special magic ",
    "vt": r"Question: Find all variables that are assigned the value ",
    "cwe": r"Question: What are the \d+ most common words in ",
    "fwe": r"Question: Do not provide any explanation\. ",
    "qa": r"Question: ",
}


def _published_parts(question: str, record: Mapping[str, Any]) -> dict[str, str]:
    """Split a sample of RULER's scripts into its parts, before the last match of ``question``."""
    text = record["input"]
    if not (found := list(re.finditer(rf"^{question}", text, re.MULTILINE))):
        raise TypeError(f"no line of input begins like {question!r}")
    end = found[-1].start()
    return {"context": text[:end], "question": text[end:], "answer": record.get("answer_prefix", "")}


def _published_answers(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    answers = record["outputs"]
    if not isinstance(answers, list) or not answers:
        raise TypeError("outputs is no list of answers")
    return [tuple(map(str, answers))]


def _published_task(task: str) -> documents.Task:
    return documents.Task(
        "{context}{question}",
        NEW_TOKENS[task],
        documents.metric_of(any_of if task in QA else recall),
        _published_answers,
        functools.partial(_published_parts, QUESTIONS[task.split("_")[0]]),
        answer="{answer}",
    )


PUBLISHED = {task: _published_task(task) for task in TASKS}


def read_essays(path: Path) -> list[str]:
    """Read the sentences of a text file, or of the ``text`` of a JSON file (RULER's PaulGrahamEssays.json)."""
    text = files.read_text(path, "essays")
    if path.suffix == ".json":
        content = _parse_json(path, text)
        text = content.get("text", "") if isinstance(content, dict) else ""
        if not isinstance(text, str) or not text:
            raise ValueError(f"{path} has no text: expected an object with 'text', or a plain text file.")
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    if not sentences or not sentences[0]:
        raise ValueError(f"{path} is empty; give a text file with essays.")
    return sentences


def read_documents(path: Path) -> tuple[str, Documents]:
    """Read a QA file and return its task and documents: SQuAD 2.0 as published is ``qa_1``, HotpotQA's is ``qa_2``.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it has another format, or holds no question.
    """
    content = _parse_json(path, files.read_text(path, "QA"))
    try:
        task, found = (
            ("qa_1", _squad(content["data"])) if isinstance(content, dict) else ("qa_2", _hotpot(content))
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path} is not like SQuAD ({{'data': [...]}}) nor like HotpotQA (a list with question, answer and "
            "context); give one of these files as published."
        ) from None
    if not found.questions:
        raise ValueError(f"{path} holds no question that can be answered; give the published file.")
    return task, found


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    command_line.add_model_flags(flags)
    command_line.add_setting_flags(flags)
    flags.add_argument("--tasks", default="all", help=f"{', '.join(TASKS)}; several by comma")
    flags.add_argument("--lengths", help=f"tokens of a prompt and its answer; several by comma (default: {LENGTHS})")
    flags.add_argument("--samples", type=count, help=f"samples per task (default: {SAMPLES}; with --data: all)")
    add_shared_flags(flags, "chat", "out")
    flags.add_argument("--essays", type=Path, help="a text file, or a JSON file with 'text'; built-in prose by default")
    flags.add_argument("--qa", type=Path, nargs="+", help="SQuAD's and HotpotQA's JSON files, for qa_1 and qa_2")
    flags.add_argument(
        "--data", help="a folder of samples from RULER's scripts (TASK/validation.jsonl), in place of generated ones"
    )


def check(flags: argparse.Namespace) -> None:
    """Check the flags before any work."""
    if flags.data is not None:
        if given := [name for name in ("essays", "qa", "lengths") if getattr(flags, name) is not None]:
            raise ValueError(f"--data holds whole samples; leave out {', '.join(f'--{name}' for name in given)}.")
        DATA.check(flags)
        return
    _lengths(flags)
    read = _read_sources(flags)
    missing = [task for task in _tasks(flags) if task in QA and task not in read.documents]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no file of questions and documents was named; name it with --qa.")


def _read_sources(flags: argparse.Namespace) -> Sources:
    """Read the files that the flags name."""
    return Sources(
        None if flags.essays is None else read_essays(flags.essays),
        dict(read_documents(path) for path in flags.qa or []),
    )


def make_groups(flags: argparse.Namespace, config: models.Config, tokenizer: models.Tokenizer) -> list[Group]:
    """Make one group per task and length, or per task of the samples that ``--data`` names."""
    if flags.data is not None:
        return DATA.make_groups(flags, config, tokenizer)
    sources = _read_sources(flags)
    return [_group(task, length, flags, tokenizer, sources) for length in _lengths(flags) for task in _tasks(flags)]


def _group(task: str, length: int, flags: argparse.Namespace, tokenizer: models.Tokenizer, sources: Sources) -> Group:
    metric = any_of if task in QA else recall
    count = SAMPLES if flags.samples is None else flags.samples

    def draw(count: int = count) -> list[TextSample]:
        each = range(count)
        return [sample(task, i, tokenizer, length, sources, seed=flags.seed, chat=flags.chat) for i in each]

    def probe() -> list[TextSample]:
        """Return the first sample, after a check that each one's smallest form fits; the others are not made long."""
        for index in range(count):
            build, least = builder(task, index, length, sources, flags.seed)
            check_fits(task, encoded(build(least), tokenizer, flags.chat), length)
        return draw(1)

    def score(answer: evaluator.Answer, sample: TextSample) -> float:
        return metric(answer.text, sample.references)

    return Group(task, length, count, draw, NEW_TOKENS[task], score, probe=probe)


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about the sources of the texts."""
    if flags.data is not None:
        return [f"samples: {flags.data}, as RULER's scripts wrote them"]
    chosen = _tasks(flags)
    found = ["prompts: RULER's structure, kvjax's wording (--data for RULER's own)"]
    if flags.essays is None and set(chosen) & set(ESSAYS):
        found.append("essays: kvjax's built-in prose, not Paul Graham's (--essays FILE)")
    if left := [SHORT[task] for task in QA if task not in chosen and flags.tasks == "all"]:
        found.append(f"left out: {', '.join(left)} (--qa FILE)")
    return found


def command(flags: argparse.Namespace) -> None:
    """Run the evaluation."""
    evaluator.command(flags, make_groups, title="RULER: answers found", notes=notes, check=check, short=SHORT)


def _lengths(flags: argparse.Namespace) -> list[int]:
    lengths = LENGTHS if flags.lengths is None else flags.lengths
    return command_line.check_sizes(argparse.Namespace(lengths=lengths))


def _tasks(flags: argparse.Namespace) -> list[str]:
    with_files = {read_documents(path)[0] for path in flags.qa or []}
    return command_line.choose("--tasks", flags.tasks, TASKS, [t for t in TASKS if t not in QA or t in with_files])


def _squad(data: Sequence[Mapping[str, Any]]) -> Documents:
    texts = sorted({paragraph["context"] for article in data for paragraph in article["paragraphs"]})
    place = {text: index for index, text in enumerate(texts)}
    questions = []
    for article in data:
        family = sorted({place[paragraph["context"]] for paragraph in article["paragraphs"]})
        for paragraph in article["paragraphs"]:
            own = place[paragraph["context"]]
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    questions.append((asked["question"], answers, [own], [i for i in family if i != own]))
    return Documents(texts, questions)


def _hotpot(data: Sequence[Mapping[str, Any]]) -> Documents:
    whole = lambda title, parts: f"{title}\n{''.join(parts)}"  # noqa: E731
    texts = sorted({whole(title, parts) for asked in data for title, parts in asked["context"]})
    place = {text: index for index, text in enumerate(texts)}
    return Documents(
        texts,
        [
            (a["question"], (a["answer"],), list(dict.fromkeys(place[whole(t, p)] for t, p in a["context"])), [])
            for a in data
        ],
    )


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); give the published file.") from None


# Whole samples, which RULER's scripts made as long as they were asked for.
DATA = documents.DataSet(
    "RULER", PUBLISHED, "", lambda _: PUBLISHED, notes, file="{}/validation.jsonl".format, cut=False
)
