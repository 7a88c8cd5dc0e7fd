"""Of a text in a real model's cache our policies keep what kvpress keeps (golden file: make_smollm2_kept.py)."""

import functools

import numpy as np
import pytest

import models
from models import get
from tests.models.make_smollm2_kept import GOLDEN, KEPT, T

POLICIES = {
    "snapkv": "snapkv(window=64,kernel=5)",
    "tova": "tova+protect(recent=1)",  # TOVA itself can drop the last token, kvpress never does
    "keydiff": "keydiff",
    "streaming": "streaming",
    "knorm": "key_norm",
    "expected": "expected_attention",
    "adakv": "snapkv(window=64,kernel=5)@adakv(cap=None)",
    "criticalkv": "snapkv(window=64,kernel=5)+critical",
    "curdkv": "curdkv",
    "lagkv": "lagkv(lag=36)",
}
# Scores that differ by less than float32's rounding of 30 layers, or than the 12 bits of our norms, may go either way.
OVERLAP = 0.99

pytestmark = [pytest.mark.smollm2, pytest.mark.nightly]  # minutes; test_kvpress.py shows the same of a small model


@functools.cache
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def model():
    try:
        get.find("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return models.load("smollm2", dtype="float32")[0]


def kept_by(model, policy, budget):
    """Which positions stay when the whole text is in, bool [L, K, T]."""
    tokens = golden()["tokens"][None]
    cache, _ = models.prefill(model, tokens, policy=policy, budget=budget, when="prompt")
    kept = np.zeros((model.config.num_layers, model.config.num_kv_heads, T + 1), bool)  # free slots are -1, the last
    for layer, heads in enumerate(kept):
        np.put_along_axis(heads, np.asarray(cache.layer(layer).position[0]), True, axis=-1)
    return kept[..., :T]


@pytest.mark.parametrize("budget", KEPT)
@pytest.mark.parametrize("press", POLICIES)
def test_a_real_text_keeps_what_kvpress_keeps(model, press, budget):
    expected = np.unpackbits(golden()[f"{press}/{budget}"], axis=-1, count=T).astype(bool)
    kept = kept_by(model, POLICIES[press], budget)
    assert kept.sum() == expected.sum() == budget * kept.shape[0] * kept.shape[1]
    overlap = (kept & expected).sum(axis=-1) / expected.sum(axis=-1)
    assert overlap.min() >= OVERLAP, np.argwhere(overlap < OVERLAP).tolist()
