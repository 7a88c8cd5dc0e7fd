"""LongBench's 16 English tasks: questions, summaries, few-shot learning, counting and code, on published documents.

Bai et al. 2024 (arXiv 2308.14508). The records come from a folder with one file per task, or from the hub
(THUDM/LongBench). The metrics are those of the published script. The built-in prompts have the published structure in
our own wording. ``--prompts official`` gets the published dataset2prompt.json and dataset2maxlen.json, and ``--prompts
FOLDER`` reads them from a folder; without the flag they are read from the folder of ``--data`` if they are there. With
``--chat``, few-shot tasks and code stay out of the chat template, as published. The middle of a prompt that is too long
is left out. One thing differs: the published script forbids an empty answer to samsum; here it counts as an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals import documents, metrics
from evals.documents import DataSet, PublishedFile, Task, metric_of

REPOSITORY = "THUDM/LongBench"
# The wording is only in the project's repository; the commit and the digests pin it.
_CONFIG = "https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/LongBench/config"
PROMPTS = PublishedFile(
    f"{_CONFIG}/dataset2prompt.json", "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30"
)
LENGTHS = PublishedFile(
    f"{_CONFIG}/dataset2maxlen.json", "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022"
)
EXAMPLES = """examples:
  python -m evals longbench --data LongBench/data --tasks qasper,trec,lcc --policies full,laprox --budgets 128
  python -m evals longbench --model path/to/Mistral-7B-Instruct --chat --data hub --prompts official --out runs
"""

_references = lambda record: record["answers"]  # noqa: E731
_BRIEF = "Answer with as few words as you can, and explain nothing."
_YES_OR_NO = 'Say yes or no where that is asked, and "unanswerable" where the article does not tell.'


def _class(answer: str, reference: str, record: Mapping[str, Any]) -> float:
    return metrics.classification(answer, reference, record["all_classes"])


def _task(prompt: str, new_tokens: int, metric: Any, **more: Any) -> Task:
    return Task(prompt, new_tokens, metric, _references, **more)


_F1, _ROUGE, _NUMBERS, _EDIT = map(
    metric_of, (metrics.f1, metrics.longbench_rouge_l, metrics.right_numbers, metrics.edit_similarity)
)
_PASSAGES = (
    f"Here are several passages. A question about them follows. {_BRIEF}\n\n{{context}}\n\n"
    f"Answer the question from the passages above. {_BRIEF}\n\nQuestion: {{input}}\nAnswer:"
)
TASKS = {
    "narrativeqa": _task(
        f"Here is a story, a novel or a film script. A question about it follows. {_BRIEF}\n\nStory: {{context}}\n\n"
        f"Answer the question about the story. {_BRIEF}\n\nQuestion: {{input}}\n\nAnswer:",
        128, _F1,
    ),
    "qasper": _task(
        f"Here is a scientific article. A question about it follows. {_BRIEF} {_YES_OR_NO}\n\nArticle: {{context}}\n\n"
        f"Answer the question about the article. {_BRIEF} {_YES_OR_NO}\n\nQuestion: {{input}}\n\nAnswer:",
        128, _F1,
    ),
    "multifieldqa_en": _task(
        "Read this text; a question about it follows.\n\n{context}\n\n"
        f"Answer the question about the text. {_BRIEF}\n\nQuestion: {{input}}\nAnswer:",
        64, _F1,
    ),
    "hotpotqa": _task(_PASSAGES, 32, _F1),
    "2wikimqa": _task(_PASSAGES, 32, _F1),
    "musique": _task(_PASSAGES, 32, _F1),
    "gov_report": _task(
        "Here is a government report.\n\nReport:\n{context}\n\nSummarise the report on one page.\n\nSummary:",
        512, _ROUGE,
    ),
    "qmsum": _task(
        "Here is the transcript of a meeting; a query about it follows.\n\nTranscript:\n{context}\n\n"
        "Answer the query about the meeting in a few sentences.\n\nQuery: {input}\nAnswer:",
        512, _ROUGE,
    ),
    "multi_news": _task(
        "Here are several news articles.\n\nNews:\n{context}\n\nSummarise all of them on one page.\n\nSummary:",
        512, _ROUGE,
    ),
    "trec": _task(
        "Name the type of the last question, as the examples do.\n\n{context}\n{input}",
        64, _class, first_line=True, chat=False,
    ),
    "triviaqa": _task(
        f"Answer the last question from its passage, as the examples do. {_BRIEF}\n\n{{context}}\n\n{{input}}",
        32, _F1, first_line=True, chat=False,
    ),
    "samsum": _task(
        "Summarise the last dialogue in a few short sentences, as the examples do.\n\n{context}\n\n{input}",
        128, _ROUGE, first_line=True, line=True, chat=False,
    ),
    "passage_count": _task(
        "Here are paragraphs of an encyclopedia, some of them more than once. Count how many different ones there are."
        "\n\n{context}\n\nHow many different paragraphs are there? Answer with the number alone.\n\nThe number is: ",
        32, _NUMBERS,
    ),
    "passage_retrieval_en": _task(
        "Here are 30 numbered paragraphs of an encyclopedia, and the abstract of one of them.\n\n{context}\n\n"
        "This is the abstract.\n\n{input}\n\n"
        'Which paragraph is it the abstract of? Answer like "Paragraph 1".\n\nThe answer is: ',
        32, _NUMBERS,
    ),
    "lcc": _task("Complete this code.\n{context}Next line of code:\n", 64, _EDIT, chat=False),
    "repobench-p": _task("Complete this code.\n{context}{input}Next line of code:\n", 64, _EDIT, chat=False),
}  # fmt: skip


def read_tasks(path: Path | None) -> Mapping[str, Task]:
    """Return the tasks with the prompts and lengths of a folder's dataset2prompt.json and dataset2maxlen.json.

    ``path`` may be "official", for the published files, or None, for our own wording. FileNotFoundError or ValueError
    where a file is not there, or has another format.
    """
    if path is None:
        return TASKS
    if path == documents.OFFICIAL:
        prompts, lengths = (
            documents.parse_object(documents.published_text(file), file.address) for file in (PROMPTS, LENGTHS)
        )
        return documents.with_prompts(TASKS, prompts, lengths, PROMPTS.address)
    prompts = documents.read_object(path / "dataset2prompt.json")
    lengths = documents.read_object(path / "dataset2maxlen.json") if (path / "dataset2maxlen.json").is_file() else {}
    return documents.with_prompts(TASKS, prompts, lengths, path)


def notes(flags: argparse.Namespace) -> list[str]:
    """Return the notes below the table about prompts and metrics."""
    prompts = _prompts(flags)
    if prompts is None:
        found = "the published structure, kvjax's wording (--prompts official for the published ones)"
    elif prompts == documents.OFFICIAL:
        found = "as published"
    else:
        found = str(prompts) if flags.prompts is not None else f"{prompts / 'dataset2prompt.json'}, found with the data"
    return [f"prompts: {found}", "metrics: as LongBench's script computes them"]


def _prompts(flags: argparse.Namespace) -> Path | None:
    """Return where the prompts are read from: what was asked for, or else the data's folder if it has them."""
    if flags.prompts is None and flags.data != "hub" and (Path(flags.data) / "dataset2prompt.json").is_file():
        return Path(flags.data)
    return flags.prompts


DATA = DataSet(
    "LongBench", TASKS,
    "'official', or LongBench's config folder: dataset2prompt.json, dataset2maxlen.json (default: --data's folder, if "
    "they are there)",
    lambda flags: read_tasks(_prompts(flags)), notes,
    lambda file: documents.lines_of_zip(documents.hub_file(REPOSITORY, "data.zip"), file),
)  # fmt: skip
add_flags, check, make_groups, command = DATA.add_flags, DATA.check, DATA.make_groups, DATA.command
