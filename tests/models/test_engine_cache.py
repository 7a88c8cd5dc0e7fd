"""A cache that is kept: questions asked of it are answered as if each had come with its whole document."""

import jax
import numpy as np
import pytest

import kvjax
import models
from models import Config
from tests.models import reference

CONFIG = Config(64, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512)
RANDOM = np.random.default_rng(0)
DOCUMENT = RANDOM.integers(0, 64, (1, 60))
QUESTIONS = [RANDOM.integers(0, 64, 5 + number % 4).tolist() for number in range(20)]  # all find the same room
NEW = 9
PLAIN = (
    "h2o+caote",
    "snapkv(window=4)+caote",
    "sage(heads='query')",
    "streaming+positions",
    "expected_attention(future=8)",
)
PAGED = ("laprox(window=4)@model", "cake(window=4)@cake")


@pytest.fixture(scope="module")
def model():
    return reference.decoder(CONFIG, reference.parameters(CONFIG))


def lengths_of(rows):
    return np.array([len(row) for row in rows])


def held(cache, row=0):
    """The positions that each layer and head of a row holds, sorted."""
    layers = [np.asarray(cache.layer(layer).position[row]) for layer in range(cache.heads_shape[0])]
    return [[sorted(head[head >= 0].tolist()) for head in layer] for layer in layers]


def bytes_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.filterwarnings("ignore:.*made to choose once")
@pytest.mark.parametrize("policy", [*PLAIN, *PAGED])
def test_twenty_questions_on_one_cache_are_twenty_runs_from_scratch(model, policy):
    settings = dict(policy=policy, budget=16, block=8)
    kept = models.prefill(model, DOCUMENT, **settings).cache
    asked = dict(max_new_tokens=NEW, end=(), **settings)
    many = models.generate(model, QUESTIONS, cache=kvjax.repeat(kept, 20), question=lengths_of(QUESTIONS), **asked)
    for row, question in enumerate(QUESTIONS):
        prompt = np.concatenate([DOCUMENT, [question]], axis=1)
        alone = models.generate(model, prompt, question=len(question), **asked)
        assert many.tokens[row].tolist() == alone.tokens[0].tolist(), question
        assert held(many.cache, row) == held(alone.cache), question


# Each way, layout and moment once: test_engine_paths compares the ways under each kind of policy.
@pytest.mark.parametrize(
    ("policy", "when", "each_way"),
    [("snapkv(window=4)+caote", "block", "layers"), ("laprox(window=4)@model", "prompt", "one program")],
    indirect=["each_way"],
)
def test_a_cache_may_be_asked_again(model, policy, when, each_way):
    settings = dict(policy=policy, budget=16, block=8, when=when)
    kept = models.prefill(model, DOCUMENT, **settings).cache
    before = bytes_of(kept)
    asked = dict(cache=kept, max_new_tokens=NEW, end=(), question=5, **settings)
    first, second = (models.generate(model, [QUESTIONS[0]], **asked) for _ in range(2))
    streamed = list(models.stream(model, [QUESTIONS[0]], **asked))
    assert first.tokens.tolist() == second.tokens.tolist() == [[int(token[0]) for token, _ in streamed]]
    assert held(first.cache) == held(streamed[-1][1])
    assert bytes_of(kept) == before
    whole = np.concatenate([DOCUMENT, [QUESTIONS[0]]], axis=1)
    asked.pop("cache")
    assert models.generate(model, whole, **asked).tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize(
    ("policy", "each_way"),
    [
        ("h2o+caote", "one program"),
        ("streaming+positions(kind='index')", "layers"),
        ("snapkv(window=4)@adakv", "layers"),
    ],
    indirect=["each_way"],
)
def test_without_a_policy_nothing_more_leaves(model, policy, each_way):
    settings = dict(policy=policy, budget=16, block=8)
    kept = models.prefill(model, DOCUMENT, **settings).cache
    out = models.generate(model, [QUESTIONS[0]], cache=kept, max_new_tokens=NEW, end=())
    whole = np.concatenate([DOCUMENT, [QUESTIONS[0]]], axis=1)
    never = models.generate(model, whole, question=5, max_new_tokens=NEW, end=(), evict_every=0, **settings)
    assert out.tokens.tolist() == never.tokens.tolist()
    assert held(out.cache) == held(never.cache)
