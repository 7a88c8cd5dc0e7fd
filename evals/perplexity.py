"""Perplexity against sparsity: how well text is told when every head reads only what a selection keeps.

The text is cut into chunks (1,024 tokens in TokenButler's figure 6), each a sequence of its own that begins with BOS
where the tokenizer has one; a rest that fills no chunk is left out. evals/selections.py says what is read. Intervals
are over chunks: of each selection against the model that reads everything, and against the predictor.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

import models
from evals import prose, report, selections, statistics
from evals.selections import Heads, Selection
from models import commands

SELECT = "oracle,butler,quest,h2o,snapkv,streaming"
EXAMPLES = """examples:
  python -m evals perplexity --select oracle,butler,quest,h2o,snapkv,streaming --sparsity 0,0.1,...,0.7 --plot out.png
  python -m evals perplexity --model path/to/Llama-3.2-1B --butler butler/ --text book.txt --chunk 1024 --sparsity 0.5
"""


def read_text(path: Path | None) -> str:
    """A text file, or the library's sentences that no model or predictor was trained on.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty file, or one that is not UTF-8.

    Example:
        >>> from evals.perplexity import read_text
        >>> len(read_text(None)) > 10_000
        True
    """
    if path is None:
        return " ".join(prose.library_sentences("test"))
    if not path.is_file():
        raise FileNotFoundError(f"there is no text file {path}; give one with --text.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with text.")
    return text


def make_chunks(tokenizer: Any, text: str, length: int, limit: int | None = None) -> Int[np.ndarray, "n T"]:
    """The text's tokens in sequences of ``length``, BOS in front of each where the tokenizer has one.

    Args:
        tokenizer: has ``encode(text, add_special_tokens)`` and ``bos``.
        limit: at most that many.

    Raises:
        ValueError: a length below 2, or a text that does not fill one chunk.

    Example:
        >>> from evals.perplexity import make_chunks
        >>> class Letters:
        ...     bos = 0
        ...     def encode(self, text, add_special_tokens=True):
        ...         return [ord(letter) for letter in text]
        >>> make_chunks(Letters(), "abcde", 3).tolist()
        [[0, 97, 98], [0, 99, 100]]
    """
    if length < 2:
        raise ValueError(f"a chunk of {length} tokens predicts nothing; give at least 2.")
    if limit is not None and limit < 1:
        raise ValueError(f"{limit} sequences were asked for; give at least 1.")
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    step = length - len(first)
    count = len(tokens) // step
    if count < 1:
        raise ValueError(
            f"the text has {len(tokens)} tokens, which do not fill a chunk of {length}; give more text, or a smaller "
            f"--chunk (at most {len(tokens) + len(first)})."
        )
    count = count if limit is None else min(count, limit)
    return np.array([first + tokens[i * step : (i + 1) * step] for i in range(count)], np.int32)


def losses(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    selection: Selection,
    sparsity: float,
    *,
    butler: models.Butler | None = None,
    sinks: int = 4,
    heads: Heads = "query",
    batch: int = 4,
    progress: tqdm | None = None,
) -> Float[np.ndarray, "n"]:
    """Each chunk's mean negative log-likelihood of its tokens but the first, in nats.

    Args:
        selection, sparsity, butler, sinks, heads: see :func:`evals.selections.simulate`.
        batch: chunks at a time.
    """
    found: list[np.ndarray] = []
    batch = min(batch, len(chunks))
    for start in range(0, len(chunks), batch):
        chosen = chunks[start : start + batch]
        fed = np.concatenate([chosen, np.repeat(chunks[:1], batch - len(chosen), axis=0)])  # one shape, one compilation
        logits = selections.simulate(model, fed, selection, sparsity, butler=butler, sinks=sinks, heads=heads)
        found.append(np.asarray(_loss(logits, fed), np.float64)[: len(chosen)])
        if progress is not None:
            progress.update(len(chosen))
    return np.concatenate(found)


@jax.jit
def _loss(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B"]:
    told = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(told[..., 0], axis=1)


def measure(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    *,
    butler: models.Butler | None = None,
    sinks: int = 4,
    heads: Heads = "query",
    batch: int = 4,
    progress: tqdm | None = None,
) -> list[dict[str, Any]]:
    """The model that reads everything ("full"), and each selection at each sparsity.

    At sparsity 0 nothing is left out: those rows are the dense model's figures.

    Returns:
        Rows of ``select``, ``sparsity``, ``perplexity`` with its 95% interval over chunks, ``increase`` over the dense
        model (a share) with its own, by paired chunks, and ``by_chunk``, the losses. Without a second chunk there are
        no intervals (None).
    """
    settings: dict[str, Any] = dict(butler=butler, sinks=sinks, heads=heads, batch=batch, progress=progress)
    full = selections.parse_selection("full")
    if progress is not None:
        progress.set_description("full")
    dense = losses(model, chunks, full, 0.0, **settings)
    results = [_row(full, 0.0, dense, dense)]
    for selection, sparsity in itertools.product(chosen, sparsities):
        if selection == full:
            continue
        if progress is not None:
            progress.set_description(f"{selection}, sparsity {sparsity:g}")
        found = losses(model, chunks, selection, sparsity, **settings) if sparsity else dense
        results.append(_row(selection, sparsity, found, dense))
    return results


def steps(chosen: Sequence[Selection], sparsities: Sequence[float], chunks: int) -> int:
    """How many chunks :func:`measure` runs."""
    named = [selection for selection in chosen if selection.name != "full"]
    return chunks * (1 + len(named) * sum(sparsity > 0 for sparsity in sparsities))


def compare(results: Sequence[dict[str, Any]], against: str = "butler") -> list[dict[str, Any]]:
    """How much larger each selection's perplexity is than the predictor's, at the same sparsity, by paired chunks."""
    lines = {r["sparsity"]: r for r in results if r["select"] == against}
    rows = []
    for r in results:
        line = lines.get(r["sparsity"])
        if line is None or r["select"] in (against, "full") or not r["sparsity"]:
            continue
        ratio, low, high = _ratio(np.array(r["by_chunk"]) - np.array(line["by_chunk"]))
        rows.append(
            {
                "select": r["select"],
                "against": against,
                "sparsity": r["sparsity"],
                "increase": ratio - 1,
                "low": None if low is None else low - 1,
                "high": None if high is None else high - 1,
                "larger": "one chunk" if low is None or high is None else statistics.verdict(low - 1, high - 1),
            }
        )
    return rows


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    selections.add_flags(flags, select=SELECT, sparsity="0,0.1,...,0.7", batch=4)
    add_text_flags(flags, chunk=512)


def add_text_flags(flags: argparse.ArgumentParser, *, chunk: int) -> None:
    """Which text, and how it is cut."""
    flags.add_argument("--text", type=Path, help="a UTF-8 file; by default held-out sentences that ship with kvjax")
    flags.add_argument("--chunk", type=int, default=chunk, help="tokens of a sequence; 1024 in the paper")
    flags.add_argument("--sequences", type=int, help="take at most that many of the text's chunks")


def command(flags: argparse.Namespace) -> None:
    """Runs the evaluation: checks, table, JSON, picture."""
    chosen = selections.parse_selections(flags.select)
    sparsities = selections.parse_sparsities(flags.sparsity)
    selections.check_flags(flags)
    text = read_text(flags.text)
    model, tokenizer, butler = selections.load(flags, chosen)
    chunks = chunks_for(model, tokenizer, text, flags)
    run(flags, "perplexity", "Perplexity against sparsity", model, chunks, chosen, sparsities, butler)


def chunks_for(model: models.Decoder, tokenizer: Any, text: str, flags: argparse.Namespace) -> Int[np.ndarray, "n T"]:
    """The chunks that a command line asks for.

    Raises:
        ValueError: chunks that the model does not take, or that the text does not fill.
    """
    if flags.chunk > model.config.max_positions:
        raise ValueError(
            f"--chunk is {flags.chunk}, but {flags.model} takes {model.config.max_positions} positions; give fewer."
        )
    return make_chunks(tokenizer, text, flags.chunk, flags.sequences)


def run(
    flags: argparse.Namespace,
    name: str,
    title: str,
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    chosen: Sequence[Selection],
    sparsities: Sequence[float],
    butler: models.Butler | None,
) -> None:
    """Measures, and writes what the flags ask for."""
    started = time.time()
    total = steps(chosen, sparsities, len(chunks))
    with tqdm(total=total, unit="chunk", file=sys.stderr, dynamic_ncols=True) as progress:
        results = measure(
            model, chunks, chosen, sparsities,
            butler=butler, sinks=flags.sinks, heads=flags.heads, batch=flags.batch, progress=progress,
        )  # fmt: skip
        progress.set_description("done")
    comparisons = compare(results)
    print(report.perplexity_table(results))
    if comparisons:
        print()
        print(report.ratio_table(comparisons))
    if flags.json is not None:
        commands.write_json(
            flags.json,
            {
                "evaluation": name,
                "settings": selections.settings_used(flags),
                "chunks": len(chunks),
                "seconds": round(time.time() - started, 1),
                **report.environment(),
                "results": results,
                "comparisons": comparisons,
            },
        )
        print(f"figures: {flags.json}")
    if flags.plot is not None:
        report.sparsity_lines(results, flags.plot, title=f"{title} ({len(chunks)} chunks of {chunks.shape[1]} tokens)")
        print(f"picture: {flags.plot}")


def _row(selection: Selection, sparsity: float, found: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    perplexity, low, high = _ratio(found)
    increase, increase_low, increase_high = _ratio(found - dense)
    return {
        "select": str(selection),
        "sparsity": sparsity,
        "perplexity": perplexity,
        "low": low,
        "high": high,
        "increase": increase - 1,
        "increase_low": None if increase_low is None else increase_low - 1,
        "increase_high": None if increase_high is None else increase_high - 1,
        "by_chunk": found.tolist(),
    }


def _ratio(logarithms: np.ndarray) -> tuple[float, float | None, float | None]:
    """The exponential of the mean, with its 95% interval where there are two or more."""
    mean, low, high = statistics.mean_interval(logarithms.tolist())
    if len(logarithms) < 2:
        return math.exp(mean), None, None
    return math.exp(mean), math.exp(low), math.exp(high)
