"""State-space layers (Mamba-2, Dao and Gu, 2024, arXiv:2405.21060): a kind of :mod:`models.recurrent`.

In the paper's words a value is the input x, a key is B, a query is C, and heads of queries and keys are groups. What a
token adds to the memory is its value, so with the paper's step size it is (axes and names are those of
models.recurrent):

    b_t = softplus(step(x_t) + bias),    a_t = exp(-exp(log_decay) b_t),    o_t = S_t^T q_t + skip v_t

b_t and a_t are numbers per head, as are skip, bias and log_decay. A sigmoid linear unit of the gate is multiplied
before the norm, which several heads have together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels_pallas.add_rms_norm.reference import rms_norm
from models.config import Recurrence
from models.recurrent import State, convolved, in_front, linear_attention, put_back


def mix(
    net: Recurrence,
    weights: dict[str, Array],
    x: Float[Array, "B T E"],
    valid: Bool[Array, "B T"],
    state: State,
    epsilon: float = 1e-6,
) -> tuple[Float[Array, "B T JW"], State]:
    """Mix a block's tokens with those before them; arguments and results are those of :func:`models.delta_net.mix`.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from models import recurrent, state_space
        >>> from models.config import Recurrence
        >>> net = Recurrence(
        ...     (0,), key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=2,
        ...     kind="state_space"
        ... )
        >>> shapes = dict(
        ...     space_in=(22, 8), recurrent_kernel=(14, 1, 2), space_kernel_bias=(14,),
        ...     recurrent_log_decay=(2,), recurrent_decay_bias=(2,), space_skip=(2,),
        ...     space_norm=(6,)
        ... )
        >>> weights = {name: np.ones(shape) for name, shape in shapes.items()}
        >>> state = recurrent.empty_state(net, 1, "float32")
        >>> mix = jax.jit(state_space.mix, static_argnums=0)
        >>> out, state = mix(
        ...     net, weights, jnp.ones((1, 5, 8)), jnp.ones((1, 5), bool), state
        ... )
        >>> out.shape, state["memory"].shape
        ((1, 5, 6), (1, 2, 4, 3))
    """
    (B, T, _), H, J = x.shape, net.key_heads, net.value_heads
    x, place = in_front(x, valid)
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    HP, JW = H * net.key_dim, J * net.value_dim
    made = jnp.einsum("bte,ie->bti", x, weights["space_in"])
    gate, mixed, step = jnp.split(made, (JW, JW + net.channels), axis=-1)
    kernel, bias = weights["recurrent_kernel"][:, 0], weights["space_kernel_bias"]
    mixed, inputs = convolved(kernel, mixed, state["inputs"], count, bias)
    value, key, query = (own.astype(jnp.float32).reshape(B, T, n, -1) for own, n in zip(
        jnp.split(mixed, (JW, JW + HP), axis=-1), (J, H, H), strict=True
    ))  # fmt: skip
    query, key = (jnp.repeat(own, J // H, axis=2) for own in (query, key))
    log_decay, bias, skip, norm = (weights[name].astype(jnp.float32) for name in (
        "recurrent_log_decay", "recurrent_decay_bias", "space_skip", "space_norm"
    ))  # fmt: skip
    counts = (jnp.arange(T) < count[:, None])[..., None]  # the others change nothing
    rate = jnp.where(counts, jax.nn.softplus(step.astype(jnp.float32) + bias), 0)
    decay = -jnp.exp(log_decay) * rate
    out, memory = linear_attention(query, key, value, decay, rate, state["memory"], delta=False)
    out = (out + skip[:, None] * value).reshape(B, T, -1) * jax.nn.silu(gate.astype(jnp.float32))
    out = rms_norm(out.reshape(B, T, H, -1), jnp.ones(JW // H), epsilon).reshape(B, T, -1)
    return put_back((out * norm).astype(x.dtype), place), {"inputs": inputs, "memory": memory}
