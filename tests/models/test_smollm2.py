"""A real model, SmolLM2-135M-Instruct out of a GGUF file, answers as in transformers (golden file: make_smollm2.py)."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
import models
from evals import answering, needle, simulator, tasks
from evals.answering import Aids, Feed
from evals.run_settings import Setting
from models import published
from models.networks import network_of, shipped
from models.parameters import split_weights
from tests.models.make_smollm2 import GOLDEN
from tests.tiers import first, nightly

PACKAGE = Path(models.__file__).parent
EXPECTED = json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def smollm2():
    try:
        published.find("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return models.load("smollm2", dtype="float32")


pytestmark = [pytest.mark.smollm2, pytest.mark.matrix]  # a real model takes seconds for each program


def test_logits_are_those_of_transformers(smollm2):
    model, _ = smollm2
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, np.array([EXPECTED["passage"]])))[0]
    for position, ids, expected in zip(EXPECTED["positions"], EXPECTED["top_ids"], EXPECTED["top_logits"], strict=True):
        np.testing.assert_allclose(logits[position, ids], expected, atol=1e-3, rtol=0)
        assert int(logits[position].argmax()) == ids[0]


def test_greedy_continuations_are_those_of_transformers(smollm2):
    model, _ = smollm2
    prompts, expected = EXPECTED["prompt_ids"], EXPECTED["continuations"]
    longest = max(map(len, prompts))
    padded = np.array([row + [0] * (longest - len(row)) for row in prompts])
    out = models.generate(
        model, padded, lengths=np.array([len(row) for row in prompts]), max_new_tokens=max(map(len, expected))
    )
    found = [row[: len(wanted)] for row, wanted in zip(out.tokens.tolist(), expected, strict=True)]
    assert found == expected


def test_tokens_texts_and_chats_are_those_of_transformers(smollm2):
    _, tokenizer = smollm2
    for texts, ids in (("texts", "token_ids"), ("prompts", "prompt_ids")):
        assert [tokenizer.encode(text) for text in EXPECTED[texts]] == EXPECTED[ids]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in EXPECTED["token_ids"]] == EXPECTED["texts"]
    chats = [[{"role": "user", "content": question}] for question in EXPECTED["questions"]]
    assert list(map(tokenizer.chat, chats)) == EXPECTED["chat_texts"]


def test_config_and_end_tokens(smollm2):
    model, tokenizer = smollm2
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.max_positions == 8192 and config.tie_embeddings
    assert [tokenizer.backend.id_to_token(token) for token in config.eos] == ["<|im_end|>"]


ADAPTERS = ["smollm2-documents", "smollm2-answers", "smollm2-answers-2", "smollm2-answers-3"]


@pytest.mark.parametrize("name", first(1, ADAPTERS, rest=nightly))
def test_its_adapters_change_the_projections_of_attention_alone(smollm2, name):
    model, _ = smollm2
    adapted, _ = models.load(name, dtype="float32")
    before, after = (split_weights(one.config, one.arrays()) for one in (model, adapted))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{name}" for name in ("query", "key", "value", "output")}
    assert all(np.abs(after[name] - before[name]).max() < 1 for name in changed)


def test_its_gate_and_that_of_its_adapter_are_found_without_their_names(smollm2):
    adapted, _ = models.load("smollm2-answers", dtype="float32")
    found = [shipped(model, "gate").relative_to(PACKAGE) for model in (smollm2[0], adapted)]
    assert list(map(str, found)) == ["smollm2/gate", "smollm2/answers/1/gate"]
    assert network_of(None, smollm2[0], kvjax.parse("zap")).config.hidden == 16


@pytest.mark.nightly  # of 7 s; the shipped predictor's share is in docs/results
def test_its_predictor_ships_with_the_package_and_foresees_half_of_what_is_attended_to(smollm2):
    model, _ = smollm2
    butler = models.own_network("smollm2", model)
    tokens = np.array([EXPECTED["passage"]])
    found = simulator.hits(model, tokens, "butler", 0.5, networks=butler)
    assert found.share[1:].mean() > 0.62  # at random 0.5


@pytest.mark.nightly  # of 20 s; the shipped gate's recall is in docs/results/fixed-memory.json
@pytest.mark.parametrize("name", ["smollm2", "smollm2-answers"])
def test_its_gate_ships_with_the_package_and_keeps_what_is_asked_for_later(name, smollm2):
    model, tokenizer = smollm2 if name == "smollm2" else models.load(name, dtype="float32")
    gate = models.own_network(name, model, "gate")
    texts = (tasks.needles(seed, tokenizer, 1024, 0.0, 10, "after", asked=5) for seed in (50_000, 50_001))
    samples = [sample._replace(text=text) for text, asked in enumerate(texts) for sample in asked]

    def correct(policy, budget):
        setting = Setting(policy, budget, "block", "unknown", evict_every=0)
        feed = Feed(block=128, batch=10, aids=Aids(networks=(gate,)))
        (found,) = answering.answers(model, samples, setting, new_tokens=5, feed=feed)
        return sum(needle.exact(row.tolist(), sample) for row, sample in zip(found.tokens, samples, strict=True))

    zap = correct("gate", 0.25)
    assert zap > max(correct("recency", 0.25), correct("full", None) - 3)
