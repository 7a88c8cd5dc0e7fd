"""Perplexity: how well text is told under a policy's budget, or when every head reads only what a selection keeps.

The text is cut into chunks (1,024 tokens in TokenButler's figure 6), each a sequence of its own that begins with BOS
where the tokenizer has one; a rest that fills no chunk is left out. With ``--stride`` windows of that length slide over
the text, and the last tokens of each, as many as the stride, are counted: what stands before them is context.

- Selections (``--select``, ``--sparsity``): evals/selections.py says what is read (TokenButler, figure 6).
- Policies (``--policies``, ``--budgets``, ``--block``): the library's own prefill, which evicts after every block; each
  token is told from what earlier evictions left and its own block (CAOTE, tables 4 and 8).

Intervals are over chunks: of each row against the model that reads everything, and of selections against the predictor,
of CAOTE against the same policy without it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

import kvjax
import models
from evals import evaluator, loglikelihood, prose, report, selections, statistics
from evals.selections import Heads, Method
from models import commands, provenance

SELECT = "oracle,butler,quest,h2o,snapkv,streaming"
EXAMPLES = """examples:
  python -m evals perplexity --select oracle,butler,quest,h2o,snapkv,streaming --sparsity 0,0.1,...,0.7 --plot out.png
  python -m evals perplexity --policies h2o,h2o+caote,snapkv,snapkv+caote --budgets 64,128,256 --block 32 --plot out.png
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
        return " ".join(prose.sentences("test"))
    text = commands.read_text(path, "text")
    if not text.strip():
        raise ValueError(f"{path} is empty; give a file with text.")
    return text


def make_chunks(
    tokenizer: Any, text: str, length: int, limit: int | None = None, stride: int | None = None
) -> Int[np.ndarray, "n T"]:
    """The text's tokens in sequences of ``length``, BOS in front of each where the tokenizer has one.

    Args:
        tokenizer: has ``encode(text, add_special_tokens)`` and ``bos``.
        limit: at most that many.
        stride: how many tokens further the next sequence begins; by default where the last one ended.

    Raises:
        ValueError: a length below 2, a stride below 1 or larger than a sequence, or a text that does not fill one.

    Example:
        >>> from evals.perplexity import make_chunks
        >>> class Letters:
        ...     bos = 0
        ...     def encode(self, text, add_special_tokens=True):
        ...         return [ord(letter) for letter in text]
        >>> make_chunks(Letters(), "abcde", 3).tolist()
        [[0, 97, 98], [0, 99, 100]]
        >>> make_chunks(Letters(), "abcde", 4, stride=1).tolist()
        [[0, 97, 98, 99], [0, 98, 99, 100], [0, 99, 100, 101]]
    """
    if length < 2:
        raise ValueError(f"a chunk of {length} tokens predicts nothing; give at least 2.")
    if limit is not None and limit < 1:
        raise ValueError(f"{limit} sequences were asked for; give at least 1.")
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    own = length - len(first)
    step = own if stride is None else stride
    if not 1 <= step <= own:
        raise ValueError(f"the stride is {stride}; give 1 to {own}, the chunk's own tokens.")
    if len(tokens) < own:
        raise ValueError(
            f"the text has {len(tokens)} tokens, which do not fill a chunk of {length}; give more text, or a smaller "
            f"--chunk (at most {len(tokens) + len(first)})."
        )
    count = (len(tokens) - own) // step + 1
    count = count if limit is None else min(count, limit)
    return np.array([first + tokens[i * step : i * step + own] for i in range(count)], np.int32)


def losses(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    selection: Method,
    sparsity: float,
    *,
    butler: models.Butler | None = None,
    sinks: int = 4,
    heads: Heads = "query",
    batch: int = 4,
    counted: int | None = None,
    progress: tqdm | None = None,
) -> Float[np.ndarray, "n"]:
    """Each chunk's mean negative log-likelihood of its tokens but the first, in nats.

    Args:
        selection, sparsity, butler, sinks, heads: see :func:`evals.selections.simulate`.
        batch: chunks at a time.
        counted: of each chunk the last so many tokens only.
    """
    found = loglikelihood.simulate(
        model, chunks.tolist(), selection, sparsity, butler=butler, sinks=sinks, heads=heads, block=1, batch=batch,
        on_row=_counting(progress),
    )  # fmt: skip
    return _losses(found, counted)


def policy_losses(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    policy: str,
    budget: int | float | None,
    *,
    block: int = 32,
    batch: int = 4,
    counted: int | None = None,
    progress: tqdm | None = None,
) -> Float[np.ndarray, "n"]:
    """Each chunk's mean negative log-likelihood when a policy evicts after every block, in nats.

    Args:
        policy, budget, block: see :func:`models.prefill`.
        batch, counted: see :func:`losses`.
    """
    found = loglikelihood.predict(
        model, chunks.tolist(), policy=policy, budget=budget, block=block, batch=batch, on_row=_counting(progress)
    )
    return _losses(found, counted)


def _counting(progress: tqdm | None) -> Callable[[int, loglikelihood.Predicted], None]:
    def count(row: int, found: loglikelihood.Predicted) -> None:
        if progress is not None:
            progress.update()

    return count


def _losses(found: Sequence[loglikelihood.Predicted], counted: int | None) -> Float[np.ndarray, "n"]:
    own = slice(None if counted is None else -counted, None)
    return np.array([-np.mean(row.log_probability[own], dtype=np.float64) for row in found])


def measure(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    chosen: Sequence[Method],
    sparsities: Sequence[float],
    *,
    butler: models.Butler | None = None,
    sinks: int = 4,
    heads: Heads = "query",
    batch: int = 4,
    counted: int | None = None,
    progress: tqdm | None = None,
) -> list[dict[str, Any]]:
    """The model that reads everything ("full"), and each selection at each sparsity.

    At sparsity 0 nothing is left out: those rows are the dense model's figures.

    Returns:
        Rows of ``select``, ``sparsity``, ``perplexity`` with its 95% interval over chunks, ``increase`` over the dense
        model (a share) with its own, by paired chunks, and ``by_chunk``, the losses. Without a second chunk there are
        no intervals (None).
    """
    settings: dict[str, Any] = dict(
        butler=butler, sinks=sinks, heads=heads, batch=batch, counted=counted, progress=progress
    )
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


def measure_policies(
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    policies: Sequence[str],
    budgets: Sequence[int | float],
    dense: dict[str, Any],
    *,
    block: int = 32,
    batch: int = 4,
    counted: int | None = None,
    progress: tqdm | None = None,
) -> list[dict[str, Any]]:
    """Each policy at each budget, evicting after every block.

    Args:
        dense: the row of the model that reads everything, as :func:`measure` gives it.

    Returns:
        Rows like :func:`measure`'s, with ``policy``, ``budget`` and ``difference``: how much higher the perplexity is
        than the dense model's, as CAOTE's tables have it, with its interval by paired chunks.
    """
    results = []
    for budget, policy in itertools.product(budgets, policies):
        if progress is not None:
            progress.set_description(f"{policy}, budget {budget}")
        found = policy_losses(
            model, chunks, policy, budget, block=block, batch=batch, counted=counted, progress=progress
        )
        results.append(
            {"policy": policy, "budget": budget, "block": block, **_against(found, np.array(dense["by_chunk"]))}
        )
    return results


def steps(
    chosen: Sequence[Method], sparsities: Sequence[float], chunks: int, policies: int = 0, budgets: int = 0
) -> int:
    """How many chunks :func:`measure` and :func:`measure_policies` run."""
    named = [selection for selection in chosen if selection.name != "full"]
    return chunks * (1 + len(named) * sum(sparsity > 0 for sparsity in sparsities) + policies * budgets)


def compare(results: Sequence[dict[str, Any]], against: str = "butler") -> list[dict[str, Any]]:
    """How much larger each selection's perplexity is than the predictor's, at the same sparsity, by paired chunks."""
    lines = {r["sparsity"]: r for r in results if r["select"] == against}
    rows = []
    for r in results:
        line = lines.get(r["sparsity"])
        if line is None or r["select"] in (against, "full") or not r["sparsity"]:
            continue
        rows.append({"select": r["select"], "against": against, "sparsity": r["sparsity"], **_larger(r, line)})
    return rows


def compare_policies(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much larger the perplexity is with CAOTE than under the same policy without it, by paired chunks."""
    lines = {(r["policy"], r["budget"]): r for r in results}
    rows = []
    for r in results:
        plain = report.without_caote(r["policy"])
        if plain != r["policy"] and (line := lines.get((plain, r["budget"]))) is not None:
            rows.append({"policy": r["policy"], "against": plain, "budget": r["budget"], **_larger(r, line)})
    return rows


def _larger(row: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    ratio, low, high = _ratio(statistics.paired_interval, np.array(row["by_chunk"]) - np.array(line["by_chunk"]))
    return {
        "increase": ratio - 1,
        "low": None if low is None else low - 1,
        "high": None if high is None else high - 1,
        "larger": "one chunk" if low is None or high is None else statistics.verdict(low - 1, high - 1),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Gives each selection and sparsity a row, against the model that reads everything."""
    rows = [
        (
            r["select"],
            "none" if r["select"] == "full" else f"{r['sparsity']:g}",
            f"{r['perplexity']:.3f}",
            report.interval((r["low"], r["high"]), ".3f"),
            "" if r["select"] == "full" else f"{r['increase']:+.2%}",
            "" if r["select"] == "full" else report.interval((r["increase_low"], r["increase_high"]), "+.2%"),
        )
        for r in results
    ]
    return report.columns(("select", "sparsity", "perplexity", "95%", "against full", "95%"), rows, left=1)


def ratio_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Answers, a row each: how much larger is the perplexity than the predictor's?"""
    rows = [
        (
            c["select"],
            c["against"],
            f"{c['sparsity']:g}",
            f"{c['increase']:+.2%}",
            report.interval((c["low"], c["high"]), "+.2%"),
            c["larger"],
        )
        for c in comparisons
    ]
    return report.columns(("select", "against", "sparsity", "perplexity", "95%", "larger"), rows, left=2)


def policy_table(results: Sequence[dict[str, Any]]) -> str:
    """Gives each policy and budget a row; the difference to the dense model as CAOTE's tables 4 and 8 have it."""
    rows = [
        (
            r["policy"],
            str(r["budget"]),
            f"{r['perplexity']:.3f}",
            report.interval((r["low"], r["high"]), ".3f"),
            f"{r['difference']:+.3f}",
            f"{r['increase']:+.2%}",
            report.interval((r["increase_low"], r["increase_high"]), "+.2%"),
        )
        for r in results
    ]
    return report.columns(("policy", "budget", "perplexity", "95%", "difference", "against full", "95%"), rows, left=1)


def policy_ratio_table(comparisons: Sequence[dict[str, Any]]) -> str:
    """Answers, a row each: how much larger is the perplexity with CAOTE than without?"""
    rows = [
        (
            c["policy"],
            c["against"],
            str(c["budget"]),
            f"{c['increase']:+.2%}",
            report.interval((c["low"], c["high"]), "+.2%"),
            c["larger"],
        )
        for c in comparisons
    ]
    return report.columns(("policy", "against", "budget", "perplexity", "95%", "larger"), rows, left=2)


def perplexity_lines(
    results: Sequence[dict[str, Any]], policies: Sequence[dict[str, Any]], path: Path, *, title: str
) -> None:
    """Draws perplexity over sparsity, a line a selection, and over budgets, a line a policy: a panel each that has any.

    The dense model is a grey line. An axis of perplexity is logarithmic where its largest is more than three times its
    smallest.
    """
    dense = next(r for r in results if r["select"] == "full")
    selected = [r for r in results if r["select"] != "full"]
    reads, keeps = "sparsity: share of the tokens that a row does not read", "budget: slots per head"
    if any(isinstance(r["budget"], float) for r in policies):
        keeps = "budget: slots per head (from 1), or a share of the chunk"
    panels = [(selected, "select", "sparsity", reads)] * bool(selected)
    panels += [(list(policies), "policy", "budget", keeps)] * bool(policies)
    plt = report.pyplot()
    figure, axes = plt.subplots(
        1, max(len(panels), 1), figsize=(6.4 * max(len(panels), 1), 4.2), layout="constrained", squeeze=False
    )
    for axis, (rows, name, along, label) in zip(axes[0], panels, strict=False):
        _panel(axis, dense, rows, name, along)
        axis.set_xlabel(label)
    axes[0, 0].set_ylabel("perplexity")
    figure.suptitle(title, fontsize=10.5)
    with commands.replacing(path) as temporary:
        figure.savefig(temporary, dpi=160)
    plt.close(figure)


def add_flags(flags: argparse.ArgumentParser) -> None:
    """The command's flags."""
    selections.add_flags(flags, select=None, sparsity="0,0.1,...,0.7", batch=4)
    flags.add_argument("--policies", help="policies of the library, several by comma; each evicts after every block")
    flags.add_argument("--budgets", default="128,256", help="of --policies: slots per head, or ratios of a chunk")
    flags.add_argument("--block", type=int, default=32, help="of --policies: tokens a step")
    add_text_flags(flags, chunk=512)


def add_text_flags(flags: argparse.ArgumentParser, *, chunk: int) -> None:
    """Which text, and how it is cut."""
    flags.add_argument("--text", type=Path, help="a UTF-8 file; by default held-out sentences that ship with kvjax")
    flags.add_argument("--chunk", type=int, default=chunk, help="tokens of a sequence; 1024 in the paper")
    flags.add_argument("--stride", type=int, help="slide windows of --chunk tokens, and count their last so many")
    flags.add_argument("--sequences", type=int, help="take at most that many of the text's chunks")


def command(flags: argparse.Namespace) -> None:
    """Runs the evaluation: checks, tables, JSON, picture."""
    if flags.select is None:
        flags.select = SELECT if flags.policies is None else "full"
    chosen = selections.parse_selections(flags.select)
    sparsities = selections.parse_sparsities(flags.sparsity)
    policies = [] if flags.policies is None else parse_policies(flags.policies)
    budgets = [commands.parse_budget(budget) for budget in commands.split_list(flags.budgets)]
    evaluator.check_block_and_batch(flags)
    evaluator.check_budgets(policies, budgets)
    selections.check_flags(flags)
    text = read_text(flags.text)
    model, tokenizer, butler = selections.load(flags, chosen)
    chunks = chunks_for(model, tokenizer, text, flags)
    made_of = evaluator.made_of(model, tokenizer, butler)
    run(flags, "perplexity", "Perplexity", made_of, model, chunks, chosen, sparsities, butler, policies, budgets)


def parse_policies(text: str) -> list[str]:
    """The policies of a command line, several by comma, each once; "full" is there in any case.

    Raises:
        ValueError: none at all, or what :func:`kvjax.parse` says.

    Example:
        >>> from evals.perplexity import parse_policies
        >>> parse_policies("full, h2o+caote, h2o+caote")
        ['h2o+caote']
    """
    names = commands.split_list(text)
    if not names:
        raise ValueError("no policy was given; name at least one, such as --policies snapkv,snapkv+caote.")
    return list(dict.fromkeys(str(kvjax.parse(name)) for name in names if name != "full"))


def chunks_for(model: models.Decoder, tokenizer: Any, text: str, flags: argparse.Namespace) -> Int[np.ndarray, "n T"]:
    """The chunks that a command line asks for.

    Raises:
        ValueError: chunks that the model does not take, or that the text does not fill.
    """
    if flags.chunk > model.config.max_positions:
        raise ValueError(
            f"--chunk is {flags.chunk}, but {flags.model} takes {model.config.max_positions} positions; give fewer."
        )
    return make_chunks(tokenizer, text, flags.chunk, flags.sequences, flags.stride)


def run(
    flags: argparse.Namespace,
    name: str,
    title: str,
    made_of: Mapping[str, str],
    model: models.Decoder,
    chunks: Int[np.ndarray, "n T"],
    chosen: Sequence[Method],
    sparsities: Sequence[float],
    butler: models.Butler | None,
    policies: Sequence[str] = (),
    budgets: Sequence[int | float] = (),
) -> None:
    """Measures, and writes what the flags ask for."""
    total = steps(chosen, sparsities, len(chunks), len(policies), len(budgets))
    evicted: list[dict[str, Any]] = []
    for policy, budget in itertools.product(policies, budgets):  # all are checked before the first is run
        models.stream(model, chunks[:1, :-1], policy=policy, budget=budget, block=flags.block, max_new_tokens=1)
    with tqdm(total=total, unit="chunk", file=sys.stderr, dynamic_ncols=True) as progress:
        results = measure(
            model, chunks, chosen, sparsities, butler=butler, sinks=flags.sinks, heads=flags.heads,
            batch=flags.batch, counted=flags.stride, progress=progress,
        )  # fmt: skip
        if policies:
            evicted = measure_policies(
                model, chunks, policies, budgets, results[0],
                block=flags.block, batch=flags.batch, counted=flags.stride, progress=progress,
            )  # fmt: skip
        progress.set_description("done")
    comparisons, gains = compare(results), compare_policies(evicted)
    tables = [
        table(results),
        ratio_table(comparisons) if comparisons else "",
        policy_table(evicted) if evicted else "",
        policy_ratio_table(gains) if gains else "",
    ]
    print("\n\n".join(text for text in tables if text))
    if flags.json is not None:
        figures = {
            "evaluation": name,
            "settings": evaluator.settings(flags),
            "chunks": len(chunks),
            "results": results,
            "comparisons": comparisons,
            **({"policies": evicted, "policy_comparisons": gains} if evicted else {}),
        }
        provenance.write(flags, figures, made_of)
        print(f"figures: {flags.json}")
    if flags.plot is not None:
        title = f"{title} ({len(chunks)} chunks of {chunks.shape[1]} tokens)"
        perplexity_lines(results, evicted, flags.plot, title=title)
        print(f"picture: {flags.plot}")


def _row(selection: Method, sparsity: float, found: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    return {"select": str(selection), "sparsity": sparsity, **_against(found, dense)}


def _against(found: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    """A row's figures, beside those of the dense model on the same chunks."""
    perplexity, low, high = _ratio(statistics.mean_interval, found)
    increase, increase_low, increase_high = _ratio(statistics.paired_interval, found - dense)
    whole, _, _ = _ratio(statistics.mean_interval, dense)
    return {
        "perplexity": perplexity,
        "low": low,
        "high": high,
        "increase": increase - 1,
        "increase_low": None if increase_low is None else increase_low - 1,
        "increase_high": None if increase_high is None else increase_high - 1,
        "difference": perplexity - whole,
        "by_chunk": found.tolist(),
    }


def _ratio(
    interval: Callable[..., tuple[float, float, float]], logarithms: np.ndarray
) -> tuple[float, float | None, float | None]:
    """The exponential of the mean, with its 95% interval where there are two or more."""
    mean, low, high = interval(logarithms.tolist())
    if len(logarithms) < 2:
        return math.exp(mean), None, None
    return math.exp(mean), math.exp(low), math.exp(high)


def _panel(axis: Any, dense: dict[str, Any], rows: list[dict[str, Any]], name: str, along: str) -> None:
    axis.axhline(dense["perplexity"], color="#999999", linewidth=1, linestyle="--", label="full")
    for index, chosen in enumerate(dict.fromkeys(r[name] for r in rows)):
        line = sorted((r for r in rows if r[name] == chosen), key=lambda r: r[along])
        colour = report.colour(index)
        style = dict(marker="osv^DPX"[index % 7], linestyle="-" if index < len(report.COLOURS) else ":")
        x, y = [r[along] for r in line], [r["perplexity"] for r in line]
        axis.plot(x, y, color=colour, linewidth=1.5, markersize=4.5, label=chosen, **style)
        if all(r["increase_low"] is not None for r in line):  # of the difference to the dense model, by paired chunks
            low, high = ([dense["perplexity"] * (1 + r[f"increase_{end}"]) for r in line] for end in ("low", "high"))
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    values = [dense["perplexity"], *(r["perplexity"] for r in rows)]
    if max(values) > 3 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(report.pyplot().FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(report.pyplot().NullFormatter())
    places = sorted({r[along] for r in rows})
    if len(places) <= 12:
        axis.set_xticks(places, [f"{place:g}" for place in places])
    report.plain(axis)
    axis.legend(fontsize=8, frameon=False)
