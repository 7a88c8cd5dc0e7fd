"""The plan of a run: its options are checked against its model and prompts.

Which block comes when, and which one evicts, is in kvjax/schedule.py.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Bool, Int

from kvjax import OutputProjection, Policy
from kvjax._src.capacity import CacheSpec, rounded_up, ways_of
from kvjax._src.chains import policy_of
from kvjax._src.checks import is_known, plain
from kvjax._src.layer_caches import ALIKE
from kvjax._src.policy import fits_biases
from kvjax._src.policy_checks import check_latents, check_measured, check_policy_given, check_state
from kvjax._src.quantise import Dtypes, DtypesLike, check_dtypes, is_quantised
from kvjax.schedule import When, moments, turn_block
from models.butler import Butler
from models.config import Config, Rope, check_attention
from models.decoder import Decoder
from models.networks import network_of, remembers, several, wanted_by
from models.options import Options
from models.plan import Plan, Rows
from models.prompts import CheckedPrompt, Kept, cache_heads
from models.recurrent import states_of
from models.selecting import Selection, checked_selection
from models.sizing import budgets_of, copied, held_of, reading_of, resized, sized
from models.steps import Run

_HERE = (os.path.dirname(__file__) + os.sep,)  # so that a warning names the line that called this package


def plan_run(model: Decoder, prompt: CheckedPrompt, options: Options) -> tuple[Run, CacheSpec]:
    """Check the options of a run against its model and prompts, and return the run and the spec of its cache."""
    config, mesh, text, kept = model.config, mesh_of(model), *prompt
    seen, policy = text.start + text.lengths, policy_of(options.policy)
    when, every = moments(policy, "block" if options.when is None else options.when, options.evict_every)
    options = dataclasses.replace(options, policy=policy, budget=plain(options.budget))
    if mesh is not None:
        _check_mesh(mesh, policy, len(seen))
    selection = None
    if options.select is not None:
        most = int(text.lengths.max())
        selection = checked_selection(options.select, policy, options.budget, options.sinks, most, options.reserve)
    _check_hybrid(config, policy, options)
    if policy is not None and len(set(config.cached_heads)) > 1 and not policy.allocation.even:
        raise ValueError(f"{policy.name!r}: {ALIKE.format(policy.allocation.name)}")
    if policy is not None and config.shared_layers:
        _check_shared(policy)
    if config.rope.follows_length:
        _check_frequencies(config.rope, prompt, seen, options.reserve)
    traced = not is_known(*jax.tree.leaves(model))
    own = jax.tree.leaves(model.embedding)[0].dtype.name  # so that shapes alone, without arrays, will do
    dtype, rounded_to = _stored(own, options.cache_dtype, traced)
    if kept is not None:
        _check_kept(kept, options, mesh, selection, traced)
        dtype, rounded_to = kept.dtypes, (None, None)
    network = network_of(options.networks, model, policy, None if selection is None else selection.source)
    check_measured(policy, len(config.cached_layers), cache_heads(config, None))
    if config.latent is not None:
        check_latents(policy, dtype)
    if not isinstance(options.projection, tuple | None) or isinstance(options.projection, OutputProjection):
        raise ValueError(f"projection is {options.projection!r}; expected what models.output_projection returns.")
    heads, positions = cache_heads(config, policy), "absolute" if policy is None else policy.positions
    if kept is not None:
        heads, positions = kept.heads, kept.positions
    stored = dict[str, Any](positions=positions, cache_dtype=dtype, rounded_to=rounded_to)
    plan = Plan(policy, when, every, mesh, selection, heads, **stored)
    if policy is None:
        return _plan_full(Run(model, Rows(jax.device_put(seen)), None, network, plan), prompt, options)
    if isinstance(network, Butler):
        policy = network.fitted(policy)
        plan = dataclasses.replace(plan, memory_slots=rounded_up(prompt.most + options.reserve))
    for own, dim in dict.fromkeys(_heads_of_layers(config, policy)):
        check_state(policy, dim, own, config.num_heads // own)  # before anything is compiled
    budgets = budgets_of(policy, options, seen)
    if policy.published is not None and policy.published.final:
        _warn_of_choices(policy, max(int(text.context.max()), 0), options.block, when, kept is not None)
    plan = dataclasses.replace(plan, policy=policy, overfull=_overfull(plan, policy, prompt, budgets))
    if fits_biases(policy) and not policy.draws:
        _check_fitted(config, plan, kept is not None and kept.spent and bool((text.context > 0).any()))
    reading = _reading(plan, prompt, options, budgets, seen)
    spec = sized(_spec(model, plan, prompt, options), plan, prompt, options, budgets, reading)
    _warn_of_copies(config, plan, prompt, options)
    if policy.cumulative and overflowing(plan, prompt, options)[1].any():
        _warn_of_sums(policy, int(budgets.min()))
    _check_attended(config, spec)

    # Above the slots a row would wait (Evidence.waits): then its window depended on how long the other rows are.
    def at_most(budgets: np.ndarray, spec: CacheSpec) -> np.ndarray:
        slots = spec.slots if policy.allocation.fills else np.iinfo(np.int32).max
        return np.minimum(budgets, min(slots, max(window or slots for window in config.cached_windows)))

    wide = None if reading is None else at_most(reading, spec.first)
    each = seen, at_most(budgets, spec), at_most(budgets + text.questions, spec), wide
    rows = Rows(*jax.device_put(each))
    return Run(model, rows, options.projection, network, plan), spec


def _reading(
    plan: Plan, prompt: CheckedPrompt, options: Options, budgets: np.ndarray, seen: np.ndarray
) -> np.ndarray | None:
    """Return each row's budget while its prompt is read, if it has one of its own."""
    if options.reading_budget is None or not prompt.fed:
        return None
    assert plan.policy is not None
    kinds = {
        "a prompt that is evicted once, at its end: it is kept whole until then": plan.when == "prompt",
        "a prompt that goes on in a cache, which has one budget": prompt.kept is not None,
        "a model on several devices": plan.several is not None,
    }
    if any(kinds.values()):
        what = next(kind for kind, has in kinds.items() if has)
        raise ValueError(f"reading_budget is {options.reading_budget!r}, but this is {what}; leave it out.")
    return reading_of(plan.policy, options, seen, budgets)


def _heads_of_layers(config: Config, policy: Policy | None) -> tuple[tuple[int, int], ...]:
    """Return the heads of each layer's cache, and the head dim."""
    of_queries = policy is not None and policy.heads == "query"
    return tuple((config.num_heads if of_queries else own, dim) for own, dim in config.cached_heads)


def _spec(model: Decoder, plan: Plan, prompt: CheckedPrompt, options: Options) -> CacheSpec:
    """Return the spec of a run's cache, without its slots and pages; a kept one has pages of its own size."""
    config, kept = model.config, prompt.kept
    return CacheSpec(
        len(prompt.text.lengths), plan.heads, config.head_dim, config.num_heads // plan.heads,
        len(config.cached_layers), config.cached_windows, plan.policy, plan.cache_dtype, plan.positions, plan.mesh,
        kept.page_size if kept is not None and kept.pages else options.page_size,
        rotated=None if config.latent is None else config.latent.rotated,
        recurrent=states_of(config, jax.tree.leaves(model.embedding)[0].dtype),
        layer_heads=_heads_of_layers(config, plan.policy) if len(config.kinds) > 1 else (),
    )  # fmt: skip


def _plan_full(run: Run, prompt: CheckedPrompt, options: Options) -> tuple[Run, CacheSpec]:
    """Plan a run in which nothing is evicted."""
    config, held, kept = run.model.config, prompt.most + options.reserve, prompt.kept
    if run.plan.selection is None:
        check_policy_given(None, options.budget)
    if options.reading_budget is not None:
        wrong = f"reading_budget is {options.reading_budget!r}, but nothing is evicted here"
        raise ValueError(f"{wrong}; give a policy, or leave it out.")
    if (taken := held - prompt.padding) > config.max_positions:
        raise ValueError(
            f"the prompt and its answer take {taken} positions, but the model has {config.max_positions}: "
            "shorten the prompt, or give a policy and a budget."
        )
    slots = rounded_up(held)
    spec = _spec(run.model, run.plan, prompt, options)
    spec = dataclasses.replace(spec, layer_slots=(slots,) * len(spec.windows))
    if run.plan.selection is not None:
        run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, memory_slots=slots))
    if kept is not None:
        turn = prompt.text.tokens.shape[1]
        size = turn_block(turn, options.block)  # turns of one number of blocks share their programs
        spec = resized(spec, kept, -(-turn // size) * size + options.reserve, held)
    _check_attended(config, spec)
    return run, spec


def _check_attended(config: Config, spec: CacheSpec) -> None:
    """Check that a cache holds no more than a model attends to without its indexer."""
    if not config.most_attended:
        return
    if (slots := max(spec.slots, spec.first.slots)) > config.most_attended:
        raise ValueError(
            f"a head may hold {slots} tokens, but of more than {config.most_attended} the model attends to those that "
            "its indexer chooses, which is not read: give a smaller budget or block, or a shorter prompt."
        )


def overflowing(
    plan: Plan, prompt: CheckedPrompt, options: Options
) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
    """Return the rows whose contexts do not fit their budgets, and those whose answers may not."""
    assert plan.policy is not None
    budgets = budgets_of(plan.policy, options, prompt.text.start + prompt.text.lengths)
    held = 0 if prompt.kept is None else held_of(plan.policy, prompt.kept)
    context, always = prompt.text.context, not plan.policy.allocation.fills
    compresses = ((held + context > budgets) | always) & (context > 0)
    after = np.where(compresses, budgets, held + context)
    return compresses, ((after + options.reserve > budgets) | always) & (plan.evict_every > 0)


def mesh_of(model: Decoder) -> Mesh | AbstractMesh | None:
    """Return the mesh that a model is on, None without one; in a derivative, only one of several devices."""
    leaf = jax.tree.leaves(model)[0]
    known = is_known(leaf)
    sharding = getattr(leaf, "sharding", None) if known else jax.typeof(leaf).sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding.mesh if known or sharding.mesh.size > 1 else None


def _check_mesh(mesh: Mesh | AbstractMesh, policy: Policy | None, rows: int) -> None:
    """Check that a mesh divides the rows of a batch, and that a policy on several devices takes no gradient."""
    ways = mesh.shape["data"]
    if rows % ways:
        raise ValueError(f"data={ways} does not divide the batch of {rows}; give a multiple of {ways} rows, or data=1.")
    wanted = None if policy is None else policy.needs.reconstruction
    if policy is not None and mesh.size > 1 and wanted is not None and wanted.loss is not None:
        raise ValueError(
            f"{policy.name!r} takes the gradient of a loss, which runs on one device, but the model is on a mesh of "
            f"{mesh.size}: load it on one, or give another policy, such as 'kvzip'."
        )


def _check_shared(policy: Policy) -> None:
    """Check that an eviction leaves keys and values where layers that share them find them."""
    kinds = {
        "lets heads of all layers compete (take '@uniform')": not policy.allocation.even,
        "changes keys or values that stay": policy.merging is not None or fits_biases(policy),
        "turns keys (take 'absolute' positions)": policy.positions != "absolute",
    }
    if any(kinds.values()):
        what = next(kind for kind, has in kinds.items() if has)
        raise ValueError(f"{policy.name!r} {what}, but some layers of this model attend to the cache of another.")


def _check_hybrid(config: Config, policy: Policy | None, options: Options) -> None:
    """Check that a run asks nothing of layers without a KV cache that only attention has."""
    wanted = None if policy is None else policy.needs.reconstruction
    kinds = {
        "select=": options.select is not None,
        "a network that predicts (networks=)": bool(wanted_by(policy) or several(options.networks)),
        "the gradient of a loss": wanted is not None and wanted.loss is not None,
    }
    for what in (kind for kind, asked in kinds.items() if asked):
        check_attention(config, f"{'this run' if policy is None else f'the policy {policy.name!r}'} reads {what}")


def _check_kept(
    kept: Kept, options: Options, mesh: Mesh | AbstractMesh | None, selection: Selection | None, traced: bool
) -> None:
    """Check that a run may continue from a cache: nothing was remembered outside it, and it stays as it is stored."""
    if selection is not None or remembers(policy_of(options.policy)):
        what = "a selection" if selection is not None else "the network that the policy reads"
        raise ValueError(
            f"{what} remembers tokens outside the cache, and this memory is not kept: leave cache out, and give the "
            "whole prompt."
        )

    def where(ways: tuple[int, int]) -> str:
        return "one device" if ways == (1, 1) else f"a mesh with data={ways[0]} and tensor={ways[1]}"

    if kept.pages and kept.ways != (ways := ways_of(mesh)):
        raise ValueError(
            f"the cache's pages are on {where(kept.ways)}, but the model is on {where(ways)}: continue on the "
            "devices that the cache was made on, or leave cache out and give the whole prompt."
        )
    if options.cache_dtype is not None and (names := check_dtypes(options.cache_dtype)) != kept.dtypes:
        raise ValueError(
            f"the cache is of {kept.dtypes}, but cache_dtype is {str(names)!r}: a cache keeps its dtype, so leave "
            "cache_dtype out."
        )
    if traced and any(map(is_quantised, kept.dtypes)):
        raise ValueError(
            f"the weights are traced (by jax.jit, vmap or grad), but a cache of {kept.dtypes} passes no derivative on: "
            "call outside, or continue from a cache of floats."
        )


def _overfull(plan: Plan, policy: Policy, prompt: CheckedPrompt, budgets: np.ndarray) -> bool:
    """Return whether a row that gets only a question is above its budget in the cache that it goes on in.

    An answer must have the prompt's budget: a step evicts one token, so it cannot reach a smaller one.
    """
    if prompt.kept is None or not plan.evict_every:
        return False
    held, room = held_of(policy, prompt.kept), budgets + prompt.text.questions
    if not prompt.fed and (held > room).any():
        row = int(np.argmax(held - room))
        raise ValueError(
            f"the cache holds {int(held[row])} tokens per head, but budget and question sum to {int(room[row])}: give "
            "the same policy, budget and question as to prefill, or evict_every=0."
        )
    return prompt.fed and bool(((prompt.text.context == 0) & (held > budgets)).any())


def _check_fitted(config: Config, plan: Plan, again: bool) -> None:
    """Check that a policy that fits biases can do so in this run: it needs whole heads, and attention as it is.

    ``again`` says that the context goes on in a cache without sample queries, which were dropped once it was fitted.
    """
    policy = plan.policy
    assert policy is not None and policy.merging is not None
    name, link = policy.name, policy.merging.name
    if plan.several is not None:
        raise ValueError(f"{name!r}: {link!r} fits the heads of one device, but the model is on a mesh; leave it out.")
    kinds = {
        "sliding windows": any(config.sliding_windows),
        "a cap of its attention logits": config.attention_soft_cap is not None,
        "attention sinks": config.attention_sinks,
    }
    if any(kinds.values()):
        what = next(kind for kind, has in kinds.items() if has)
        raise ValueError(f"{name!r}: {link!r} fits attention over all tokens, but this model has {what}; leave it out.")
    if again:
        raise ValueError(
            f"{name!r}: {link!r} has fitted this cache once, and its sample queries are gone: hold the new text back "
            "with question=, or give policy=None, which evicts nothing more."
        )


def _check_frequencies(rope: Rope, prompt: CheckedPrompt, seen: Int[np.ndarray, "B"], reserve: int) -> None:
    """Check that all keys of a text are rotated by the same frequencies, where these depend on its length.

    ``seen`` are the tokens of each row, with those in the cache; ``reserve`` tokens may follow.
    """
    most, fed_before = rope.original_positions, np.asarray(prompt.text.start)
    crossing = seen > most
    if rope.type == "longrope":  # longer texts have frequencies of their own, but one set for all lengths
        crossing &= fed_before <= most
    if prompt.kept is not None and prompt.fed and crossing.any():
        raise ValueError(
            f"the text now has {seen[crossing].max()} tokens, but this model's rotary frequencies depend on the text's "
            f"length beyond {most} tokens, and the cache's keys were rotated with those of a shorter text: leave cache "
            "out, and give the whole prompt."
        )
    late = (seen <= most) & (seen + reserve > most)
    if rope.type == "longrope" and late.any():
        raise ValueError(
            f"the text has {seen[late].max()} tokens and up to {reserve} may follow, but this model's rotary "
            f"frequencies change beyond {most} tokens: let at most {most - seen[late].max()} follow, or give a longer "
            "prompt."
        )


def _warn_of_choices(policy: Policy, context: int, block: int, when: When, goes_on: bool) -> None:
    """Warn if a policy that should choose once, after the prompt, chooses more than once."""
    if when == "block" and context > block:
        warnings.warn(
            f"{policy.name!r} is made to choose once, after the whole prompt, but a prompt of {context} tokens comes "
            f"in blocks of {block}, and each block chooses again among what the last one left: give "
            "when='published', or a block as long as the prompt.",
            skip_file_prefixes=_HERE,
        )
    elif goes_on and context:
        warnings.warn(
            f"{policy.name!r} is made to choose once, but {context} more tokens follow its choice, and it chooses "
            "again among what is left: hold them back with question=, or give no policy.",
            skip_file_prefixes=_HERE,
        )


def _warn_of_sums(policy: Policy, budget: int) -> None:
    """Warn, unless recent tokens stay, that an answer's leave first, as sums over all queries never fall."""
    if policy.protected(budget)[1]:
        return
    warnings.warn(
        f"{policy.name!r} sums attention over all queries, which new tokens have had little of: in decode each leaves "
        "before the old ones, and what the model has just written is not kept. Keep half for the newest tokens, as "
        "H2O does: end the chain with '+protect(recent=0.5)'.",
        skip_file_prefixes=_HERE,
    )


def _warn_of_copies(config: Config, plan: Plan, prompt: CheckedPrompt, options: Options) -> None:
    """Warn if a text is within the model's positions, but the tokens that are fed again behind it are not."""
    policy, text, most = plan.policy, prompt.text, config.max_positions
    assert policy is not None
    if policy.needs.reconstruction is None:
        return
    part = int(text.context.max()) if plan.when == "prompt" else options.block
    ends = (text.start + text.context, part), (text.start + text.lengths + options.reserve, plan.evict_every)
    for rows, (end, size) in zip(overflowing(plan, prompt, options), ends, strict=True):
        behind = end + np.array([copied(policy, min(size, int(n))) for n in end])
        if (late := rows & (end <= most) & (behind > most)).any():
            warnings.warn(
                f"{policy.name!r} feeds tokens again at positions up to {behind[late].max() - 1:,}, but the model was "
                f"made for texts of {most:,} tokens, so what they attend to may mean little: give a shorter text, or "
                "fewer tokens at a time (chunk= or window=).",
                skip_file_prefixes=_HERE,
            )
            return


def _stored(own: str, asked: DtypesLike | None, traced: bool) -> tuple[Dtypes, tuple[str | None, ...]]:
    """Return the dtypes of a new cache, and the eight bits that rows are rounded to but not stored in (Plan).

    ``own`` is the model's dtype. Through ``traced`` weights a derivative may be taken, which does not pass eight bits.
    """
    names = Dtypes(own, own) if asked is None else check_dtypes(asked)
    rounded_to = tuple(name if traced and is_quantised(name) else None for name in names)
    return Dtypes(*(own if eight else name for name, eight in zip(names, rounded_to, strict=True))), rounded_to
