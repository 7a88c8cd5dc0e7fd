"""A decoder in Flax NNX inside a budget. The cache is an argument and a result, so that its memory can be donated."""

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, VOCABULARY, POSITIONS, BLOCK = (
    2,
    32,
    4,
    2,
    8,
    64,
    128,
    8,
)
KEEP = dict(policy="tova+caote", budget=24)


class Attention(nnx.Module):
    def __init__(self, layer, rngs):
        self.layer = layer
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (HEADS + 2 * KV_HEADS, DIM), rngs=rngs)
        self.output = nnx.LinearGeneral((HEADS, DIM), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x, cache, position):
        q, k, v = jnp.split(self.qkv(self.norm(x)), [HEADS, HEADS + KV_HEADS], axis=2)
        # 2
        out, cache = kvjax.attend(
            cache,
            q,
            k,
            v,
            position,
            context=kvjax.Context(layer=self.layer),
            **KEEP,
        )
        return x + self.output(out), cache


class Model(nnx.Module):
    def __init__(self, rngs):
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Attention(layer, rngs) for layer in range(LAYERS)])

    def __call__(self, cache, tokens):
        position = cache.next_position[:, None] + jnp.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(position)
        for layer in self.layers:
            x, cache = layer(x, cache, position)
        return self.token.attend(x[:, -1]), cache


model, step = Model(nnx.Rngs(0)), nnx.jit(Model.__call__, donate_argnums=1)
# 1
cache = kvjax.empty_cache(
    layers=LAYERS,
    kv_heads=KV_HEADS,
    query_heads=HEADS,
    head_dim=DIM,
    block=BLOCK,
    **KEEP,
)
for block in jnp.split(
    jax.random.randint(jax.random.key(1), (1, 10 * BLOCK), 0, VOCABULARY),
    10,
    axis=1,
):
    logits, cache = step(model, cache, block)
for _ in range(5):
    logits, cache = step(model, cache, jnp.argmax(logits, axis=-1)[:, None])
assert cache.num_live.max() == 24 and int(cache.next_position[0]) == 85
