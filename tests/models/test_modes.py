"""The modes of JAX that refuse what NumPy allows: ranks and dtypes that promote in silence, and 64-bit numbers.

What they refuse, they refuse while a function is traced; so most programs here are traced and never compiled.
"""

from __future__ import annotations

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import models
from evals import fidelity, loglikelihood, selections
from models import engine
from models.config import Config, Rope
from tests.models import reference
from tests.models.tiny import STATE, run, streamed, tiered
from tests.tiers import first
from train import butler as training
from train import scorer as scoring

CONFIG = Config(
    64, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=128, attention_bias=True,
    query_key_norm=True, architecture="qwen3", sliding_windows=(9, None),
)  # fmt: skip
TOKENS = np.stack([np.random.default_rng(row).permutation(64)[:40] for row in range(2)])
SETTINGS = dict(lengths=np.array([40, 31]), budget=14, block=8, max_new_tokens=4)
ALLOCATIONS = ("pyramid", "adakv", "layer", "model", "cake", "lava")
POLICIES = [  # the first ones by default: each allocation is there, and each kind of evidence
    "h2o+caote+protect(sinks=2,recent=0.5)",
    "snapkv(window=4)@adakv",
    "kvzip(chunk=16)+caote",
    "streaming(sinks=2)+positions(kind='compact')",
    "snapkv(window=4)+critical",
    "tova",
    "key_norm+normalise+fast_caote",
    "keydiff+positions(kind='index')",
    "random+pool",
    "sage(heads='query')",
    "h2o+caote(rounds=2)",
    "tova(heads='group')+caote(target='output')",
    "expected_attention",
    "butler+caote",
    "zap+caote",
    "dapq(window=4)+caote+merge",
    "h2o+cam",
    *(f"{base}@{allocation}" for base, allocation in zip(
        ("tova(heads='group')", "h2o+caote", "laprox(window=4)", "lava(window=4)", "cake(window=4)",
         "snapkv(window=4)"), ALLOCATIONS, strict=True,
    )),
]  # fmt: skip
SOURCES = ["butler", "quest(page_size=4)", "oracle", "first_layer", "previous_layer", "random", "streaming"]
ROPES = [
    Rope(type="dynamic", factor=2.0, original_positions=16),
    Rope(type="yarn", factor=2.0, original_positions=16),
    Rope(type="llama3", factor=8.0, original_positions=64),
    Rope(type="linear", factor=2.0),
]


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
def model():
    return reference.decoder(CONFIG, reference.parameters(CONFIG))


@pytest.fixture(scope="module")
def predictor():
    return models.Butler(models.ButlerConfig.of(CONFIG), rngs=nnx.Rngs(0))


class Traced(Exception):
    """Ends a run where its program would be compiled."""


@pytest.fixture
def trace(monkeypatch):
    """``models.generate`` up to the program that it would compile."""
    program = engine._generate

    def only_trace(*arguments):
        program.eval_shape(*arguments)
        raise Traced

    monkeypatch.setattr(engine, "_generate", only_trace)

    def generate(mode, *arguments, **settings):
        with mode(), pytest.raises(Traced):
            models.generate(*arguments, **SETTINGS | settings)

    return generate


@pytest.mark.parametrize("number", tiered(4, 8, range(len(POLICIES))), ids=POLICIES)
def test_policies_and_allocations(mode, model, predictor, trace, number):
    policy, when = POLICIES[number], ("block", "prompt")[number % 2]  # allocations meet both, as does the plain cache
    own = dict(butler=predictor) if "butler" in policy else {}
    if "zap" in policy:
        own = dict(scorer=reference.scorer(CONFIG))
    trace(mode, model, TOKENS, policy=policy, when=when, question=np.array([5, 0]), **own)


@pytest.mark.matrix
def test_the_loss_of_a_scorer(mode, model):
    own = reference.scorer(CONFIG)
    for target in scoring.TARGETS:
        with mode():
            jax.eval_shape(lambda tokens: scoring.loss_of(model, own, tokens, target, (1, 2)), jnp.asarray(TOKENS))  # noqa: B023


@pytest.mark.parametrize("source", first(2, SOURCES))
def test_selections(mode, model, predictor, trace, source):
    trace(mode, model, TOKENS, select=source, butler=predictor if source == "butler" else None)


@pytest.mark.parametrize("rope", first(1, ROPES), ids=lambda rope: rope.type)
def test_rope_scalings(mode, trace, rope):
    config = Config(64, 16, 24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=128, rope=rope)
    model = reference.decoder(config, reference.parameters(config))
    trace(mode, model, TOKENS, policy="expected_attention")


@pytest.mark.parametrize(
    ("policy", "each_way", "mode"),
    tiered(0, 2, [
        (STATE, "layers", wide),
        (STATE, "layers", strict),
        ("tova(heads='group')@model", "one program", wide),
        ("tova(heads='group')@model", "one program", strict),
    ]),
    indirect=["each_way"],
)  # fmt: skip
def test_a_whole_run_is_the_same_as_in_the_mode_that_is_usual(mode, model, each_way, policy):
    settings = SETTINGS | dict(policy=policy, question=np.array([5, 0]), end=())
    questions, lengths = settings.pop("question"), settings["lengths"]
    with mode():
        found, _ = streamed(model, TOKENS, question=questions, **settings)
    told = {name: settings[name] for name in ("policy", "budget", "block")}
    for row, length in enumerate(lengths):
        expected = run(TOKENS[row, :length], CONFIG, question=questions[row], new_tokens=4, **told).tokens
        assert found[row].tolist() == expected


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


@pytest.mark.matrix
def test_the_evaluations(mode, model, predictor):
    tokens, kept = jnp.asarray(TOKENS), np.arange(1, 41)

    def everything(cache):
        for name, butler in (("butler", predictor), ("quest(page_size=4)", None), ("previous_layer", None)):
            source = kvjax.parse_source(name)
            selections._selecting(model, tokens, kept, butler, source, 2, 8)
            selections._hits(model, tokens, kept, butler, source, 8)
        for policy in (None, kvjax.parse("h2o+caote")):
            selections._evicting(model, tokens, kept, None, None, policy, 2, 8)
        selections.last_logits(model, tokens)
        position = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
        seen = fidelity.outputs(model, cache, tokens[:, :5], position, jnp.full(2, 40, jnp.int32))
        hidden = jnp.zeros((2, 5, model.config.hidden_size), model.embedding[...].dtype)
        return loglikelihood._in_parts(model, hidden, tokens[:, :5], hidden, 2), seen

    with mode():
        empty = jax.eval_shape(lambda: kvjax.KVCache.init(batch=2, kv_heads=2, slots=50, head_dim=8, layers=2))
        jax.eval_shape(everything, empty)


def test_the_predictors_loss_and_its_gradient(mode, model, predictor):
    def loss(parameters):
        return training.loss_of(model, models.Butler(predictor.config, parameters), jnp.asarray(TOKENS), causal=True)

    with mode():
        jax.eval_shape(jax.grad(loss), {name: getattr(predictor, name)[...] for name in shapes(predictor)})


def shapes(predictor):
    return models.butler.parameter_shapes(predictor.config)
