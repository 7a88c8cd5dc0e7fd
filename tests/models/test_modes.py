"""The modes of JAX that refuse what NumPy allows: ranks and dtypes that promote in silence, and 64-bit numbers.

What they refuse, they refuse while a function is traced; so most programs here are traced and never compiled.
"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from models import driver, engine
from models.config import Config
from tests.tiers import first
from train import butler as training

CONFIG = Config(  # with what could promote a dtype: biases, norms of keys, a window
    64, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=128, attention_bias=True,
    query_key_norm=True, architecture="qwen3", sliding_windows=(9, None),
)  # fmt: skip
TOKENS = np.stack([np.random.default_rng(row).permutation(64)[:40] for row in range(2)])
SETTINGS = dict(lengths=np.array([40, 31]), budget=14, block=8, max_new_tokens=4)
# the first by default: it has a window and an allocation; state and CAOTE are among the functions below
POLICIES = """
snapkv(window=4)@adakv h2o+caote+protect(sinks=2) kvzip(chunk=16)+caote@uniform
streaming(sinks=2)+positions(kind='compact') cake(window=4)+critical expected_attention@pyramid butler+caote
sage(heads='query')+pool dapq(window=4)+fast_caote+merge tova(heads='group')+caote(target='output')@model
""".split()
SOURCES = ["quest(page_size=4)", "butler", "oracle", "first_layer", "previous_layer", "random", "streaming"]


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@contextlib.contextmanager
def wide():
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(params=[strict, wide], ids=["strict", "x64"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def predictor():
    return models.Butler(models.ButlerConfig.of(CONFIG), rngs=nnx.Rngs(0))


class Traced(Exception):
    """Ends a run where its program would be compiled."""


@pytest.fixture
def trace(monkeypatch):
    """``models.generate`` up to the program that it would compile."""
    program = driver.generate_at_once
    monkeypatch.setattr(driver, "by_layer", lambda run, key=None: False)

    def only_trace(*arguments):
        program.eval_shape(*arguments)
        raise Traced

    monkeypatch.setattr(engine, "generate_at_once", only_trace)

    def generate(mode, *arguments, **settings):
        with mode(), pytest.raises(Traced):
            models.generate(*arguments, **SETTINGS | settings)

    return generate


@pytest.mark.parametrize("number", first(1, range(len(POLICIES))), ids=POLICIES)
def test_policies_and_allocations(mode, model, predictor, trace, number):
    policy, when = POLICIES[number], ("block", "prompt")[number % 2]  # allocations meet both, as does the plain cache
    own = dict(networks=predictor) if "butler" in policy else {}
    trace(mode, model, TOKENS, policy=policy, when=when, question=np.array([5, 0]), **own)


@pytest.mark.parametrize("source", first(1, SOURCES))
def test_selections(mode, model, predictor, trace, source):
    trace(mode, model, TOKENS, select=source, networks=predictor if source == "butler" else None)


def test_the_functions_of_the_library(mode):
    def everything(key):
        A = jax.nn.softmax(jax.random.normal(key, (2, 2, 24)))
        V = jax.random.normal(key, (2, 24, 8))
        for options in ({}, dict(fast=True), dict(norm=1), dict(norm="inf")):
            scores = kvjax.score(A, V, group="exact", **options)
        rows = V[None].swapaxes(1, 2)
        cache = kvjax.KVCache.init(batch=1, kv_heads=2, slots=24, head_dim=8)
        cache = kvjax.evict(kvjax.insert(cache, rows, rows), scores[None], budget=12)
        kvjax.compact(cache, 12)
        pages = kvjax.insert(kvjax.pack(cache, pages=16, page_size=4, most=16), rows[:, :2], rows[:, :2])
        kvjax.evict(pages, jnp.ones((16, 4)), budget=6, allocation="adakv")
        kvjax.select(jnp.ones((1, 4, 24)), cache.position, 0.5)
        policy = kvjax.parse("h2o+caote")
        cache = kvjax.KVCache.init(batch=1, kv_heads=2, slots=24, head_dim=8, state=policy.state(1, 2, 2, 24, 8))
        query = jnp.ones((1, 4, 4, 8), V.dtype)
        for _ in range(2):
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, cache)
            _, cache = kvjax.attend(cache, query, rows[:, :4], rows[:, :4], policy="h2o+caote", budget=4)
            assert jax.tree.map(lambda leaf: leaf.dtype, cache) == dtypes

    with mode():
        jax.eval_shape(everything, jax.random.key(0))


def test_the_predictors_loss_and_its_gradient(mode, model, predictor):
    def loss(parameters):
        return training.loss_of(model, models.Butler(predictor.config, parameters), jnp.asarray(TOKENS), causal=True)

    with mode():
        given = {name: getattr(predictor, name)[...] for name in shapes(predictor)}
        found = jax.eval_shape(jax.grad(loss), given)
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in given.items()}


def shapes(predictor):
    return predictor.config.shapes
