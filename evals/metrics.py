"""The metrics of LongBench, InfiniteBench and Booksum: each maps an answer and one reference to a number in [0, 1].

Each returns what the benchmark's own script returns, with its rounding and its oversights. ROUGE comes from the package
rouge for LongBench and from rouge-score for the others; the rest is counting.
"""

from __future__ import annotations

import collections
import difflib
import functools
import re
import string
from collections.abc import Sequence
from typing import Any

from kvjax._src import install


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and extra white space, as SQuAD's script does.

    Example:
        >>> from evals import metrics
        >>> metrics.normalised("The  Cat, a dog!")
        'cat dog'
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(answer: str, reference: str) -> float:
    """Return the F1 of the words of the normalised texts."""
    found, wanted = normalised(answer).split(), normalised(reference).split()
    same = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def longbench_rouge_l(answer: str, reference: str) -> float:
    """Return ROUGE-L's F as LongBench's script does, computed by the package rouge.

    Upper and lower case differ, sentences end at full stops, and a word counts once, however often a text has it. 0
    where the package fails, such as for a text of nothing but full stops.

    Raises:
        ImportError: rouge is not installed.
    """
    try:
        return float(_rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # an empty text, or a sentence of a thousand words
        return 0.0


def rouge_l(answer: str, reference: str, kind: str = "rougeL") -> float:
    """Return ROUGE-L's F as computed by rouge-score, without stemming; of "rougeLsum", each line is a sentence.

    Raises:
        ImportError: rouge-score is not installed.
    """
    return _scorer(kind).score(reference, answer)[kind].fmeasure


def edit_similarity(answer: str, reference: str) -> float:
    """Return the similarity between the reference and the answer's first line without a comment or fence.

    It is fuzzywuzzy's ratio without python-Levenshtein, which LongBench's requirements leave out: difflib's ratio in
    whole percent.

    Example:
        >>> from evals import metrics
        >>> metrics.edit_similarity("# a loop\\nfor i in x:\\n    pass", "for i in y:")
        0.91
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if code == reference:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, code, reference).ratio()) / 100


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that an answer names, if the right one is among them, and 0 otherwise.

    A class whose name is a part of the right one's is not counted, unless it directly follows another such class:
    LongBench's script removes classes from the list that it iterates over, which skips the next one.

    Example:
        >>> from evals import metrics
        >>> metrics.classification(
        ...     "City or Food", "City", ["City", "Food", "Other city"]
        ... )
        0.5
    """
    named = [name for name in classes if name in answer]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)  # while the list is iterated over, as published
    return 1 / len(named) if reference in named else 0.0


def right_numbers(answer: str, reference: str) -> float:
    """Return the share of an answer's numbers that equal the first number in the reference."""
    wanted = re.search(r"\d+", reference)
    found = re.findall(r"\d+", answer)
    return sum(number == wanted[0] for number in found) / len(found) if found and wanted else 0.0


def first_number(answer: str, reference: Any) -> float:
    """Return 1 if the first number in an answer is the reference; text is compared as digits, a number by value."""
    if isinstance(reference, str):
        found = re.search(r"\d+", answer)
        return float(found is not None and found[0] == reference)
    found = re.search(r"\d+\.\d+|\d+", answer)
    return float(found is not None and float(found[0]) == float(reference))


def last_integer(answer: str, reference: int) -> float:
    """Return 1 if the last word of an answer is the reference, and 0 otherwise."""
    words = _words(answer, "\n.`'\":")
    return float(bool(words) and re.fullmatch(r"-?\d+", words[-1]) is not None and int(words[-1]) == int(reference))


def word(answer: str, reference: str, *, upper: bool = False) -> float:
    """Return 1 if the reference is a word of an answer, which ``upper`` puts in capitals first, and 0 otherwise."""
    found = _words(answer, "\n:\"'.,?!{}")
    return float(reference in ([part.upper() for part in found] if upper else found))


def leading_values(answer: str, reference: Sequence[int]) -> float:
    """Return the share of the reference's numbers that an answer lists before its first mistake."""
    right = 0
    for found, wanted in zip(re.findall(r"\d+", answer), reference, strict=False):
        if int(found) != wanted:
            break
        right += 1
    return right / len(reference)


def choice(answer: str, letter: str, text: str) -> float:
    """Return 1 if an answer chooses an option as InfiniteBench reads it, and 0 otherwise.

    The choice is the answer's first letter if that is A to D, the whole answer if it is an option's text, what follows
    "answer is", "answer:" or "option is", or the first letter that stands alone.
    """
    answer = answer.strip()
    if answer[:1] and answer[0] in "ABCD":
        return float(answer[0] == letter)
    if answer in (letter, text):
        return 1.0
    words = _words(answer, "\n\"'.,?!{}")
    said = _behind(" ".join(words), ("answer is:", "answer:", "answer is", "option is"))
    if said is not None:
        return float(said.startswith((letter, text)))
    return float(next((word for word in words if word in "ABCD"), None) in (letter, text))


def named_choice(answer: str, letter: str, text: str) -> float:
    """Return 1 if an answer chooses an option as InfiniteBench reads those about code, and 0 otherwise.

    The choice is "B." or "B:" at the start, or the letter or text after "answer is:", "is:" or "answer:".
    """
    answer = answer.strip()
    if answer[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        answer = answer.replace(mark, " ")
    said = _behind(re.sub(" +", " ", answer), ("answer is:", "is:", "answer:"))
    return float(said is not None and said.startswith((letter, text)))


def _behind(text: str, marks: Sequence[str]) -> str | None:
    """Return the text after the first of the marks that it has, without the first character; None without a mark."""
    mark = next((mark for mark in marks if mark in text), None)
    return None if mark is None else text.split(mark, 1)[1][1:]


@functools.cache
def _rouge() -> Any:
    try:
        from rouge import Rouge
    except ImportError:
        raise ImportError(f"for this metric {install.needed(['rouge'], 'eval')}") from None
    return Rouge(metrics=["rouge-l"])


@functools.cache
def _scorer(kind: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError(f"for this metric {install.needed(['rouge-score'], 'eval')}") from None
    return RougeScorer([kind], use_stemmer=False)


def _words(text: str, marks: str) -> list[str]:
    return text.translate(str.maketrans(marks, " " * len(marks))).split()
