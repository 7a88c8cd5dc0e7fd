"""Rows of prompts with answers: JSON lines of {"prompt": ..., "answer": ...}, one per row, where the answer is learned.

A line may have more questions about the same text: {"prompt": ..., "answer": ..., "more": [[prompt, answer], ...]}.
They follow the first answer in turn, and each answer is learned.

A row is one array of int32, so that it goes through a :class:`train.text.Corpus` like a row of text: an id that is
learned stands as it is, the id t of a prompt as ``~t``, and what follows the answer is ``PADDING``. A row of text has
no prompt: all of its ids are learned.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from models.files import json_object
from models.tokenizer import Tokenizer
from train.text import BUILTIN, Corpus, files_of, open_file

PADDING = np.iinfo(np.int32).min
FIELDS = ("prompt", "answer")
Check = Callable[[int], None]


class AnswerBatch(NamedTuple):
    """A batch as a model reads it: the last token of each row is predicted and not fed.

    Attributes:
        tokens: whole rows, 0 where they are padded.
        lengths: the number of tokens that are fed, those of each row but its last.
        answers: the number of tokens of each row from its first answer on; 0 for text, which has no prompt.
        learned: whether the token after each is learned.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    answers: Int[np.ndarray, "B"]
    learned: Bool[np.ndarray, "B T-1"]


def row_of(turns: Sequence[tuple[Sequence[int], Sequence[int]]], length: int) -> Int[np.ndarray, "T"]:
    """Return prompts and their answers as a row: [-2, -1, -8, 5, 2] for the prompt [1, 0, 7] and the answer [5, 2]."""
    tokens = [token for prompt, answer in turns for token in (*(~token for token in prompt), *answer)]
    return np.array(tokens + [PADDING] * (length - len(tokens)), np.int32)


def model_batch(rows: Int[np.ndarray, "B T"]) -> AnswerBatch:
    """Return how rows of text, or of prompts and answers, are fed."""
    there, learned = rows != PADDING, rows >= 0
    lengths = there.sum(axis=1)
    answers = np.where(learned[:, 0], 0, lengths - np.argmax(learned, axis=1))
    tokens = np.where(there, np.where(learned, rows, ~rows), 0)
    return AnswerBatch(tokens.astype(np.int32), lengths - 1, answers, learned[:, 1:])


def are_answers(names: Sequence[str]) -> bool:
    """Return whether data are prompts with answers, by the first line of the first file."""
    first = names[0]
    if first in BUILTIN or not Path(first).exists():
        return False
    with open_file(files_of(first)[0]) as stream:
        line = next((line for line in stream if line.strip()), b"")
    entry = json_object(line)
    return entry is not None and all(name in entry for name in FIELDS)


def open_answers(
    names: Sequence[str],
    tokenizer: Tokenizer,
    length: int,
    *,
    eval_names: Sequence[str] = (),
    eval_rows: int = 16,
    chat: bool = False,
    seed: int = 0,
    check: Check = lambda fed: None,
) -> Corpus:
    """Return the rows of prompts and answers, shuffled anew in each epoch, and held-out rows.

    Args:
        names: files of JSON lines (.jsonl or .json, each also as .gz or .zst), or folders of them.
        tokenizer: the model's tokenizer. The answer continues the prompt's text as it stands; the end token follows.
        length: the most ids of a row.
        eval_names: files to hold out, instead of the first ``eval_rows`` lines of ``names``.
        chat: whether a prompt is a user's message, put into the chat template.
        seed: the seed of the order.
        check: called with the number of tokens that each row feeds; the line of a ValueError is named.

    Raises:
        FileNotFoundError: a file or folder does not exist.
        ValueError: a line lacks a prompt or an answer or does not fit into a row, nothing is left to train on, or the
            tokenizer has no end token.
    """
    if tokenizer.eos is None:
        raise ValueError("the tokenizer names no eos_token to end answers by; name it in tokenizer_config.json.")
    files = [file for name in names for file in files_of(name)]
    rows = _rows(files, tokenizer, length, chat, check)
    if eval_names:
        others = [file for name in eval_names for file in files_of(name)]
        held_out = _rows(others, tokenizer, length, chat, check)[:eval_rows]
    else:
        held_out, rows = rows[:eval_rows], rows[eval_rows:]
    if not len(rows):
        raise ValueError(
            f"{files[0]} holds nothing but the {len(held_out)} held-out rows; give more, or fewer --eval-rows, or "
            "--eval-data."
        )
    name = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"

    def in_order(position: dict[str, Any] | None) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        epoch, place = (0, 0) if position is None else (position["epoch"], position["place"])
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(len(rows))
            for index in range(place, len(rows)):
                yield rows[order[index]], {"epoch": epoch, "place": index + 1}
            epoch, place = epoch + 1, 0

    return Corpus([f"{name} [{zlib.crc32(rows.tobytes()):08x}]"], in_order, held_out)


def _rows(files: Sequence[Path], tokenizer: Tokenizer, length: int, chat: bool, check: Check) -> Int[np.ndarray, "R T"]:
    found = []
    for file in files:
        with open_file(file) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    turns = _tokens(line, tokenizer, length, chat)
                    check(sum(len(prompt) + len(answer) for prompt, answer in turns) - 1)
                    found.append(row_of(turns, length))
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: {error}") from None
    return np.stack(found) if found else np.zeros((0, length), np.int32)


def _tokens(line: bytes, tokenizer: Tokenizer, length: int, chat: bool) -> list[tuple[list[int], list[int]]]:
    entry = json_object(line)
    if entry is None:
        raise ValueError("this is no JSON object; fix it.")
    more, turns = entry.get("more", []), [[entry.get(name) for name in FIELDS]]
    if not isinstance(more, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in more):
        raise ValueError('its "more" is no list of pairs of a prompt and an answer.')
    if not all(isinstance(text, str) and text.strip() for turn in (*turns, *more) for text in turn):
        raise ValueError('it has no text in "prompt" or in "answer"; every line needs both.')
    if chat and more:
        raise ValueError('it has "more" questions, which --chat cannot put into the template; leave one of them out.')
    told: list[tuple[list[int], list[int]]] = []
    for number, (prompt, answer) in enumerate((*turns, *more)):
        if chat:
            prompt = tokenizer.chat([{"role": "user", "content": prompt}])
        if number == 0:
            before = tokenizer.encode(prompt, add_special_tokens=not chat)
        else:
            before = tokenizer.continuation(prompt, *told[-1][1][-1:])
        told.append((before, tokenizer.continuation(answer, *before[-1:])))
    told[-1][1].append(tokenizer.eos)  # type: ignore[arg-type]
    prompts, answers = (sum(map(len, part)) for part in zip(*told, strict=True))
    if prompts + answers > length:
        raise ValueError(
            f"prompt and answer have {prompts} + {answers} tokens, more than a row of {length}; raise --seq-len."
        )
    return told
