"""Teacher forcing: given texts go through decode, as if the model had made them.

A generation that is longer than the cache is judged on a text of which every token is known: each is fed by a decode
step, at which the policy observes and evicts, or a selection chooses what is read, as in an answer.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax._src.capacity import CacheSpec
from kvjax._src.checks import check_count
from kvjax.schedule import HostOrDevice, Phase, Schedule
from models.decoder import Decoder
from models.driver import Steps, feed_prompt, over_steps, prefill_at_once
from models.engine import Hidden, prepare
from models.options import DecodeSettings, Options, options_of
from models.prompts import Tokens, check_prompt
from models.steps import DecodeState, Run, decode_positions, forward


def teacher_forced(
    model: Decoder,
    tokens: Tokens,
    *,
    lengths: Int[HostOrDevice, "B"] | None = None,
    prompt: int = 1,
    options: Options | None = None,
    **settings: Unpack[DecodeSettings],
) -> Hidden:
    """Feed given texts as if the model had generated them: a prompt, then one token of each row per decode step.

    The cache never holds more than the budget and what comes in between two
    evictions: ``evict_every`` tokens, and their copies where the policy has the model repeat them. With ``select=`` it
    keeps all, and each step reads its own choice.

    Args:
        tokens: texts, padded on the right, or a list of rows.
        lengths: how many tokens of each row count; all by default.
        prompt: how many of each row's first tokens are its prompt.
        options, settings: what to keep, and how; see :class:`Options`.

    Returns:
        The cache behind the texts, and the hidden states of their tokens from the prompt's last one on, [B, T - prompt
        + 1, E]; behind a row's end they say nothing.

    Raises:
        ValueError: a text is not longer than its prompt, or :func:`models.generate` would fail.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> cache, hidden = models.teacher_forced(
        ...     model, [range(40)], prompt=8, policy="tova", budget=16, block=8
        ... )
        >>> hidden.shape, cache.num_live.max().item(), cache.next_position.item()
        ((1, 33, 32), 16, 40)
    """
    whole = check_prompt(model, tokens, lengths, None).text
    prompt = check_count("prompt", prompt, 1, "give at least 1 token")
    if (whole.lengths <= prompt).any():
        raise ValueError(f"a text has {int(whole.lengths.min())} tokens, and its prompt {prompt}; give longer texts.")
    made = np.where(np.arange(whole.tokens.shape[1]) < whole.lengths[:, None], whole.tokens, -1)[:, prompt:]
    options = options_of("teacher_forced", DecodeSettings, options, settings, reserve=made.shape[1])
    given = check_prompt(model, whole.tokens[:, :prompt], None, None, None, options.policy)
    run, sizes, fed = prepare(model, given, options)
    steps = Steps.of(run, sizes)
    state, hidden = _forced(run, sizes, fed, made) if steps.layers is None else _forced_by_layer(steps, fed, made)
    return Hidden(state.cache, hidden)


def _forced_by_layer(
    steps: Steps, prompt: Schedule, made: Int[np.ndarray, "B n"]
) -> tuple[DecodeState, Float[Array, "B n1 E"]]:
    """Feed the prompt, and then the given tokens, -1 behind a row's end, from the host."""
    state, last = feed_prompt(steps, prompt, None)
    plan, hidden = steps.run.plan, [last]
    for step in range(1, made.shape[1] + 1):
        token, ended = np.maximum(made[:, step - 1], 0), made[:, step - 1] < 0
        of_step, state = steps.fed(state, token, ended, step)
        hidden.append(of_step)
        if plan.repeats is not None and plan.evict_every and step % plan.evict_every == 0:
            state = steps.repeated(state, np.maximum(made[:, step - plan.evict_every : step], 0), ended)
    return state, jnp.concatenate(hidden, axis=1)


@functools.partial(jax.jit, static_argnames="sizes")
def _forced(
    run: Run, sizes: CacheSpec, prompt: Schedule, made: Int[Array, "B n"]
) -> tuple[DecodeState, Float[Array, "B n1 E"]]:
    """Feed the prompt, and then the given tokens, -1 behind a row's end."""
    state, last = prefill_at_once(run, sizes, prompt, None)
    B, n = made.shape
    out = jnp.zeros((B, n + 1, last.shape[2]), last.dtype).at[:, 0].set(last[:, 0])

    def more(loop: Any) -> Array:
        return loop[0] <= n

    def advance(loop: Any, phase: Phase) -> Any:
        step, state, out = loop
        token = jax.lax.dynamic_slice_in_dim(made, step - 1, 1, axis=1)
        position = decode_positions(token[:, 0] < 0, state.cache.next_position)
        hidden, state = forward(run, state, jnp.maximum(token, 0), position, phase)
        return step + 1, state, jax.lax.dynamic_update_slice_in_dim(out, hidden, step, axis=1)

    def given(before: Any, after: Any) -> tuple[Array, Array]:
        return jnp.maximum(made, 0), made[:, before[0] - 1] < 0

    _, state, out = over_steps(run, n + 1, more, advance, given, (jnp.int32(1), state, out))
    return state, out
