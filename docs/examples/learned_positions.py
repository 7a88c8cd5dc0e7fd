"""A decoder with learned positions, as in GPT-2, inside a budget: nothing is rotated."""

import jax
import jax.numpy as jnp

import kvjax

LAYERS, WIDTH, HEADS, DIM, VOCABULARY, POSITIONS, BLOCK = (
    2,
    32,
    4,
    8,
    64,
    128,
    8,
)
KEEP = dict(policy="tova+caote", budget=24)


def init(key):
    def draw(i, *shape):
        return 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)

    heads = dict(
        qkv=draw(0, LAYERS, WIDTH, 3, HEADS, DIM),
        output=draw(1, LAYERS, HEADS, DIM, WIDTH),
    )
    dense = dict(
        up=draw(2, LAYERS, WIDTH, 4 * WIDTH),
        down=draw(3, LAYERS, 4 * WIDTH, WIDTH),
    )
    return dict(
        token=draw(4, VOCABULARY, WIDTH),
        position=draw(5, POSITIONS, WIDTH),
        layers=heads | dense,
    )


def run(parameters, cache, tokens):
    position = cache.next_position[:, None] + jnp.arange(tokens.shape[1])
    x = parameters["token"][tokens] + parameters["position"][position]
    for layer in range(LAYERS):
        p = {name: array[layer] for name, array in parameters["layers"].items()}
        qkv = jnp.einsum("bte,eihd->ibthd", jax.nn.standardize(x, epsilon=1e-5), p["qkv"])
        # 2
        out, cache = kvjax.attend(cache, *qkv, position, context=kvjax.Context(layer=layer), **KEEP)
        x = x + jnp.einsum("bthd,hde->bte", out, p["output"])
        x = x + jax.nn.gelu(jax.nn.standardize(x, epsilon=1e-5) @ p["up"]) @ p["down"]
    return x[:, -1] @ parameters["token"].T, cache


step = jax.jit(run, donate_argnums=1)
parameters = init(jax.random.key(0))
# 1
cache = kvjax.empty_cache(
    layers=LAYERS,
    kv_heads=HEADS,
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
    logits, cache = step(parameters, cache, block)
for _ in range(5):
    logits, cache = step(parameters, cache, jnp.argmax(logits, axis=-1)[:, None])
assert cache.num_live.max() == 24 and int(cache.next_position[0]) == 85
