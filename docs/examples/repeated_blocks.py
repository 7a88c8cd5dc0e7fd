"""KVzip in a decoder of your own: the model repeats each block, and `kvjax.schedule` says which block comes when.

A copy of a block is taken back again (`kvjax.rewind`); the cache has room for a block and its copy.
"""

import jax
import jax.numpy as jnp

import kvjax
from kvjax.schedule import Text, schedule

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, VOCABULARY, BLOCK = 2, 32, 4, 2, 8, 64, 8


def init(key):
    def draw(i, *shape):
        return 0.3 * jax.random.normal(jax.random.fold_in(key, i), (LAYERS, *shape))

    heads = dict(query=draw(1, WIDTH, HEADS, DIM), output=draw(2, HEADS, DIM, WIDTH))
    heads |= dict(key=draw(3, WIDTH, KV_HEADS, DIM), value=draw(4, WIDTH, KV_HEADS, DIM))
    dense = dict(up=draw(5, WIDTH, 4 * WIDTH), down=draw(6, 4 * WIDTH, WIDTH))
    return dict(embedding=draw(0, VOCABULARY, WIDTH)[0], layers=heads | dense)


KVZIP = kvjax.parse("kvzip@uniform")  # equal budgets: each layer evicts by itself


def observe(parameters, cache, tokens, position, part, evicts):
    """One block of the text, or a copy of the block that `part` names."""
    if part is not None:  # without the copies of the part before
        cache = kvjax.rewind(cache, jnp.where(position < 0, 10**9, position).min(axis=1))
    repeats = None if part is None else kvjax.Reconstructed.of(part, KVZIP)
    angle = position[..., None] / 10_000 ** (jnp.arange(DIM // 2) / (DIM // 2))
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    x = parameters["embedding"][tokens]
    for layer in range(LAYERS):
        p = {name: array[layer] for name, array in parameters["layers"].items()}
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        q, k, v = (jnp.einsum("bte,ehd->bthd", y, p[name]) for name in ("query", "key", "value"))
        q, k = kvjax.rotate(q, cos, sin), kvjax.rotate(k, cos, sin)
        context = kvjax.Context(layer=layer, tokens=tokens, reconstructed=repeats)
        budget = 24 if evicts else None
        out, cache = kvjax.attend(
            cache,
            q,
            k,
            v,
            position,
            policy=KVZIP,
            budget=budget,
            context=context,
        )
        x = x + jnp.einsum("bthd,hde->bte", out, p["output"])
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x[:, -1] @ parameters["embedding"].T, cache


step = jax.jit(observe, donate_argnums=1, static_argnums=5)
parameters = init(jax.random.key(0))
prompt = jax.random.randint(jax.random.key(1), (1, 10 * BLOCK), 0, VOCABULARY)
sizes = dict(layers=LAYERS, kv_heads=KV_HEADS, query_heads=HEADS, head_dim=DIM)
# a copy begins with 8 tokens before it
cache = kvjax.empty_cache(KVZIP, budget=24, block=2 * BLOCK + 8, **sizes)
for stage in schedule(Text.of(prompt), KVZIP, block=BLOCK).context:
    for phase, tokens, position, part in stage:
        out, cache = step(parameters, cache, tokens, position, part, phase.evicts)
        logits = out if part is None else logits
assert cache.num_live.max() == 24 and int(cache.next_position[0]) == 80
