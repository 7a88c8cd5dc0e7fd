"""Ways that a run may take beside ``generate`` and ``stream``, each held against the reference or against another way.

``WAYS`` has them by name. A case's ``way`` is such a name, and behind a colon what is asked of it; " in one program" at
its end has the library run all layers in one program. ``draw`` gives a share of the programs a way that fits them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
import models
from kvjax._src.policy import allocated
from models import driver
from tests.campaign import cases
from tests.campaign.cases import AT_ONCE, SHARE, Case, least_budget
from tests.campaign.checking import (
    Held,
    Loss,
    Outcome,
    Row,
    against,
    answers,
    held_of,
    model_of,
    settings_of,
    weights_of,
    worst,
)
from tests.campaign.checking import check as plain
from tests.models import reference
from tests.models.tiny import bytes_of

OK = Outcome("ok")
SHARE_OF_WAYS = 0.6  # of the programs


class Way(NamedTuple):
    """``check`` runs a case, given what is asked of the way; ``fits`` tells which cases it can; ``asked``: of what.

    A ``share`` of its programs have a policy that is ``wanted``, if that is not None, and ``with_it`` changes these.
    """

    check: Callable[[Case, str], Outcome]
    fits: Callable[[Case], bool] = lambda case: True
    asked: Sequence[str] = ("",)
    at_once: bool = True  # whether it may be asked for in one program
    changes: Mapping[str, Any] = MappingProxyType({})
    wanted: Callable[[str], bool] | None = None
    share: float = 0.5
    with_it: Mapping[str, Any] = MappingProxyType({})


def draw(
    seed: int, number: int, eight_bits: float = SHARE, *, only: str | None = None, share: float = SHARE_OF_WAYS
) -> Iterator[Case]:
    """The cases of a program, as ``cases.draw`` gives them, with a way in a share of the programs or with one alone."""
    drawn = list(cases.draw(seed, number, eight_bits))
    d = cases._Draw(np.random.default_rng([seed, number, 33]))
    if only is None and not d.maybe(share):
        yield from drawn
        return
    fitting = [name for name, way in WAYS.items() if only in (None, name) and way.fits(drawn[0])]
    if fitting:
        way = WAYS[name := d.one(*fitting)]
        asked, layers = d.one(*way.asked), AT_ONCE if way.at_once and d.maybe(0.25) else ""
        changes = dict(way.changes) | dict(way=f"{name}: {asked}".removesuffix(": ") + layers)
        if way.wanted is not None and d.maybe(way.share):
            drawn = list(cases.draw(seed, number, eight_bits, meshes=0, wanted=way.wanted))
            changes |= way.with_it
        for case in drawn:
            yield dataclasses.replace(case, **changes)


def check(case: Case) -> Outcome:
    """Runs a case by its way."""
    way, layers = case.way.removesuffix(AT_ONCE), case.way.endswith(AT_ONCE)
    name, _, asked = way.partition(": ")
    if way == "in one program":
        layers, name = True, ""
    try:
        with in_one_program() if layers else contextlib.nullcontext():
            return plain(case) if not name else WAYS[name].check(case, asked)
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")


@contextlib.contextmanager
def in_one_program() -> Iterator[None]:
    """A model runs as on an accelerator."""
    usual, driver.by_layer = driver.by_layer, lambda run, key=None: False
    try:
        yield
    finally:
        driver.by_layer = usual


def _rng(case: Case) -> np.random.Generator:
    return np.random.default_rng([case.seed, 33])


def _differs(condition: Any, why: str) -> Outcome:
    return Outcome("differs", why) if condition else OK


def _other(one: Held, other: Held, what: str, rows: float = 0) -> Outcome:
    """Return whether two caches hold the same tokens, and keys and values that differ by no more than ``rows``."""
    if not np.array_equal(one.following, other.following):
        return Outcome("differs", f"{what}: next positions {one.following} and {other.following}")
    if (wrong := np.argwhere(one.kept != other.kept)[:4]).size:
        return Outcome("differs", f"{what}: [layer, (row,) head, position] {wrong.tolist()}")
    for name, a, b in (("keys", one.key, other.key), ("values", one.value, other.value)):
        error = np.where(one.kept[..., None], abs(a - b), 0).max(initial=0)
        if not error <= rows * max(1, abs(b).max(initial=0)):
            return Outcome("differs", f"{what}: {name} off by {error:.1e}")
    return OK


def _room(case: Case, length: int) -> bool:
    return cases._slots(case.budget, length) >= least_budget(case.policy)


def _in_slots(case: Case) -> Case:
    """A ratio as the slots that it gives the longest prompt: with a kept cache it would be of all turns."""
    return dataclasses.replace(case, budget=cases._slots(case.budget, case.width))


def _one_device(case: Case) -> bool:
    return case.mesh is None


# --- requests that come and go ----------------------------------------------------------------------------------------


def engine(case: Case, _: str) -> Outcome:
    """Rows that join and leave at drawn moments: each is the reference's run of that request alone, step by step."""
    rng, weights, texts = _rng(case), weights_of(case), case.prompts()
    settings = settings_of(case)
    B = len(case.lengths)
    batch = models.Engine(
        model_of(case, weights), rows=max(2, B - 1), evict_every=case.evict_every, max_new_tokens=case.new,
        longest_prompt=case.width, **settings,
    )  # fmt: skip
    fits = [n for n in range(1, case.width + 1) if _room(case, n)]
    asked = [(row, n) for row, n in enumerate(case.lengths)] + [(row, int(rng.choice(fits))) for row in [0, *range(B)]]
    waiting = [texts[row, :n] for row, n in asked]
    gone = int(rng.integers(2 * B)) if rng.random() < 0.3 else None
    tokens: dict[int, list[int]] = {}
    seen: dict[int, dict[int, np.ndarray]] = {}
    while waiting or not batch.idle:
        while waiting and rng.random() < 0.4:
            handle = batch.submit(waiting.pop(0), end=case.end)
            tokens[handle], seen[handle] = [], {}
        for made in batch.step():
            tokens[made.handle].append(made.token)
        if gone in tokens and len(tokens[gone]) == 2:
            batch.cancel(gone)
            del tokens[gone]
        held = held_of(batch.cache)
        for row, request in enumerate(batch._rows):
            if request is not None:
                seen[request.handle][request.made] = held.kept[:, row]
    outcomes = [_differs(int(batch.cache.num_live.sum()), "tokens are left in rows of no request")]
    for handle, answer in tokens.items():
        length = asked[handle][1]
        blocks = -(-length // case.block)
        history: list[np.ndarray | None] = [None] * (blocks - 1)
        history += [seen[handle].get(made) for made in range(1, len(answer))]
        row = Row(answer, None, None, history)
        outcomes.append(against(case, weights, handle, row, texts[asked[handle][0], :length], question=0))
    return worst(outcomes)


# --- caches that go on ------------------------------------------------------------------------------------------------

QUESTION = 4  # tokens at most
TURNS = ("question", "question, repeated", "turn", "turn, repeated")


def turns(case: Case, asked: str) -> Outcome:
    """A kept cache, saved, loaded and perhaps repeated, goes on as the reference does with the whole text."""
    case = _in_slots(case)
    rng, weights = _rng(case), weights_of(case)
    model, texts, B = model_of(case, weights), case.prompts(), len(case.lengths)
    settings, lengths = settings_of(case), np.array(case.lengths)
    repeated = "repeated" in asked
    if repeated:
        texts, lengths = texts[:1], lengths[:1]
    kept = models.prefill(model, texts, lengths=lengths, **settings).cache
    before, state = held_of(kept), bytes_of(kept)
    cache = _loaded(kept, case)
    outcomes = [
        _other(held_of(cache), before, "loaded"),
        _differs(bytes_of(cache) != state, "what was loaded is not what was saved"),
    ]
    if repeated:
        cache, texts, lengths = _repeat(cache, B), np.repeat(texts, B, axis=0), np.repeat(lengths, B)
    count = rng.integers(1, QUESTION + 1, B)
    count[rng.integers(B)] = QUESTION
    questions = rng.integers(0, cases.VOCABULARY, (B, QUESTION))
    # Else it is a turn, from which the policy evicts.
    asks = "question" in asked or case.base in ("kvzip", "kvgrad", "dapq")
    more = dict(lengths=count, max_new_tokens=case.new, evict_every=case.evict_every, end=case.end, **settings)
    out = models.generate(model, questions, cache=cache, question=count if asks else None, **more)
    held, tokens = held_of(out.cache), answers(case, out)
    for row in range(B):
        text = [*texts[row, : lengths[row]], *questions[row, : count[row]]]
        how: dict[str, Any] = dict(question=int(count[row])) if asks else dict(question=0, turns=[int(lengths[row])])
        outcomes.append(against(case, weights, row, Row(tokens[row], None, held.row(row), []), text, **how))
    outcomes.append(_differs(bytes_of(kept) != state, "a kept cache has changed"))
    return worst(outcomes)


def rewound(case: Case, _: str) -> Outcome:
    """What was tried behind a kept cache and is taken back leaves no trace in a turn that follows."""
    assert _learns_nothing(case.policy), "which the reference, that has not seen it, cannot know"
    case = _in_slots(case)
    rng, weights = _rng(case), weights_of(case)
    model, texts, B = model_of(case, weights), case.prompts(), len(case.lengths)
    settings, lengths = settings_of(case), np.array(case.lengths)
    kept = models.prefill(model, texts, lengths=lengths, **settings).cache
    count = rng.integers(1, 2 * QUESTION + 1, B)
    count[rng.integers(B)] = 2 * QUESTION
    # A turn of one block, which has as many tokens as any window: queries that were pushed out of it do not come back.
    widths = 2 * QUESTION, min(QUESTION, case.block)
    tried, turn = (rng.integers(0, cases.VOCABULARY, (B, width)) for width in widths)
    asked: dict[str, Any] = dict(lengths=count, question=count, max_new_tokens=2, evict_every=0, end=())
    left = models.generate(model, tried, cache=kept, **asked, **settings).cache
    back = kvjax.rewind(left, lengths)
    asked = dict(max_new_tokens=case.new, evict_every=case.evict_every, end=case.end)
    out = models.generate(model, turn, cache=back, **asked, **settings)
    held, tokens, outcomes = held_of(out.cache), answers(case, out), list[Outcome]()
    for row in range(B):
        text, how = [*texts[row, : lengths[row]], *turn[row]], dict[str, Any](question=0, turns=[int(lengths[row])])
        outcomes.append(against(case, weights, row, Row(tokens[row], None, held.row(row), []), text, **how))
    return worst(outcomes)


def _learns_nothing(policy: str) -> bool:
    """Return whether a policy remembers of the text nothing but its last queries."""
    case = Case(policy=policy)
    learning = {"critical", "cam", "match", "moments", "sample"} & {link.partition("(")[0] for link in case.links}
    return (
        case.base in ("rkv", "restkv", "defensive")
        and not learning
        and case.allocation.partition("(")[0] not in ("cake", "d2o")
    )


def _loaded(cache: Any, case: Case) -> Any:
    """The cache behind a file."""
    policy, budget = case.policy, None if case.policy == "full" else case.budget
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache.safetensors")
        kvjax.save_cache(path, cache, policy=policy, budget=budget, model="a", pending=[])
        return kvjax.load_cache(path, policy=policy, budget=budget, model="a")


_repeat = jax.jit(kvjax.repeat, static_argnums=1)


# --- scores on any scale ----------------------------------------------------------------------------------------------

LEAST, MOST = 2.0**-20, 2.0**4
SMALL, LARGE = 2.0**-100, 2.0**122  # about 1e-30 and 5e36; powers of two round nothing
SCALES = ((1.0, 1.0), (SMALL, SMALL), (2.0**64, 2.0**64), (LARGE, LARGE), (LARGE, SMALL))  # of even and of odd layers
_factors = np.ones(2, np.float32)  # read while a program runs, which serves all scales


def _scaled(scores: Any, state: Any, observation: Any) -> Any:
    size = jnp.abs(scores)
    near = jnp.where(size < LEAST, 0, jnp.sign(scores) * jnp.minimum(size, MOST))
    factors = jax.pure_callback(_factors.copy, jax.ShapeDtypeStruct(_factors.shape, _factors.dtype))
    return near * factors[observation.layer % 2], state


# Multiplies scores, of which none overflows: they are brought between LEAST and MOST first.
SCALED = kvjax.Policy("scaled", kvjax.no_state, _scaled)


def scales(case: Case, place: str) -> Outcome:
    """Scores multiplied behind a link, the ``place``-th: what stays does not depend on the factor.

    Each layer may have a factor of its own, unless scores of layers are compared as they are.
    """
    model, named = model_of(case, weights_of(case)), kvjax.parse(case.policy)
    links = list(named.links or (named,))
    links.insert(min(int(place), len(links)), SCALED)
    policy = allocated(kvjax.chain(*links), named.allocation)
    question = None if case.question is None else np.array(case.question)
    settings = settings_of(case, policy=policy, question=question, evict_every=case.evict_every, end=())
    settings |= dict(lengths=np.array(case.lengths), max_new_tokens=case.new)
    compared = "normalise=False" in case.allocation
    found = []
    try:
        for scale in SCALES[:-1] if compared else SCALES:
            _factors[:] = scale
            out = models.generate(model, case.prompts(), **settings)
            found.append((scale, held_of(out.cache), answers(case, out)))
    finally:
        _factors[:] = 1
    outcomes = []
    (_, first, expected), *others = found
    for scale, held, tokens in others:
        what = "scores times " + " and ".join(f"{factor:.0e}" for factor in sorted(set(scale)))
        outcomes.append(_other(held, first, what, rows=1e-3))
        outcomes.append(_differs(tokens != expected, f"{what}: {tokens}, not {expected}"))
    return worst(outcomes)


def _has_no_scale(case: Case) -> bool:
    """Return whether the meaning of a chain does not depend on the size of its scores."""
    return case.policy != "full" and "critical" not in case.policy and "@threshold" not in case.policy


def _divides(policy: str) -> bool:
    """Return whether scores are divided by their sum over a layer, which huge ones need care for."""
    name = Case(policy=policy).allocation
    return name.startswith(("model", "lava")) and "normalise=False" not in name and "critical" not in policy


# --- equal keys, values and heads -------------------------------------------------------------------------------------


def equal(case: Case, asked: str) -> Outcome:
    """Some layers have equal keys, or equal values, for all tokens, or heads that are all alike."""
    weights, rng = weights_of(case), _rng(case)
    some = rng.random(case.layers) < 0.7
    some[rng.integers(case.layers)] = True
    for layer in np.flatnonzero(some):
        for name in ("key", "value") if asked == "both" else (asked,):
            if asked == "heads":
                for part in ("key", "value", "query", "key_bias", "value_bias", "query_bias"):
                    if (array := weights.get(f"layers.{part}")) is not None:  # [L, (E,) heads, D]
                        array[layer] = array[layer][..., :1, :]
            else:
                weights[f"layers.{name.removesuffix('s')}"][layer] = 0
    return plain(case, weights)


# --- narrow models ----------------------------------------------------------------------------------------------------

LOSSES = {
    "float16": Loss(near=2e-2, small=2e-3, rows=1e-2, logits=3e-2),
    "bfloat16": Loss(near=1.5e-1, small=1.5e-2, rows=8e-2, logits=2e-1),
}


def dtypes(case: Case, dtype: str) -> Outcome:
    """A model of 16 bits, with what such numbers lose; the reference takes the same weights."""
    full = weights_of(case)
    narrow = {name: array.astype(jnp.dtype(dtype)) for name, array in full.items()}
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    return plain(case, narrow, wide, LOSSES[dtype])


# --- all of them ------------------------------------------------------------------------------------------------------


def _begins_windows(policy: str) -> bool:
    """Return whether layers that exchange slots observe windows, which begin anew behind each eviction."""
    return Case(policy=policy).allocation != "uniform" and reference.policy(policy).window > 1


def _goes_on(case: Case) -> bool:
    return _is_exact(case) and _turns(case)


def _turns(case: Case) -> bool:
    return case.base != "butler" and case.rope not in ("dynamic", "longrope", "longrope_beyond")


def _is_exact(case: Case) -> bool:
    """Return whether rounding stays small: a fit makes much of it, and is made once where the prompt is held."""
    return _one_device(case) and "match" not in case.links


def _joins(case: Case) -> bool:
    return (
        _one_device(case)
        and case.base != "butler"
        and case.rope not in ("longrope", "longrope_beyond")
        and not (case.allocation.startswith("threshold") and case.evict_every > 1)
    )


WAYS: dict[str, Way] = {
    "in one program": Way(
        lambda case, _: plain(case), _one_device, at_once=False,
        wanted=_begins_windows, with_it=dict(when="prompt", entry="stream", evict_every=2, new=6, end=()),
    ),
    "engine": Way(engine, _joins, changes=dict(question=None)),
    "turns": Way(turns, _goes_on, TURNS, changes=dict(question=None)),
    "match": Way(
        turns, lambda case: _one_device(case) and _turns(case) and not any(case.windows) and case.family != "gemma2",
        ("turn",), changes=dict(question=None, when="block"),
        wanted=lambda policy: "match" in Case(policy=policy).links and not policy.startswith("butler"),
    ),
    "rewind": Way(
        rewound, lambda case: _goes_on(case) and not any(case.windows), changes=dict(question=None),
        wanted=_learns_nothing, share=1.0,
    ),
    "repetition": Way(
        lambda case, _: plain(case), lambda case: _one_device(case) and any(case.windows),
        wanted=lambda policy: "measure='change'" in policy,
    ),
    "scales": Way(scales, lambda case: _one_device(case) and _has_no_scale(case), ("1", "2", "3"), wanted=_divides),
    "equal": Way(equal, _is_exact, ("keys", "values", "both", "heads")),
    "dtypes": Way(dtypes, _is_exact, (*LOSSES,), changes=dict(entry="stream", cache_dtype=None)),
}  # fmt: skip
