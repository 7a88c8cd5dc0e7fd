"""The report: docs/performance.md and its plots from benchmarks/results/*.json; the same files give the same page."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import decode, measure
from evals import report
from kvjax._src.former_names import renamed_document
from models import files

DOCS = Path(__file__).parent.parent / "docs"
ORDER = (
    "peers", "decode", "prefill", "fixed_memory", "kernels", "experiments", "gpu_compile", "cpu", "memory", "soak",
    "tpu_compile",
)  # fmt: skip
LARGE, SMALL = "llama-3.1-8b", "small"
Record = dict[str, Any]
Document = dict[str, Any]

INTRODUCTION = """# Performance

What a step, a prompt and a cache take: on a GPU, beside other libraries, and beside floors. Every number in ms was
measured. `python -m benchmarks report` makes this page from benchmarks/results. Every file there names its device,
versions and commit, and `python -m benchmarks show FILE` prints all of its tables. No TPU has been timed yet:
[one command measures yours](how-to/measure-a-gpu.md).
"""
GPU_LEGEND = """slots: places for tokens per KV head. floor: time to read the weights and the held keys and values
once, at the copy bandwidth measured in the same run. share: of scoring and eviction, the time over that of a step that
evicts nothing (none). streaming evicts by position, without scores."""
PEERS_LEGEND = """held: tokens per KV head after the prompt. x: how many times as fast as kvpress, or as transformers
with the full cache. peak: the most memory that the process held, with interpreter, libraries and weights (on a GPU:
what was allocated there). same: how many of the answer's first tokens are those of kvpress or transformers. once does
what kvpress does. by block is the default here: the cache never holds more than the budget and a block, and each new
token evicts one, so other tokens are evicted and the answers part."""
FLOORS = """
## Floors

A floor is the time to read the bytes, or to compute the products, that are strictly needed, at the bandwidth and
product rate measured in the same run on the same device.
"""
# The sections of the page that join all files of a benchmark, and the one table of it that they show.
SECTIONS = {
    "fixed_memory": ("Prompts in fixed memory", "Fixed memory"),
    "cpu": ("A decode step on a CPU", "A decode step"),
}


class Target(NamedTuple):
    """A target: a figure computed from the records of all documents of one kind of device, and its bound."""

    text: str
    on: str  # "gpu" or "cpu"
    figure: Callable[[Sequence[Record]], float | None]
    least: float | None = None
    most: float | None = None


def _steps(records: Sequence[Record], kind: str, shape: str, budget: int) -> list[Record]:
    own = [r for r in records if r.get("kind") == kind and r["shape"] == shape and "milliseconds" in r]
    return [r for r in own if r["batch"] == 1 and r["budget"] == budget]


def _of_step(kind: str, figure: Callable[[Record], float]) -> Callable[[Sequence[Record]], float | None]:
    def first(records: Sequence[Record]) -> float | None:
        own = [r for r in _steps(records, kind, LARGE, 8192) if r["policy"] not in ("none", decode.POSITION_ONLY)]
        return next(map(figure, own), None)

    return first


def _of_parts(
    part: str, kind: str, shape: str, budget: int, by: str = "milliseconds"
) -> Callable[[Sequence[Record]], float | None]:
    def first(records: Sequence[Record]) -> float | None:
        return next((s[part] for s in decode.parts(_steps(records, kind, shape, budget), by)), None)

    return first


def _prompt(records: Sequence[Record]) -> float | None:
    own = [r for r in records if r.get("kind") == "feed" and r["prompt"] == 131_072 and "milliseconds" in r]
    full = {r["shape"]: r["milliseconds"] for r in own if r["budget"] is None}
    ours = (r for r in own if r["budget"] == 8192 and r["shape"] in full)
    return next((full[r["shape"]] / r["milliseconds"] for r in ours), None)


def _kernel(records: Sequence[Record], operation: str, case: str) -> list[Record]:
    own = [r for r in records if r.get("operation") == operation and "milliseconds" in r]
    return [r for r in own if r["case"].startswith(case)]


def _caote(figure: Callable[[Record], float]) -> Callable[[Sequence[Record]], float | None]:
    def best(records: Sequence[Record]) -> float | None:
        own = [r for r in _kernel(records, "caote_topk", "block") if r["shape"] == LARGE and r["batch"] == 8]
        own = [r for r in own if r["case"] == "block" and r["implementation"] == "pallas_gpu"]
        return next(map(figure, own), None)

    return best


def _selection(records: Sequence[Record]) -> float | None:
    own = [r for r in records if r.get("shape") == LARGE and r.get("batch") == 1]
    dense = [r["milliseconds"] for r in _kernel(own, "cache_attention", "dense")]
    chosen = [r["milliseconds"] for r in _kernel(own, "select_attention", "25%, a set a KV head")]
    return min(dense) / min(chosen) if dense and chosen else None


def _loss(records: Sequence[Record]) -> float | None:
    own = [r for r in records if r.get("shape") == LARGE and r.get("batch") == 1]
    both = {r["implementation"]: r["milliseconds"] for r in _kernel(own, "mse_logits", "all pairs")}
    return both["materialised"] / both["reference"] if {"materialised", "reference"} <= both.keys() else None


def _peer(what: str, side: str) -> Callable[[Sequence[Record]], float | None]:
    """Return a function for kvpress' time over ours, the worst over all numbers of threads."""
    return lambda records: min((r[f"{what}_ratio"] for r in records if r.get("side") == side), default=None)


TARGETS = (
    Target("8B decode, batch 1, budget 8k: time over its floor", "gpu",
           _of_step("decode", lambda r: r["milliseconds"] / r["floor_milliseconds"]), most=1.15),
    Target("8B decode: longest prompt over shortest", "gpu", _of_parts("long_over_short", "decode", LARGE, 8192),
           most=1.02),
    Target("8B decode: share of scoring and eviction", "gpu", _of_parts("together", "decode", LARGE, 8192), most=0.03),
    Target("8B block of 128: share of scoring and eviction", "gpu", _of_parts("together", "block", LARGE, 8192),
           most=0.03),
    Target("caote_topk, S 8k, K 8, B 8: share of copy bandwidth", "gpu",
           _caote(lambda r: r["floor_milliseconds"] / r["milliseconds"]), least=0.8),
    Target("caote_topk, the same: times the reference", "gpu", _caote(lambda r: r["times_reference"] or 0), least=3),
    Target("prefill of 128k, budget 8k: full cache's time over ours", "gpu", _prompt, least=2),
    Target("8B block: memory over weights, budget and block", "gpu",
           _of_step("block", lambda r: r["compiled_bytes"] / (r["weight_bytes"] + r["cache_bytes"])), most=1.05),
    Target("select_attention at 25% of 128k: dense attention's time over ours", "gpu", _selection, least=2.5),
    Target("loss at T 4k with gradients: materialised time over ours", "gpu", _loss, least=2),
    Target("small decode, budget 512: prompt 100k over 1k", "cpu", _of_parts("long_over_short", "decode", SMALL, 512),
           most=1.05),
    Target("the same by the processor's time", "cpu",
           _of_parts("long_over_short", "decode", SMALL, 512, "processor"), most=1.05),
    Target("prefill, evicting once: kvpress' time over ours, 1 or 2 threads", "cpu",
           _peer("prefill", "ours, once"), least=1),
    Target("decode after it: kvpress' time over ours, 1 or 2 threads", "cpu", _peer("decode", "ours, once"), least=1.2),
    Target("prefill by block: kvpress' time over ours, 1 or 2 threads", "cpu",
           _peer("prefill", "ours, by block"), least=1),
    Target("decode after it, one out for one in", "cpu", _peer("decode", "ours, by block"), least=1.2),
)  # fmt: skip


def documents(folder: Path) -> list[Document]:
    """Read the results files of a folder, in a fixed order; ValueError for a file of another kind."""
    found = [document for path in sorted(folder.glob("*.json")) for document in read(path)]
    if not found:
        raise ValueError(f"{folder} holds no results (*.json); make some with: python -m benchmarks NAME --json.")
    known = {name: place for place, name in enumerate(ORDER)}
    return sorted(found, key=lambda d: (known.get(d["benchmark"], len(known)), d["file"]))


def read(path: Path) -> list[Document]:
    """Read a results file, or the parts of one of `python -m benchmarks accelerator`; ValueError for any other file."""
    try:
        document = renamed_document(json.loads(path.read_text()))
        importlib.import_module(f"benchmarks.{document['benchmark']}")
        return [
            {"inside": path.name, **part}
            for part in parts_of({"file": path.name, **document, "results": document["results"]})
        ]
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ImportError) as error:
        raise ValueError(
            f"{path} is no results file of a benchmark ({error}); make one with: python -m benchmarks NAME --json."
        ) from None


def parts_of(document: Document) -> list[Document]:
    """Return a document, or the documents of the parts of one of `python -m benchmarks accelerator`."""
    if document["benchmark"] != "accelerator":
        return [document]
    name = f"{Path(document['file']).stem}-" if "file" in document else ""
    told: Record = {key: document[key] for key in ("note", "replaced_by") if key in document}
    parts = [(record["part"], record["document"]) for record in document["results"]]
    return [{"file": f"{name}{part}", **told, **own} for part, own in parts if own is not None and "benchmark" in own]


def section(document: Document, told: set[str] | None = None) -> str:
    """Return a results file as Markdown: its tables, and what they were made with.

    Legends in ``told`` are left out, and those that are not are added to it.
    """
    module = importlib.import_module(f"benchmarks.{document['benchmark']}")
    settings = document.get("settings", {})
    heading = module.heading(settings) if hasattr(module, "heading") else document["file"].removesuffix(".json")
    tables = _tables(module, document["results"])
    return f"## {heading}\n\n{_made(module, document)}\n{_written(tables, set() if told is None else told)}"


def joined(name: str, documents: Sequence[Document]) -> str:
    """Return the page's section of a benchmark as Markdown: one table of all of its files together."""
    title, chosen = SECTIONS[name]
    module = importlib.import_module(f"benchmarks.{name}")
    told = [f"{module.heading(d['settings'])}: " if hasattr(module, "heading") else "" for d in documents]
    made = "\n".join(head + _made(module, document) for head, document in zip(told, documents, strict=True))
    records = [record for document in documents for record in document["results"]]
    table, legend = _tables(module, records)[chosen]
    head, *lines = table.cells
    place = head.index("policy")  # whose cells are code on a page
    coded = [[*line[:place], f"`{line[place]}`", *line[place + 1 :]] for line in lines]
    table = report.Table(head, coded, left=table.left, notes=table.notes)
    return f"## {title}\n\n{made}\n\n{table.markdown()}\n\n{legend}\n"


def _tables(module: Any, results: Sequence[Record]) -> dict[str, tuple[report.Table, str]]:
    if hasattr(module, "shown"):
        results = module.shown(results)
    if hasattr(module, "tables"):
        return module.tables(results)
    title = str(module.__doc__).splitlines()[0].rstrip(".")
    return {title: (module.table(results), getattr(module, "LEGEND", ""))}


def _made(module: Any, document: Document) -> str:
    settings = document.get("settings", {})
    made = f"`python -m benchmarks {document['benchmark']}` on " if hasattr(module, "command") else "On "
    made += _made_with(document)
    if limits := settings.get("limits"):
        made += f". Measured limits: copies {limits['copy_bytes'] / 1e9:,.1f} GB/s (read and written), products "
        made += f"{limits['product_flops'] / 1e12:,.3f} TFLOP/s. "
        made += "{repetitions} repetitions of {calls} calls".format_map(settings)
    if settings.get("XLA_FLAGS"):
        made += f". XLA_FLAGS={settings['XLA_FLAGS']}"
    return f"{made}."


def _written(tables: dict[str, tuple[report.Table, str]], told: set[str]) -> str:
    text = ""
    for title, (table, legend) in tables.items():
        text += f"\n### {title}\n\n{table.markdown()}\n" + (f"\n{legend}\n" if legend and legend not in told else "")
        told.add(legend)
    return text


def beside(document: Document) -> str:
    """Return the times beside other libraries as Markdown: prompt, token and memory in one table."""
    settings = document["settings"]

    def times(what: str, unit: float, form: str) -> report.Cell:
        return lambda r: format(r[what]["milliseconds"] / unit, form)

    def ratio(what: str) -> report.Cell:
        return lambda r: "" if r[f"{what}_ratio"] is None else f"{r[f'{what}_ratio']:.2f}"

    cells: list[tuple[str, report.Cell]] = [
        ("side", "{side}"), ("held", "{held:,}"),
        ("prompt, s", times("prefill", 1e3, ".2f")), ("x", ratio("prefill")),
        ("token, ms", times("decode", 1, ".1f")), ("x", ratio("decode")),
        ("peak MiB", lambda r: f"{r['peak_bytes'] / 2**20:,.0f}"),
        ("same", lambda r: "" if r["same_tokens"] is None else f"{r['same_tokens']} of {r['tokens']}"),
    ]  # fmt: skip
    threads = max(settings["threads"])
    table = report.table([r for r in document["results"] if r["threads"] == threads], cells, left=1)
    what = settings.get("model") or f"random weights ({settings['shape']})"
    made = f"{what}, a prompt of {settings['prompt']:,} tokens, `{settings['policy']}`, {settings['dtype']}, {threads} "
    made += "threads; medians"
    return (
        f"## Beside other libraries\n\n{made} of runs that took turns: `python -m benchmarks peers` on "
        f"{_made_with(document)}.\n\n{table.markdown()}\n\n{PEERS_LEGEND}\n"
    )


def _made_with(document: Document) -> str:
    made = f"{_device(document)}, jax {document['versions']['jax']}"
    return made + (f", commit {document['commit']}" if document.get("commit") else "")


def on_gpu(document: Document) -> str:
    """Return a GPU's decode steps as Markdown: one table beside floors, with the share of scoring and eviction."""
    timed = [r for r in document["results"] if r.get("kind") == "decode" and "milliseconds" in r]
    kept = {(r["shape"], r["batch"]): r["milliseconds"] for r in timed if r["policy"] == "none" and r["budget"]}
    lines = {(r["shape"], r["batch"], r["slots"], r["policy"]): r for r in reversed(timed)}  # one of equal programs

    def share(r: Record) -> str:
        none = kept.get((r["shape"], r["batch"]))
        return "" if none is None or r["policy"] == "none" else f"{1 - none / r['milliseconds']:.1%}"

    cells: list[tuple[str, report.Cell]] = [
        ("shape", "{shape}"), ("batch", "{batch}"), ("slots", "{slots:,}"), ("policy", "`{policy}`"),
        ("floor ms", "{floor_milliseconds:.2f}"), ("step ms", "{milliseconds:.2f}"),
        ("times floor", lambda r: f"{r['milliseconds'] / r['floor_milliseconds']:.2f}"), ("share", share),
    ]  # fmt: skip
    table = report.table(list(reversed(lines.values())), cells, left=4)
    text = f"\n## A decode step on a GPU\n\n`python -m benchmarks decode` on {_made_with(document)}.\n"
    return f"{text}\n{table.markdown()}\n\n{GPU_LEGEND}\n" + (f"\n{document['note']}\n" if "note" in document else "")


def against_full(document: Document) -> str:
    """Return a sentence on a step under a budget beside one over a longer full cache; nothing where one is missing."""
    timed = [r for r in document["results"] if r.get("kind") == "decode" and "milliseconds" in r]
    scored = [r for r in timed if r["policy"] not in ("none", decode.POSITION_ONLY)]
    full = [r for r in timed if r["budget"] is None and scored and r["prompt"] > scored[0]["budget"]]
    if not full:
        return ""
    ours, whole = scored[0], max(full, key=lambda r: r["prompt"])
    saved = "memory" + (" and time" if ours["milliseconds"] < whole["milliseconds"] else ", not time")
    gib = [r["compiled_bytes"] / 2**30 for r in (ours, whole)]
    when = "at that time" if "replaced_by" in document else "here"
    return (
        f"\nIn {document['file']} (commit {document['commit']}) a step with {ours['policy']} and a budget of "
        f"{ours['budget']:,} took {ours['milliseconds']:.1f} ms and {gib[0]:.1f} GiB, one over a full cache of "
        f"{whole['prompt']:,} tokens {whole['milliseconds']:.1f} ms and {gib[1]:.1f} GiB: "
        f"on a GPU eviction, {when}, saved {saved}.\n"
    )


def _device(document: Document) -> str:
    cores = document.get("cores")
    return f"{cores} CPU cores" if document["device"] == "cpu" and cores else document["device"]


def targets(found: Sequence[Document], on: Sequence[str] = ("gpu", "cpu")) -> report.Table:
    """Return a table of the targets of those kinds of devices with their figures: met, missed or unmeasured."""
    records = []
    for target in (target for target in TARGETS if target.on in on):
        own = [target.figure(d["results"]) for d in found if (d["device"] == "cpu") == (target.on == "cpu")]
        figure = next((one for one in own if one is not None), None)  # of the first file that has one
        bound = f"at least {target.least:g}" if target.least is not None else f"at most {target.most:g}"
        if figure is None:
            records.append((target.text, target.on, bound, "", "unmeasured"))
            continue
        met = figure >= target.least if target.least is not None else figure <= (target.most or 0)
        records.append((target.text, target.on, bound, f"{figure:.3f}", "met" if met else "missed"))
    return report.Table(("target", "on", "bound", "figure", ""), records, left=2)


def page(found: Sequence[Document], images: Sequence[str]) -> str:
    """Return the whole page in Markdown."""
    newer = [d for d in found if "replaced_by" not in d]
    of = {name: [d for d in newer if d["benchmark"] == name] for name in ("peers", *SECTIONS)}
    steps = [d for d in found if d["benchmark"] == "decode" and d["device"] != "cpu"]
    newest = [d for d in steps if d in newer][:1]
    text = INTRODUCTION + "".join(map(on_gpu, newest))
    text += next(filter(None, map(against_full, steps)), "") if newest else ""
    text += "".join(f"\n{beside(d)}" for d in of["peers"][:1])
    text += "".join(f"\n{joined(name, of[name])}" for name in SECTIONS if of[name]) + FLOORS
    for name in images:
        title, caption, *_ = PICTURES[name]
        text += f"\n![{title}](images/performance-{name}.png)\n\n*{title}. {caption}*\n"
    return f"{text}\n## Targets\n\n{targets(found).markdown()}\n{listed(found)}"


def listed(found: Sequence[Document]) -> str:
    """Return the list of all results files as Markdown."""
    of_files: dict[str, Document] = {}
    for document in found:
        of_files.setdefault(str(document.get("inside", document["file"])), document)
    lines = [
        (file, d["benchmark"], f"older than {d['replaced_by']}" if "replaced_by" in d else "")
        for file, d in of_files.items()
    ]
    text = "\n## All figures\n\nTables of what is above, of kernels and launches, of programs compiled for GPUs and "
    text += "TPUs, of a soak and of experiments: `python -m benchmarks show FILE`.\n\n"
    return f"{text}{report.Table(('file', 'what', ''), lines, left=3).markdown()}\n"


def draw_decode(document: Document, path: Path) -> None:
    """Draw the milliseconds of a decode step against the prompt's length, with and without eviction."""
    figure, axis = report.pyplot().subplots(figsize=(6, 5.2), layout="constrained")
    records = [r for r in document["results"] if r.get("kind") == "decode" and "milliseconds" in r]
    lines: dict[tuple[Any, ...], list[Record]] = {}
    shapes = set[str]()
    for r in records:
        if r["budget"] is None or r["policy"] not in ("none", decode.POSITION_ONLY):
            lines.setdefault((r["run"], r["shape"], r["batch"], r["budget"], r["policy"]), []).append(r)
    for number, ((run, shape, batch, budget, policy), own) in enumerate(lines.items()):
        colour = report.colour(number)
        own = sorted(own, key=lambda r: r["prompt"])
        prompts = [r["prompt"] for r in own]
        kept = "full cache" if budget is None else f"{policy}, budget {budget:,}"
        style = "--" if budget is None else "-"
        times = [r["milliseconds"] for r in own]
        shapes.add(shape)
        axis.plot(prompts, times, style, color=colour, marker="o", label=f"{kept}, x {batch} ({run})")
        axis.plot(prompts, [r["floor_milliseconds"] for r in own], ":", color=colour, linewidth=1)
    axis.set(xscale="log", xlabel="tokens of the prompt", ylabel="ms of a decode step", ylim=(0, None))
    axis.set_title(f"{_device(document)}, {', '.join(sorted(shapes))}; dotted: floors", fontsize=9)
    figure.legend(loc="outside lower center", fontsize=7, frameon=False)
    axis.grid(alpha=0.2)
    report.save(figure, path)


def draw_kernels(document: Document, path: Path) -> None:
    """Draw the share of its floor's speed that each implementation of an operation reaches, for one model's shape."""
    records = [r for r in document["results"] if "operation" in r and "milliseconds" in r]
    shape = LARGE if any(r["shape"] == LARGE for r in records) else records[0]["shape"]
    shares: dict[str, dict[str, float]] = {}
    for r in (r for r in records if r["shape"] == shape):
        case = f"{r['operation']}: {r['case']}, x {r['batch']}"
        shares.setdefault(case, {})[r["implementation"]] = r["floor_milliseconds"] / r["milliseconds"]
    names = list(dict.fromkeys(name for own in shares.values() for name in own))
    figure, axis = report.pyplot().subplots(figsize=(8, 0.9 + 0.34 * len(shares)), layout="constrained")
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        own = {place + number * height: case[name] for place, case in enumerate(shares.values()) if name in case}
        bars = axis.barh(list(own), list(own.values()), height, color=report.COLOURS[number], label=name)
        axis.bar_label(bars, [f"{share:.0%}" for share in own.values()], fontsize=6.5, padding=2)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(shares))], list(shares), fontsize=7.5)
    axis.invert_yaxis()
    axis.axvline(1, color="#999999", linewidth=1)
    axis.set_xlabel("floor over time (1: the floor itself)")
    axis.set_title(f"{_device(document)}, {shape}", fontsize=9.5)
    axis.legend(fontsize=7.5, frameon=False)
    report.save(figure, path)


def plots(found: Sequence[Document]) -> dict[str, tuple[Callable[[Document, Path], None], Document]]:
    """Return each plot with the first document that has records for it, joined by those of its kind and device."""
    plots = {}
    for name, (_, _, draw, fits) in PICTURES.items():
        able = [d for d in found if any(map(fits, d["results"]))]
        if able:
            alike = [d for d in able if (d["benchmark"], d["device"]) == (able[0]["benchmark"], able[0]["device"])]
            records = [{**record, "run": d["file"].removesuffix(".json")} for d in alike for record in d["results"]]
            plots[name] = (draw, {**able[0], "results": records})
    return plots


# Each picture's title, caption, how it is drawn, and the records that it needs.
PICTURES: dict[str, tuple[str, str, Callable[[Document, Path], None], Callable[[Record], bool]]] = {
    "decode": (
        "Decode time against prompt length",
        "A line for each run. Solid: under a budget; dashed: a full cache; dotted: floors.",
        draw_decode, lambda r: r.get("kind") == "decode" and "milliseconds" in r,
    ),
    "kernels": (
        "Operations against their floors", "The share of the floor's speed that each reaches.",
        draw_kernels, lambda r: "operation" in r and "milliseconds" in r,
    ),
}  # fmt: skip


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    flags.add_argument("--results", type=Path, default=measure.RESULTS, help="the folder of results files")
    flags.add_argument("--docs", type=Path, default=DOCS, help="the folder to write performance.md and images/ into")


def command(flags: argparse.Namespace) -> None:
    """Write the page and the plots."""
    target, images = flags.docs / "performance.md", flags.docs / "images"
    files.check_outputs([target, images / "performance-decode.png"])
    report.check_plot(images / "performance-decode.png")
    found = documents(flags.results)
    pictures = plots(found)
    text = page(found, list(pictures))
    for name, (draw, document) in pictures.items():
        draw(document, images / f"performance-{name}.png")
    measure.write_page(target, text)
