"""The metrics of LongBench and InfiniteBench, each from an answer and one reference to a number in [0, 1].

ROUGE is rouge-score's and the edit similarity rapidfuzz's; the rest is counting.
"""

from __future__ import annotations

import collections
import functools
import re
import string
from collections.abc import Sequence
from typing import Any

NEEDED = "this metric needs {name}; install it with: pip install 'kvjax[eval]'."


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space, as SQuAD's script has it.

    Example:
        >>> from evals import metrics
        >>> metrics.normalised("The  Cat, a dog!")
        'cat dog'
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(answer: str, reference: str) -> float:
    """F1 of the words of the normalised texts.

    Example:
        >>> from evals import metrics
        >>> metrics.f1("The cat sat.", "a cat sat down")
        0.8
    """
    found, wanted = normalised(answer).split(), normalised(reference).split()
    same = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F by rouge-score, without stemming.

    Raises:
        ImportError: rouge-score is not installed.
    """
    return _scorer("rougeL").score(reference, answer)["rougeL"].fmeasure


def rouge_l_sum(answer: str, reference: str) -> float:
    """ROUGE-Lsum's F by rouge-score: sentence by sentence, as lines.

    Raises:
        ImportError: rouge-score is not installed.
    """
    return _scorer("rougeLsum").score(reference, answer)["rougeLsum"].fmeasure


def edit_similarity(answer: str, reference: str) -> float:
    """rapidfuzz's ratio of the first line that holds no comment or fence, and the reference.

    Raises:
        ImportError: rapidfuzz is not installed.
    """
    try:
        from rapidfuzz import fuzz
    except ImportError:
        raise ImportError(NEEDED.format(name="rapidfuzz")) from None
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return fuzz.ratio(code, reference) / 100


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that an answer names, if the right one is among them.

    A class that is a part of the right one's name counts for nothing.

    Example:
        >>> from evals import metrics
        >>> metrics.classification("City or Food", "City", ["City", "Food", "Other city"])
        0.5
    """
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def right_numbers(answer: str, reference: str) -> float:
    """The share of an answer's numbers that are the reference's number (its first, where it is a text).

    Example:
        >>> from evals import metrics
        >>> metrics.right_numbers("Paragraph 3, or 4?", "Paragraph 3")
        0.5
    """
    wanted = re.search(r"\d+", reference)
    found = re.findall(r"\d+", answer)
    return sum(number == wanted[0] for number in found) / len(found) if found and wanted else 0.0


def first_number(answer: str, reference: Any) -> float:
    """Whether the first number in an answer is the reference; digits are compared as text, numbers by value."""
    if isinstance(reference, str):
        found = re.search(r"\d+", answer)
        return float(found is not None and found[0] == reference)
    found = re.search(r"\d+\.\d+|\d+", answer)
    return float(found is not None and float(found[0]) == float(reference))


def last_integer(answer: str, reference: int) -> float:
    """Whether the last word of an answer is the reference.

    Example:
        >>> from evals import metrics
        >>> metrics.last_integer("The value is: -42.", -42)
        1.0
    """
    words = _words(answer, "\n.`'\":")
    return float(bool(words) and re.fullmatch(r"-?\d+", words[-1]) is not None and int(words[-1]) == int(reference))


def word(answer: str, reference: str, *, upper: bool = False) -> float:
    """Whether the reference is a word of an answer; with ``upper`` after the answer is put in capitals."""
    found = _words(answer, "\n:\"'.,?!{}")
    return float(reference in ([part.upper() for part in found] if upper else found))


def leading_values(answer: str, reference: Sequence[int]) -> float:
    """The share of a list of numbers that an answer gives, up to its first mistake.

    Example:
        >>> from evals import metrics
        >>> metrics.leading_values("[1, 4, 9, 7]", [1, 4, 8, 7])
        0.5
    """
    right = 0
    for found, wanted in zip(re.findall(r"\d+", answer), reference, strict=False):
        if int(found) != wanted:
            break
        right += 1
    return right / len(reference)


def choice(answer: str, letter: str, text: str) -> float:
    """Whether an answer chooses an option, as InfiniteBench reads it: by its first letter where that is A to D, by the
    option's whole text, behind "answer is", "answer:" or "option is", or by the first letter that stands alone.

    Example:
        >>> from evals import metrics
        >>> [metrics.choice(said, "B", "the fox") for said in ("B", "B. the fox", "The answer is: B", "I say A or B")]
        [1.0, 1.0, 1.0, 0.0]
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
    return float(next((word for word in words if word in ("A", "B", "C", "D")), None) == letter)


def named_choice(answer: str, letter: str, text: str) -> float:
    """Whether an answer chooses an option, as InfiniteBench reads those about code: "B." or "B:" at the start, or the
    letter or text behind "answer is:", "is:" or "answer:".

    Example:
        >>> from evals import metrics
        >>> [metrics.named_choice(said, "B", "parse") for said in ("B. parse", "The answer is: parse", "B it is")]
        [1.0, 1.0, 0.0]
    """
    answer = answer.strip()
    if answer[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        answer = answer.replace(mark, " ")
    said = _behind(re.sub(" +", " ", answer), ("answer is:", "is:", "answer:"))
    return float(said is not None and said.startswith((letter, text)))


def _behind(text: str, marks: Sequence[str]) -> str | None:
    """What stands behind the first of the marks that a text has, and one character."""
    mark = next((mark for mark in marks if mark in text), None)
    return None if mark is None else text.split(mark, 1)[1][1:]


@functools.cache
def _scorer(kind: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError(NEEDED.format(name="rouge-score")) from None
    return RougeScorer([kind], use_stemmer=False)


def _words(text: str, marks: str) -> list[str]:
    return text.translate(str.maketrans(marks, " " * len(marks))).split()
