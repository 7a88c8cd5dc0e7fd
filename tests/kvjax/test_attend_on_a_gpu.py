"""Blocks and decode steps with the kernels of a GPU, interpreted, keep what the definitions in plain JAX keep."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kernels_pallas import dispatch

B, K, G, D, BUDGET = 2, 2, 2, 16, 24

pytestmark = pytest.mark.matrix


def fed(policy: str, window: int | None, steps: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Feed some blocks and then single tokens; a row has none now and then. Return the outputs and what is kept."""

    @functools.partial(jax.jit, static_argnames="excess")
    def step(cache, query, key, value, position, excess):
        context = kvjax.Context(excess=excess, sliding_window=None if window is None else np.int32(window))
        return kvjax.attend(cache, query, key, value, position, policy=policy, budget=BUDGET, context=context)

    rng, at, outs = np.random.default_rng(0), np.zeros(B, np.int32), []
    cache = kvjax.empty_cache(policy, batch=B, kv_heads=K, query_heads=K * G, head_dim=D, budget=BUDGET, block=8)
    for number, tokens in enumerate([8] * 4 + [1] * steps):
        query, key, value = (rng.normal(size=(B, tokens, heads, D)).astype(np.float32) for heads in (K * G, K, K))
        position = at[:, None] + np.arange(tokens, dtype=np.int32)
        if number == 6:
            position[0] = -1
        out, cache = step(cache, query, key, value, position, 1 if tokens == 1 else None)
        at = np.maximum(at, position.max(axis=1) + 1)
        outs.append(out)
    return np.concatenate(outs, axis=1), np.sort(cache.position, axis=-1)


@pytest.mark.parametrize(("policy", "window"), [("snapkv(window=4)+caote", None), ("h2o+caote", 20)])
def test_the_kernels_keep_what_the_definitions_keep(policy, window, monkeypatch):
    out, kept = fed(policy, window)
    run = dispatch.Kernel.run
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(
        dispatch.Kernel, "run", lambda *args, interpret=False, **options: run(*args, interpret=True, **options)
    )
    found, same = fed(policy, window)
    np.testing.assert_allclose(found, out, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(same, kept)
