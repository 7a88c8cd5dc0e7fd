"""From a prompt to an answer inside a fixed cache: prefill by blocks, then decode.

Blocks are aligned to the prompt's end: the first block of a row may be part empty, the last one never is. So a score's
observation window lies in one block, all rows of a batch reach their last token in the same step, and a row meets the
same blocks alone as in any batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import KVCache, Policy
from models.decoder import Decoder

When = Literal["block", "prompt"]
HostOrDevice = Array | np.ndarray


class Prefilled(NamedTuple):
    """``logits`` of the last token, [B, V], or of all tokens, [B, T, V]."""

    cache: KVCache
    logits: Array


class Generation(NamedTuple):
    """``tokens`` [B, max_new_tokens], padded behind each row's end; ``lengths`` [B] counts them, end token included."""

    tokens: Int[Array, "B new"]
    cache: KVCache
    lengths: Int[Array, "B"]


class Sampling(NamedTuple):
    """How the next token is chosen: greedy at temperature 0, else drawn from the ``top_k`` or ``top_p`` most likely."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a run is made of, and its buffers' sizes; one compilation a plan."""

    policy: Policy | None
    slots: int  # of each head, at the end of the prompt and in decode
    prompt_slots: int  # of each head, while the prompt comes in
    when: When
    evict_every: int | None
    mesh: Mesh | AbstractMesh | None


def prefill(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    lengths: Int[HostOrDevice, "B"] | None = None,
    *,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    when: When = "block",
    reserve: int = 0,
    outputs: Literal["last", "all"] = "last",
) -> Prefilled:
    """Runs a prompt through the model block by block, in one compiled program whose memory does not grow with it.

    Args:
        tokens: prompts, padded on the right.
        lengths: how many tokens of each row count; all by default.
        policy: what to keep, a policy or its short name; None or "full" keeps all.
        budget: tokens that each head keeps: a number, or a ratio of the row's prompt (a float in (0, 1]).
        block: tokens a step.
        when: evict after every "block", or once when the "prompt" is in (the block then only bounds the activations).
        reserve: slots to leave free for tokens that come later (a full cache only; a budget leaves a block's worth).
        outputs: logits of the "last" token or of "all" tokens; the latter grow with the prompt.

    Returns:
        The cache and the logits, float32.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a policy, budget or block that cannot be, or a
            prompt longer than the model's positions when nothing is evicted.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> cache, logits = models.prefill(model, jnp.arange(40)[None], policy="h2o+caote", budget=16, block=8)
        >>> logits.shape, cache.num_live.min().item(), cache.num_live.max().item()
        ((1, 64), 16, 16)
    """
    tokens, lengths = _check_prompt(model, tokens, lengths)
    plan, budgets = _plan(model, tokens.shape[1], lengths, policy, budget, block, when, None, reserve)
    if outputs not in ("last", "all"):
        raise ValueError(f"outputs is {outputs!r}; there are 'last' and 'all'.")
    blocks, positions = _blocks(tokens, lengths, block)
    cache, logits = _prefill(model, blocks, positions, lengths, budgets, plan, outputs == "all")
    if outputs == "all":  # [n, B, m, V], aligned to the end -> [B, T, V], aligned to the start
        logits = logits.swapaxes(0, 1).reshape(tokens.shape[0], -1, logits.shape[-1])
        source = jnp.arange(tokens.shape[1])[None] + logits.shape[1] - lengths[:, None]
        logits = jnp.take_along_axis(logits, source[..., None], axis=1, mode="clip")
    return Prefilled(cache, logits)


def generate(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    max_new_tokens: int = 64,
    when: When = "block",
    evict_every: int | None = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    end: tuple[int, ...] | None = None,
) -> Generation:
    """From prompts to answers in one compiled program: a scan over blocks, then a loop until each row has ended.

    Args:
        tokens, lengths, policy, budget, block, when: see :func:`prefill`.
        max_new_tokens: how many tokens at most.
        evict_every: evict in decode at every step (1), every n steps (n slots more a head), or never (None).
        temperature: 0 takes the most likely token; above, tokens are drawn with ``key``.
        top_k, top_p: draw only from the k most likely tokens, or from the fewest that hold the share p.
        end: tokens that end a row; the config's by default, () for none.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> out = models.generate(model, jnp.arange(40)[None], policy="snapkv(window=8)", budget=16, block=8,
        ...                       max_new_tokens=4)
        >>> out.tokens.shape, out.lengths.tolist(), out.cache.num_live.max().item()
        ((1, 4), [4], 16)
    """
    tokens, lengths = _check_prompt(model, tokens, lengths)
    sampling = _check_sampling(temperature, top_k, top_p, key)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1.")
    plan, budgets = _plan(model, tokens.shape[1], lengths, policy, budget, block, when, evict_every, max_new_tokens)
    blocks, positions = _blocks(tokens, lengths, block)
    key = jax.random.key(0) if key is None else key
    end = model.config.eos if end is None else tuple(end)
    return _generate(model, blocks, positions, lengths, budgets, key, plan, sampling, max_new_tokens, end)


def stream(
    model: Decoder,
    tokens: Int[HostOrDevice, "B T"],
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    policy: Policy | str | None = None,
    budget: int | float | None = None,
    block: int = 128,
    max_new_tokens: int = 64,
    when: When = "block",
    evict_every: int | None = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    end: tuple[int, ...] | None = None,
    on_block: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[np.ndarray, KVCache]]:
    """:func:`generate` as an iterator: yields each step's tokens as they come, and the cache behind them.

    The prompt is fed from the host block by block, so one compilation serves prompts of any length under a budget (a
    full cache, and ``when="prompt"``, have a buffer that depends on it). Rows that have ended yield -1.

    Args:
        on_block: called after each block of the prompt with the tokens done and the tokens in all, for progress bars.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import models
        >>> config = models.Config(64, 32, 96, num_layers=2, num_heads=4, num_kv_heads=2)
        >>> model = models.Decoder(config, rngs=nnx.Rngs(0))
        >>> prompt = jnp.arange(40)[None]
        >>> steps = list(models.stream(model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4))
        >>> whole = models.generate(model, prompt, policy="h2o", budget=16, block=8, max_new_tokens=4)
        >>> [int(step[0]) for step, _ in steps] == whole.tokens[0].tolist()
        True
    """
    tokens, lengths = _check_prompt(model, tokens, lengths)
    sampling = _check_sampling(temperature, top_k, top_p, key)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1.")
    plan, budgets = _plan(
        model, tokens.shape[1], lengths, policy, budget, block, when, evict_every, max_new_tokens, fit_prompt=False
    )
    key = jax.random.key(0) if key is None else key
    end = model.config.eos if end is None else tuple(end)
    return _stream(model, tokens, lengths, budgets, key, plan, block, sampling, max_new_tokens, end, on_block)


def _stream(model, tokens, lengths, budgets, key, plan, block, sampling, max_new_tokens, end, on_block):
    blocks, positions = _blocks(tokens, lengths, block)
    cache = _empty_cache(model, plan, tokens.shape[0], plan.prompt_slots)
    logits = jnp.zeros(())
    for index, (block_tokens, position) in enumerate(zip(blocks, positions, strict=True)):
        if (position < 0).all():
            continue
        evicts = plan.when == "block" or index == len(blocks) - 1
        cache, logits = _block_step(model, cache, block_tokens, position, lengths, budgets, plan.policy, evicts)
        if on_block is not None:
            logits.block_until_ready()
            on_block(int(position.max()) + 1, int(lengths.max()))
    if plan.slots != plan.prompt_slots:
        cache = kvjax.compact(cache, plan.slots)
    key, draw = jax.random.split(key)
    token = np.asarray(_sample(logits, draw, sampling))
    finished = np.isin(token, end)
    yield token, cache
    for step in range(1, max_new_tokens):
        if finished.all():
            return
        key, draw = jax.random.split(key)
        cache, drawn = _token_step(
            model, cache, token, finished, lengths, budgets, draw, step, plan.policy, plan.evict_every, sampling
        )
        token = np.asarray(drawn)
        yield np.where(finished, -1, token), cache
        finished = finished | np.isin(token, end)


@functools.partial(jax.jit, static_argnames=("policy", "evicts"), donate_argnames="cache")
def _block_step(model, cache, tokens, position, lengths, budgets, policy, evicts):
    hidden, cache = _run(model, cache, tokens, position, lengths, budgets if evicts else None, policy)
    return cache, model.logits(hidden[:, -1])


@functools.partial(jax.jit, static_argnames=("policy", "evict_every", "sampling"), donate_argnames="cache")
def _token_step(model, cache, token, finished, lengths, budgets, key, step, policy, evict_every, sampling):
    logits, cache = _decode(model, cache, token, finished, lengths, budgets, step, policy, evict_every)
    return cache, _sample(logits, key, sampling)


@functools.partial(jax.jit, static_argnames=("plan", "all_logits"))
def _prefill(model, blocks, positions, lengths, budgets, plan, all_logits=False):
    """Blocks [n, B, m] -> cache and logits, [B, V] or [n, B, m, V]."""
    cache = _empty_cache(model, plan, blocks.shape[1], plan.prompt_slots)

    def step(carry, scanned, evicts):
        cache, _ = carry
        tokens, position = scanned
        hidden, cache = _run(model, cache, tokens, position, lengths, budgets if evicts else None, plan.policy)
        return (cache, hidden[:, -1]), model.logits(hidden) if all_logits else None

    carry = (cache, jnp.zeros((blocks.shape[1], model.config.hidden_size), model.embedding[...].dtype))
    if plan.when == "block":
        carry, logits = jax.lax.scan(functools.partial(step, evicts=True), carry, (blocks, positions))
    else:
        observe = functools.partial(step, evicts=False)
        carry, logits = jax.lax.scan(observe, carry, (blocks[:-1], positions[:-1]))
        carry, last = step(carry, (blocks[-1], positions[-1]), evicts=True)
        logits = jnp.concatenate([logits, last[None]]) if all_logits else None
    cache, hidden = carry
    if plan.slots != plan.prompt_slots:
        cache = kvjax.compact(cache, plan.slots)
    return cache, logits if all_logits else model.logits(hidden)


@functools.partial(jax.jit, static_argnames=("plan", "sampling", "max_new_tokens", "end"))
def _generate(model, blocks, positions, lengths, budgets, key, plan, sampling, max_new_tokens, end):
    cache, logits = _prefill(model, blocks, positions, lengths, budgets, plan)
    B = blocks.shape[1]
    pad = model.config.pad if model.config.pad is not None else (model.config.eos or (0,))[0]
    key, draw = jax.random.split(key)
    token = _sample(logits, draw, sampling)
    out = jnp.full((B, max_new_tokens), pad, jnp.int32).at[:, 0].set(token)
    finished = jnp.isin(token, jnp.array(end, jnp.int32))

    def more(loop):
        step, *_, finished, _, _ = loop
        return (step < max_new_tokens) & ~finished.all()

    def advance(loop):
        step, cache, key, token, finished, out, count = loop
        logits, cache = _decode(model, cache, token, finished, lengths, budgets, step, plan.policy, plan.evict_every)
        key, draw = jax.random.split(key)
        token = _sample(logits, draw, sampling)
        out = out.at[:, step].set(jnp.where(finished, pad, token))
        count = count + ~finished
        finished = finished | jnp.isin(token, jnp.array(end, jnp.int32))
        return step + 1, cache, key, token, finished, out, count

    loop = (jnp.int32(1), cache, key, token, finished, out, jnp.ones(B, jnp.int32))
    _, cache, _, _, _, out, count = jax.lax.while_loop(more, advance, loop)
    return Generation(out, cache, count)


def _decode(model, cache, token, finished, lengths, budgets, step, policy, evict_every):
    """Feeds one token a row; finished rows are left as they are."""
    position = jnp.where(finished, -1, cache.next_position)[:, None]
    excess = None
    if evict_every is None:
        budgets = None
    elif evict_every > 1:
        budgets = jnp.where(step % evict_every == 0, budgets, cache.num_slots)
    else:
        excess = 1
    hidden, cache = _run(model, cache, token[:, None], position, lengths, budgets, policy, excess)
    return model.logits(hidden[:, 0]), cache


def _run(model, cache, tokens, position, lengths, budgets, policy, excess=None):
    """One block, or one decode step, of all layers."""

    def attend(cache, layer, sliding_window, query, key, value):
        out, cache = kvjax.attend(
            cache,
            query,
            key,
            value,
            position,
            policy=policy,
            budget=budgets,
            excess=excess,
            layer=layer,
            sliding_window=sliding_window,
        )
        return out, cache, None

    hidden, cache, _ = model.run(tokens, position, lengths, attend, cache)
    return hidden, cache


def _empty_cache(model: Decoder, plan: _Plan, batch: int, slots: int) -> KVCache:
    config = model.config
    state = ()
    if plan.policy is not None:
        shape = (batch, config.num_kv_heads, config.num_heads // config.num_kv_heads, slots)
        zeros = plan.policy.init(*shape)
        state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (config.num_layers, *leaf.shape)), zeros)
    cache = KVCache.init(
        batch=batch,
        kv_heads=config.num_kv_heads,
        slots=slots,
        head_dim=config.head_dim,
        layers=config.num_layers,
        dtype=model.embedding[...].dtype,
        state=state,
    )
    mesh = plan.mesh
    if mesh is None:
        return cache

    def place(leaf: Array) -> Array:
        spec = PartitionSpec("data") if leaf.ndim == 1 else PartitionSpec(None, "data", "tensor")
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, cache)


def _sample(logits: Float[Array, "B V"], key: Array, sampling: Sampling) -> Int[Array, "B"]:
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        weakest = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < weakest, -jnp.inf, logits)
    if sampling.top_p is not None:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(descending, axis=-1)
        inside = jnp.cumsum(probability, axis=-1) - probability < sampling.top_p  # the first one always is
        weakest = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < weakest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _blocks(tokens: HostOrDevice, lengths: HostOrDevice, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts prompts into blocks [n, B, m] that end where the prompts end; padding stands in front, at position -1.

    On the host: on the device each length of a prompt would compile again.
    """
    host = np.asarray(tokens)
    B, T = host.shape
    count = math.ceil(T / block)
    position = np.arange(count * block)[None] - (count * block - np.asarray(lengths)[:, None])
    aligned = np.take_along_axis(host, np.clip(position, 0, T - 1), axis=1)
    position = np.maximum(position, -1)
    blocks, positions = (x.astype(np.int32).reshape(B, count, block).swapaxes(0, 1) for x in (aligned, position))
    return blocks, positions


def _plan(
    model, T, lengths, policy, budget, block, when, evict_every, reserve, fit_prompt=True
) -> tuple[_Plan, Int[Array, "B"] | None]:
    """Checks the arguments of a run and sizes its buffers. ``fit_prompt`` lets a short prompt have fewer slots."""
    if block < 1:
        raise ValueError(f"block is {block}; a block has at least 1 token.")
    if when not in ("block", "prompt"):
        raise ValueError(f"when is {when!r}; there are 'block' and 'prompt'.")
    if evict_every is not None and evict_every < 1:
        raise ValueError(f"evict_every is {evict_every}; give a number of steps from 1, or None for never.")
    mesh, rows = _mesh_of(model), len(np.asarray(lengths))
    if mesh is not None and rows % mesh.shape["data"]:
        ways = mesh.shape["data"]
        raise ValueError(f"data={ways} does not divide the batch of {rows}; give a multiple of {ways} rows, or data=1.")
    if isinstance(policy, str):
        policy = None if policy.strip() == "full" else kvjax.parse(policy)
    if policy is None:
        positions, most = T + reserve, model.config.max_positions
        if budget is not None:
            raise ValueError(
                f"a budget of {budget} was given without a policy that says what to keep; try 'snapkv+caote'."
            )
        if positions > most:
            raise ValueError(
                f"the prompt and its answer take {positions} positions, but the model has {most}: "
                "shorten the prompt, or give a policy and a budget."
            )
        return _Plan(None, positions, positions, "block", None, mesh), None
    if budget is None:
        raise ValueError(f"the policy {policy.name!r} needs a budget: slots per head, or a ratio of the prompt.")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(f"the budget's ratio is {budget}; give a float in (0, 1], or an int for slots per head.")
    row_lengths = np.asarray(lengths)
    if isinstance(budget, float):
        budgets = np.ceil(np.round(budget * row_lengths, 6)).astype(np.int32)  # 0.07 of 100 is 7, not 7.000000000000001
    else:
        budgets = np.full(row_lengths.shape, budget, np.int32)
    for row_budget in np.unique(budgets):
        kvjax.check_budget(policy, int(row_budget))
    largest = int(budgets.max())
    decode_room = reserve if evict_every is None else evict_every
    if when == "prompt":
        slots, prompt_slots = largest + decode_room, T
        slots, prompt_slots = (max(slots, prompt_slots),) * 2 if slots >= prompt_slots else (slots, prompt_slots)
    else:
        slots = largest + max(block, decode_room)
        slots = min(slots, T + reserve) if fit_prompt else slots
        prompt_slots = slots
    return _Plan(policy, slots, prompt_slots, when, evict_every, mesh), jnp.asarray(budgets)


def _mesh_of(model: Decoder) -> Mesh | AbstractMesh | None:
    sharding = getattr(model.embedding[...], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _check_prompt(model: Decoder, tokens: HostOrDevice, lengths: HostOrDevice | None) -> tuple[np.ndarray, Array]:
    host = np.asarray(tokens)
    if host.ndim != 2 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(f"tokens are {host.dtype} {host.shape}; expected integers [B, T].")
    if host.size == 0:
        raise ValueError(f"the prompt is empty (tokens {host.shape}); give at least 1 token a row.")
    B, T = host.shape
    counts = np.full(B, T) if lengths is None else np.asarray(lengths)
    if counts.shape != (B,) or counts.min() < 1 or counts.max() > T:
        raise ValueError(f"lengths are {counts.tolist()}; expected {B} numbers from 1 (no empty prompt) to {T}.")
    counted = host[np.arange(T) < counts[:, None]]
    vocabulary = model.config.vocab_size
    if counted.min() < 0 or counted.max() >= vocabulary:
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise ValueError(f"token {wrong} is outside the vocabulary of {vocabulary}; was it made by another tokenizer?")
    # The tokens stay on the host: on the device each length of a prompt would compile again.
    return host.astype(np.int32), jnp.asarray(counts.astype(np.int32))


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None, key: Array | None) -> Sampling:
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; give 0 for the most likely token, or more to draw.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; draw from at least 1 token.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; give a share in (0, 1].")
    if temperature > 0 and key is None:
        raise ValueError("temperature is above 0 but no key was given; pass key=jax.random.key(0), say.")
    return Sampling(temperature, top_k, top_p)
