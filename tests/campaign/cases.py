"""A case: what is drawn at random, one value for each dimension, and how to make a failing one smaller."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._src.chains import LINKS
from models.config import NO_ROPE, Config, Rope
from tests.models import reference

VOCABULARY = 64
ROPES = {
    "default": Rope(),
    "short": Rope(theta=100.0),
    "linear": Rope(type="linear", factor=4.0),
    "dynamic": Rope(type="dynamic", factor=2.0, original_positions=16),
    "llama3": Rope(type="llama3", factor=8.0, original_positions=32, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": Rope(type="yarn", factor=4.0, original_positions=16),
    "yarn_mscale": Rope(type="yarn", factor=4.0, original_positions=32, mscale=1.0, mscale_all_dim=0.5, truncate=False),
}
_LONG: dict[str, Any] = dict(type="longrope", factor=4.0, short_factor=(1.0, 1.1, 1.3, 2.0), long_factor=(1.0, 2, 3, 5))
OWN_ROPES = {  # of families alone; a text has to stay on one side of longrope's length
    "partial": Rope(partial_rotary_factor=0.5),
    "longrope": Rope(**_LONG, original_positions=64),
    "longrope_beyond": Rope(**_LONG, original_positions=1, attention_factor=1.2),
}
_NORMS: dict[str, Any] = dict(norms="both", norm_offset=True, activation="gelu_tanh", embedding_multiplier=4.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": dict(attention_bias=True),
    "qwen3": dict(query_key_norm=True),
    "gemma2": _NORMS | dict(attention_soft_cap=4.0, logits_soft_cap=6.0, attention_multiplier=0.3),
    "gemma3_text": _NORMS | dict(query_key_norm=True, attention_multiplier=0.3),
    "phi3": {},
    "olmo2": dict(norms="after", wide_query_key_norm=True),
    "granite": dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=2.0),
    "smollm3": {},
    "mixtral": dict(num_experts=4, experts_per_token=2, normalise_experts=True),
    "qwen3_moe": dict(query_key_norm=True, num_experts=3, experts_per_token=2),
}
ONE_WINDOW = ("mistral", "mixtral", "phi3")
WINDOWED = (*ONE_WINDOW, "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "smollm3")
EIGHT_BITS = ("int8", "float8_e4m3fn", "int8/float32", "float32/int8", "float8_e4m3fn/int8", "float32/float8_e4m3fn")
AT_ONCE = " in one program"  # ends a way whose library runs all layers in one program
SHARE = 0.15  # of the programs whose caches are in eight bits
POLICIES = 300  # are drawn until one is found that is wanted
BIASED = ("llama", "qwen3", "olmo2", "granite")

# One maker is another name of SnapKV, and writes itself so.
# Methods are made of links under other names; words need a tokenizer (tests/models/test_prompted.py).
LINK_NAMES = {str(make()).partition("(")[0] for make in LINKS.values() if make.__module__ != "kvjax._src.methods"}
LINK_NAMES -= {"prompted"}


@dataclasses.dataclass(frozen=True)
class Case:
    """``--case`` takes the fields that differ from these defaults, as JSON."""

    seed: int = 0  # of weights and tokens
    family: str = "llama"
    layers: int = 1
    kv_heads: int = 1
    group: int = 1
    rope: str = "default"
    tied: bool = False
    windows: tuple[int | None, ...] = ()  # one a layer; () for none
    dense: tuple[bool, ...] = ()  # one a layer: whether a Qwen3-MoE has no experts there; () for experts in all
    bias: bool = False  # a Llama's own choice, for example; Qwen2 has them on queries, keys and values
    tokens: str = "random"  # "distinct", "few" (three different ones), "equal"
    lengths: tuple[int, ...] = (9,)
    width: int = 9  # of the padded batch
    question: tuple[int, ...] | None = None
    policy: str = "h2o"
    budget: int | float = 4
    block: int = 4
    when: str = "block"
    evict_every: int = 1
    entry: str = "generate"  # "stream", "prefill", "prefill all"
    new: int = 4
    end: tuple[int, ...] = ()
    page_size: int = 16
    mesh: tuple[int, int] | None = None  # data, tensor
    cache_dtype: str | None = None  # one of EIGHT_BITS; None is the model's
    way: str = ""  # of ways.WAYS, and what is asked of it: "turns: question"; "" for the entry alone

    @property
    def dtypes(self) -> tuple[str, str]:
        """Return the dtypes of keys and values, by name."""
        parts = (self.cache_dtype or "float32").split("/")
        return parts[0], parts[-1]

    def __post_init__(self) -> None:
        for path in calibrations(self.policy):
            _write_calibration(Path(path))

    def __str__(self) -> str:
        changed = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return json.dumps(changed)

    @property
    def base(self) -> str:
        return re.split(r"[+(@]", self.policy)[0]

    @property
    def links(self) -> list[str]:
        return re.split(r"\+(?![^(]*\))", self.policy.partition("@")[0])

    @property
    def allocation(self) -> str:
        return self.policy.partition("@")[2] or PUBLISHED.get(self.base, "uniform")

    @property
    def config(self) -> Config:
        heads = self.kv_heads * self.group
        ropes: tuple[Rope | None, ...] = ()
        if self.family == "smollm3":
            ropes = tuple(NO_ROPE if layer % 2 else None for layer in range(self.layers))
        if self.family == "gemma3_text":  # layers with a window have a rotary embedding of their own
            ropes = tuple(Rope(theta=100.0) if window else None for window in self.windows)
        dense_sizes = tuple(20 if dense else None for dense in self.dense if self.family == "qwen3_moe")
        biases = dict(attention_bias=self.bias, output_bias=self.bias)
        return Config(
            VOCABULARY, 16, 24, num_layers=self.layers, num_heads=heads, num_kv_heads=self.kv_heads, head_dim=8,
            architecture=self.family, rope=(ROPES | OWN_ROPES)[self.rope], ropes=ropes, max_positions=64,
            tie_embeddings=self.tied, sliding_windows=self.windows, pad=VOCABULARY - 1, dense_sizes=dense_sizes,
            **biases | FAMILIES[self.family],
        )  # fmt: skip

    def prompts(self) -> np.ndarray:
        """[B, width]; what stands behind a row's end is drawn, too."""
        rng = np.random.default_rng([self.seed, 1])
        rows = []
        for _ in self.lengths:
            if self.tokens == "distinct":
                rows.append(rng.permutation(VOCABULARY)[: self.width])
            else:
                some = rng.permutation(VOCABULARY)[: {"random": VOCABULARY, "few": 3, "equal": 1}[self.tokens]]
                rows.append(rng.choice(some, self.width))
        return np.stack(rows)

    def dimensions(self) -> dict[str, list[str]]:
        """What the case counts for in the summary."""
        questions = self.question or (0,) * len(self.lengths)
        over = any(_slots(self.budget, n) >= n - q for n, q in zip(self.lengths, questions, strict=True))
        return {
            "family": [self.family],
            "rope": [self.rope],
            "group": [str(self.group)],
            "layers": [str(self.layers)],
            "dense": [("all" if all(self.dense) else "some") if any(self.dense) else "none"],
            "windows": ["some" if any(self.windows) else "none"],
            "score": [self.base],
            "links": [re.split(r"\(", link)[0] for link in self.links[1:]] or ["none"],
            "allocation": [self.allocation.split("(")[0]],
            "when": [self.when],
            "evict_every": [str(self.evict_every)],
            "block": [str(self.block)],
            "rows": [str(len(self.lengths))],
            "ragged": [str(len(set(self.lengths)) > 1)],
            "question": ["none" if self.question is None else "some 0" if 0 in self.question else "every row"],
            "budget": [type(self.budget).__name__ + (" over a prompt" if over else "")],
            "page_size": [str(self.page_size) if self.allocation != "uniform" else "no pages"],
            "entry": [self.entry],
            "way": [self.way.removesuffix(AT_ONCE).split(":")[0] or "plain"],
            "mesh": ["none" if self.mesh is None else "x".join(map(str, self.mesh))],
            "tokens": [self.tokens],
            "cache_dtype": [self.cache_dtype or "the model's"],
        }


def calibrations(policy: str) -> list[str]:
    """The files that a policy's name has."""
    return re.findall(r"file='([^']*)'", policy)


def calibration(name: str, *heads: int) -> str:
    """The file of what a policy reads of a model with so many layers and KV heads of 8: "q_filters" or "heads"; or,
    with the query heads of a group, "centres".
    """
    return str(Path(tempfile.gettempdir()) / "kvjax-campaign" / f"{name}_{'x'.join(map(str, heads))}.npy")


def _write_calibration(path: Path) -> None:
    if not path.exists():
        name, _, shape = path.stem.rpartition("_")
        heads = tuple(map(int, shape.split("x")))
        before, more = {"curve": ((99,), ())}.get(name, ((), {"q_filters": (8,), "centres": (12,)}.get(name, ())))
        array = np.random.default_rng(heads).normal(size=(*before, *heads, *more))
        array = np.exp(-abs(array)) if name == "curve" else array
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.save(file, array if more else abs(array))
        os.replace(file.name, path)


def _slots(budget: int | float, length: int) -> int:
    return math.ceil(round(budget * length, 6)) if isinstance(budget, float) else budget


def from_json(text: str) -> Case:
    """The case that ``str(case)`` wrote."""
    fields: dict[str, Any] = json.loads(text)
    return Case(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})


# --- drawing ----------------------------------------------------------------------------------------------------------


class _Draw:
    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def maybe(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def link(self, name: str, share: float = 0.6, **choices: tuple) -> str:
        """A link with some of its arguments drawn."""
        given = [f"{key}={self.one(*values)!r}" for key, values in choices.items() if self.maybe(share)]
        return f"{name}({','.join(given)})" if given else name


def draw(
    seed: int,
    number: int,
    eight_bits: float = SHARE,
    meshes: float = 0.03,
    sizes: dict[str, int] | None = None,
    wanted: Callable[[str], bool] = lambda policy: True,
) -> Iterator[Case]:
    """Cases that share shapes and so a compiled program; they differ in weights, tokens, lengths and questions.

    Their cache is in eight bits in a share ``eight_bits`` of the programs, and on a mesh in a share ``meshes``. Layers,
    kv_heads, group, rows, block and width are drawn unless ``sizes`` has them. The policy is one that is ``wanted``, if
    such a one is found.
    """
    size = (sizes or {}).get
    other = _Draw(np.random.default_rng([seed, number, 8]))  # its own, so that all else stays what it was
    cache_dtype = other.one(*EIGHT_BITS) if other.maybe(eight_bits) else None
    d = _Draw(np.random.default_rng([seed, number]))
    mesh = d.one((2, 1), (1, 2), *(() if sizes else ((2, 2), (2, 4), (4, 2)))) if d.maybe(meshes) else None
    family = d.one("llama", "mistral", *FAMILIES)
    if mesh is not None and FAMILIES.get(family, {}).get("num_experts", 0) % mesh[1]:
        mesh = None  # it does not divide the experts
    layers = size("layers", d.one(1, 2, 2, 3))
    kv_heads, group = size("kv_heads", d.one(1, 2, 2, 3)), size("group", d.one(1, 2, 3, 4))
    rows = size("rows", d.one(1, 2, 2, 3, 4))
    if mesh is not None and sizes:
        rows = rows // mesh[0] * mesh[0]
    elif mesh is not None:
        kv_heads, group, rows = mesh[1] * d.one(1, 2), d.one(1, 2), mesh[0] * d.one(1, 2)
    windows: tuple[int | None, ...] = ()
    if family in WINDOWED and d.maybe(0.3 if family.startswith("qwen") else 0.8):
        one = d.one(3, 6, 11)  # a config.json has one size, but the decoder takes any
        windows = (one,) * layers if family in ONE_WINDOW else tuple(d.one(3, 6, 11, None) for _ in range(layers))
        windows = windows if any(windows) else ()
    dense = tuple(d.maybe(0.5) for _ in range(layers)) if family == "qwen3_moe" and d.maybe(0.6) else ()
    ropes = [*ROPES, *(OWN_ROPES if family == "phi3" else [])]
    block = size("block", d.one(1, 3, 4, 4, 8))
    width = size("width", d.one(12, 21, 30))
    shared = dict(
        family=family,
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        rope=d.one("default", *ropes, *(OWN_ROPES if family == "phi3" else [])),
        tied=d.maybe(0.3),
        windows=windows,
        dense=dense,
        bias=family in BIASED and d.maybe(0.2),
        width=width,
        block=block,
        when=d.one("block", "block", "prompt"),
        evict_every=d.one(1, 1, 2, 3, 0),
        entry=d.one("generate", "generate", "stream", "prefill all", "prefill"),
        new=d.one(3, 6, 9),
        end=d.one((), (), tuple(range(0, VOCABULARY, 9))),
        page_size=d.one(1, 2, 4, 16),
        mesh=mesh,
        cache_dtype=cache_dtype,
    )
    capped = "attention_soft_cap" in FAMILIES[family]
    some = (
        _policy(d, block, (layers, kv_heads, group), meshed=mesh is not None, capped=capped, windowed=any(windows))
        for _ in range(POLICIES)
    )
    policy = next((policy for policy in some if wanted(policy)), "h2o")
    asked = sorted({d.one(0, 0, 1, 2), d.one(1, 2, 4, 5)}) if d.maybe(0.35) else None  # the shortest, the longest
    budget = _budget(d, policy, width)
    least = 2 if shared["rope"] == "longrope_beyond" else 1
    fits = [n for n in range(least, width + 1) if _slots(budget, n) >= least_budget(policy)]
    for _ in range(5):
        lengths = [d.one(*fits) for _ in range(rows)]
        longest, shortest = d.rng.permutation(rows)[[0, -1]]
        lengths[longest] = width
        question: list[int] | None = None
        if asked:  # both ends of the range, which the program's shapes depend on
            question = [int(d.rng.integers(asked[0], asked[-1] + 1)) for _ in lengths]
            question[longest], question[shortest] = asked[-1], asked[0] if rows > 1 else asked[-1]
            lengths = [max(n, q + 1) for n, q in zip(lengths, question, strict=True)]
        yield Case(
            seed=int(d.rng.integers(2**31)),
            tokens=d.one(*["random"] * 6, *["distinct"] * 3, "few", "few", "equal"),
            lengths=tuple(lengths),
            question=None if question is None else tuple(question),
            policy=policy,
            budget=budget,
            **shared,
        )


# How a name without an allocation divides the slots.
PUBLISHED = dict.fromkeys(("kvzip", "kvgrad", "zap"), "model(normalise=False)")
PUBLISHED |= {"laprox": "model", "cake": "cake", "lava": "lava"}
OF_FILES = {"headkv": "heads", "duo": "heads", "lukv": "curve"}
OF_A_WINDOW = ("snapkv", "dropkv", "dapq", "finch", "laprox", "cake", "lava", "rkv", "restkv", "defensive")
OF_QUERIES = ("h2o", "tova", "snapkv", "dropkv", "dapq", "finch", "sage", "lava", "kvzip")  # may read their errors


def _policy(d: _Draw, block: int, heads: tuple[int, int, int], meshed: bool, capped: bool, windowed: bool) -> str:
    """A chain that the library takes, and an allocation that fits it."""
    layers, kv_heads, group = heads
    window = d.one(*[w for w in (1, 2, 3, 4) if w <= block])
    kernel = (1, 3, 5)
    bases = {
        "h2o": dict(accumulate=(False,)),
        "tova": dict(heads=("group",)),
        "snapkv": dict(kernel=kernel, pooling=("avg", "max")),
        "dropkv": dict(kernel=kernel),
        "dapq": dict(kernel=kernel, pooling=("avg", "max"), tokens=("first",)),
        "finch": {},
        "streaming": dict(sinks=(0, 1, 3)),
        "recency": {},
        "sage": dict(heads=("query",)),
        "laprox": dict(
            kernel=kernel,
            target=("output", "value", "attention"),
            gqa=("joint", "group", "heads"),
            pooled=("attention", "product"),
        ),
        "cake": dict(kernel=kernel, gamma=(0.0, 5.0, 200.0)),
        "lava": dict(kernel=kernel),
        "expected_attention": dict(
            future=(1, 8, 512), sinks=(0, 1, 2), covariance=(True, False), value_norm=(True, False)
        ),
        "butler": {},
        "zap": {},
        "kvzip": dict(chunk=(2, 5, 16), sinks=(0, 1, 2), visible=("part", "cache"), normalise=(True,)),
        "kvgrad": dict(
            chunk=(2, 5, 16),
            sinks=(0, 1, 2),
            visible=("part", "cache"),
            measure=("norms", "change"),
            loss=("hidden", "tokens"),
        ),
        "keydiff": {},
        "key_norm": {},
        "q_filters": {},
        "curdkv": dict(sinks=(0, 1, 0.25), leverage=("mean", "key", "value"), local_window=(1, 2, 3, None)),
        "lagkv": dict(sinks=(0, 1, 2), cross_scoring=(True,)),
        "random": dict(seed=(1, 7)),
        "restkv": dict(kernel=kernel, alpha=(0.1, 1.0), per=("query",)),
        "defensive": dict(kernel=kernel),
        "rkv": dict(kernel=kernel, importance=(0.0, 0.5, 1.0), threshold=(0.2, 0.9)),
        "triattention": {},
        "trimkv": {},
    }
    if d.maybe(0.03):
        return "full"
    if window < 2:
        del bases["cake"]
    if layers < 2 or meshed:
        del bases["butler"]
    if meshed:  # its gradient runs on one device
        del bases["kvgrad"]
    if capped:  # its formula has no cap
        del bases["expected_attention"]
    name = d.one(*bases, "h2o", "h2o", "tova", "snapkv")  # what most people take
    base = d.link(name, share=0.4 if name == "sage" else 0.6, **bases[name])  # type: ignore[arg-type]
    one_set = base == "tova"  # for all heads of a layer: heads cannot exchange slots
    always = f"window={window}" if name in OF_A_WINDOW else ""
    if name == "triattention":
        always = f"file={calibration('centres', layers, kv_heads, group)!r},future={d.one(1, 8, 30)}"
    if name == "q_filters":
        always = f"file={calibration('q_filters', layers, kv_heads)!r}"
    if name == "lagkv":  # its 128 by default are more tokens than there are
        always = f"lag={d.one(2, 3, 4)}"
    if always:
        base = base[:-1] + f",{always})" if base.endswith(")") else f"{base}({always})"
    links, nonnegative = [], name not in ("keydiff", "key_norm", "q_filters", "rkv", "triattention", "trimkv")
    for kind in d.rng.permutation(["normalise", "pool", "chunks", "critical", "caote", "protect"]):
        often = dict(normalise=0.15, pool=0.15, chunks=0.15, critical=0.15, caote=0.5, protect=0.35)
        if not d.maybe(often[kind]):
            continue
        if kind in ("critical", "caote") and not nonnegative:
            links.append("normalise")
            nonnegative = True
        match kind:
            case "normalise":
                links.append("normalise")
                nonnegative = True
            case "pool":
                links.append(d.link("pool", kernel=kernel, pooling=("avg", "max")))
            case "chunks":  # a layer's heads share chunks only where they share tokens
                links.append(f"chunks(size={d.one(1, 2, 3, 5)})")
            case "critical":
                links.append(d.link("critical", safe=(0.0, 0.25, 0.7, 1.0), epsilon=(0.0, 0.01)))
            case "caote":
                links.append(_caote(d, "" if "normalise" in base else name))
            case "protect":
                links.append(d.link("protect", sinks=(1, 2, 0.25), recent=(1, 2, 0.5, 0.3), share=0.7))
    if d.maybe(0.15) and name not in ("expected_attention", "kvgrad", "rkv", "restkv", "defensive", "triattention"):
        links.append(d.link("positions", kind=("compact", "index", "absolute")))
    merges = d.maybe(0.12)
    errors = name == "dropkv" or any("per='query'" in link for link in links)  # no link or allocation reads attention
    if merges:
        turned = any(link.startswith("positions") for link in links)
        whole = not (capped or windowed or turned)
        fitted = (["match"] if whole and not meshed else []) + (["moments"] if whole and nonnegative else [])
        draws = nonnegative and not errors and not one_set and name not in ("laprox", "cake")
        draws = draws and "measure='change'" not in base
        merging = d.one("merge", *fitted, *([] if errors else ["cam"]), *(["sample"] if draws else []))
        options: dict[str, Any] = dict(merge=dict(similarity=(0.0, 0.3, 0.7)), cam=dict(window=(1, 2, 5)))
        options["sample"] = dict(power=(1.0, 3.0), seed=(1,))
        links.append(d.link(merging, **options.get(merging, {})))
    chain = "+".join([base, *links])
    caps = (None, 1.0, 1.5, 3)
    allocations = {"pyramid": dict(beta=(1, 2.0, 20.0))}
    amounts = dict(sinks=(0, 1, 2, 0.25), recent=(1, 2, 0.5), cap=caps)
    allocations["headkv"] = dict(beta=(1, 2.0, 10), cap=caps)
    allocations["lukv"] = dict(cap=caps)
    allocations["duo"] = dict(streaming=(0.0, 0.3, 1.0), **amounts)
    if name not in ("kvzip", "kvgrad") and not errors:  # the former observe none of the text's own queries
        allocations["simlayer"] = dict(threshold=(0.0, 0.3, 0.6), **amounts)
        allocations["d2o"] = dict(cap=caps)
    if window >= 2 and name not in ("kvzip", "kvgrad") and not errors and "+sample" not in chain:
        allocations["cake"] = dict(space=(1.6,), time=(0.4,), cap=caps)
    allocations |= {"layer": dict(cap=caps), "adakv": dict(safeguard=(0.0, 0.5, 1.0), cap=caps)}
    allocations["model"] = dict(normalise=(False,), cap=caps)
    allocations["threshold"] = dict(least=(0.0, 0.013, 0.37, -0.9), cap=caps)
    if nonnegative:
        allocations["lava"] = dict(cap=caps)
    if one_set or d.maybe(0.4):
        return f"{chain}@uniform" if name in PUBLISHED and d.maybe(0.5) else chain
    of_query_heads = "heads='query'" in base  # which a file of KV heads does not fit
    excluded = {*(OF_FILES if of_query_heads else ()), *(("duo", "simlayer") if "+sample" in chain else ())}
    which = d.one(*[name for name in allocations if name not in excluded])
    allocation = d.link(which, **allocations[which])  # type: ignore[arg-type]
    if which == "model" and not nonnegative:
        allocation = "model(normalise=False)"
    if which in OF_FILES:
        always = f"file={calibration(OF_FILES[which], layers, kv_heads)!r}"
        allocation = allocation[:-1] + f",{always})" if allocation.endswith(")") else f"{allocation}({always})"
    if which in ("cake", "d2o"):
        allocation = allocation[:-1] + f",window={window})" if allocation.endswith(")") else f"{which}(window={window})"
    return f"{chain}@{allocation}"


def _caote(d: _Draw, base: str) -> str:
    if base in OF_QUERIES and d.maybe(0.3):
        over = d.one("", ",over='max'") if base in ("snapkv", "dropkv", "dapq", "lava") else ""
        return f"caote(per='query'{d.one('', ",group='mean'", ",target='output'")}{over})"
    name = d.one("caote", "caote", "fast_caote")
    if d.one("norm", "norm", "norm", "output") == "output":
        return f"{name}(target='output'{d.one('', ',cross=False')})"
    return d.link(name, norm=(1, 2, "inf"), group=("exact", "mean"))


@functools.cache
def least_budget(policy: str) -> Any:
    """The smallest budget that holds what a policy protects."""
    if policy == "full":
        return 1
    made = reference.policy(policy)
    return next(budget for budget in range(1, 200) if all(sum(made.protected(b)) <= b for b in range(budget, 200)))


def _budget(d: _Draw, policy: str, width: int) -> int | float:
    kind, least = d.one("tight", "int", "int", "ratio", "ratio", "large"), least_budget(policy)
    if kind == "ratio":
        ratios = (0.2, 0.35, 0.5, 0.9, 1.0)
        return d.one(*[ratio for ratio in ratios if _slots(ratio, width) >= least] or [least])
    if kind == "large":
        return max(least, d.one(width - 1, width, width + 1, 100))
    return least if kind == "tight" else least + int(d.rng.integers(0, 9))


# --- shrinking --------------------------------------------------------------------------------------------------------


def smaller(case: Case) -> Iterator[Case]:
    """Cases that differ from this one in one dimension and are simpler there; the boldest first."""

    def but(**changes: Any) -> Iterator[Case]:
        try:
            other = dataclasses.replace(case, **changes)
            fitting = re.sub(r"_\d+x\d+\b", f"_{other.layers}x{other.kv_heads}", other.policy)
            fitting = re.sub(r"(centres_\d+x\d+)x\d+", rf"\1x{other.group}", fitting)
            other = dataclasses.replace(other, policy=fitting)
            if other != case and all(_slots(other.budget, n) >= least_budget(other.policy) for n in other.lengths):
                yield other
        except (ValueError, KeyError, StopIteration):
            pass

    def below(most: int, *some: int) -> list[int]:
        return sorted({number for number in some if 0 < number < most})

    rows, questions = range(len(case.lengths)), case.question
    chain, at, allocation = case.policy.partition("@")
    even = f"{chain}@uniform" if case.base in PUBLISHED else chain
    links, entries = case.links, ("prefill", "prefill all", "generate", "stream")
    key, value = case.dtypes
    simpler: dict[str, Any] = dict(
        way=("", case.way.removesuffix(AT_ONCE)), mesh=(None,), question=(None,),
        cache_dtype=[x for x in (None, f"{key}/float32", f"float32/{value}") if x != "float32/float32"],
        policy=(even, f"{chain}@{allocation.split('(')[0]}" if allocation else even),
        windows=((),), dense=((),), rope=("default",), family=("llama",), tied=(False,), bias=(False,), end=((),),
        page_size=(16,), kv_heads=range(1, case.kv_heads), group=range(1, case.group),
        entry=entries[: entries.index(case.entry)], new=below(case.new, 1, 2, case.new - 1), evict_every=(1,),
        when=("block",), width=(max(case.lengths),), block=below(case.block, 1, 2, 3, 4), tokens=("random",),
        budget=below(case.budget, 1, 2, 4, case.budget // 2, case.budget - 1) if isinstance(case.budget, int)
        else [_slots(case.budget, length) for length in set(case.lengths)],
        seed=range(min(case.seed, 3)),
    )  # fmt: skip
    for kept in [(row,) for row in rows] + [tuple(r for r in rows if r != gone) for gone in rows]:
        if 0 < len(kept) < len(case.lengths):
            own = None if questions is None else tuple(questions[r] for r in kept)
            yield from but(lengths=tuple(case.lengths[r] for r in kept), question=own)
    for name, values in simpler.items():
        for simple in values:
            yield from but(**{name: simple})
    for index in range(len(links)):
        if index:
            yield from but(policy="+".join(links[:index] + links[index + 1 :]) + at + allocation)
        call = ast.parse(links[index], mode="eval").body
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            left = [ast.unparse(other) for other in call.keywords if other is not keyword]
            link = ast.unparse(call.func) + (f"({','.join(left)})" if left else "")
            if not any(needed in links[index] and needed not in link for needed in ("window", "file")):
                yield from but(policy="+".join([*links[:index], link, *links[index + 1 :]]) + at + allocation)
    for layers in range(2 if case.base == "butler" else 1, case.layers):
        yield from but(layers=layers, windows=case.windows[:layers], dense=case.dense[:layers])
    for row in (None, *rows):  # of all rows, then of one
        for shorter in (lambda n: n // 2, lambda n: n - 1):
            lengths = tuple(max(1, shorter(n)) if row in (None, r) else n for r, n in enumerate(case.lengths))
            asked = None if questions is None else tuple(min(q, n - 1) for q, n in zip(questions, lengths, strict=True))
            yield from but(lengths=lengths, question=asked, width=max(lengths))
    for row, q in enumerate(questions or ()):
        for fewer in (0, *below(q, 1, q - 1)):
            yield from but(question=tuple(fewer if r == row else other for r, other in enumerate(questions or ())))
