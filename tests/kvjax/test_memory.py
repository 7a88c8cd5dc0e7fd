"""kvjax.memory against the bytes that caches really take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from tests.models import tiny

POLICIES = ["h2o+critical", "keydiff@layer", "h2o@pyramid", "sage(heads='query')", "kvzip+match@uniform"]
SHAPE = dict(layers=3, kv_heads=2, head_dim=8, query_heads=4)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("policy", "windows"), [("laprox(window=4)", (None, None, None)), ("h2o@pyramid", (12, None, 24))]
)
def test_what_a_prompt_leaves_takes_the_bytes_that_were_predicted(policy, windows):
    """And a layer with a sliding window takes no slots beyond it."""
    model = tiny.decoder(tiny.config(num_layers=3, sliding_windows=windows))
    tokens = np.arange(300)[None].repeat(3, 0) % 64  # longer than what one head may come to hold
    settings = dict(policy=policy, budget=40, block=16, page_size=4)
    cache = models.prefill(model, tokens, **settings).cache
    predicted = kvjax.memory(**SHAPE, **settings, batch=3, dtype=jnp.float32, windows=windows)
    assert predicted.total == cache.nbytes
    assert predicted.keys_values == cache.key.nbytes + cache.value.nbytes
    most = np.array([window - 1 if window else 300 for window in windows])
    assert (np.asarray(cache.num_live).max(axis=(1, 2)) <= most).all()


def test_a_window_counts_where_it_is_narrower_than_the_budget_and_not_in_a_full_cache():
    sizes, windows = SHAPE | dict(policy="h2o@pyramid", budget=40, block=16, page_size=4), (12, None, 24)
    assert kvjax.memory(**sizes, windows=windows).slots <= (28 + 56 + 40) / 3 + 3
    assert kvjax.memory(**sizes, windows=(40, None, 99)) == kvjax.memory(**sizes)
    full = sizes | dict(policy=None)  # keeps all tokens
    assert kvjax.memory(**full).slots == 40 + 16
    assert kvjax.memory(**full, windows=windows) == kvjax.memory(**full) == kvjax.memory(**full | dict(policy="full"))


@pytest.mark.parametrize("windows", [(None, None, None), (12, None, 24)])
@pytest.mark.parametrize("dtype", ["float32", "int8", ("int8", "bfloat16")], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_an_empty_cache_takes_is_predicted_with_the_scales_of_eight_bits(policy, dtype, windows):
    sizes = SHAPE | dict(budget=40, block=16, page_size=4, windows=windows, dtype=dtype)
    cache = jax.eval_shape(lambda: kvjax.empty_cache(policy, **sizes))
    assert kvjax.memory(**sizes, policy=policy).total == cache.nbytes
