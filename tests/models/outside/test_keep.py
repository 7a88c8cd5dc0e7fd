"""Test what the adapters share against what the packages said, without the packages."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from models.outside import gemma, keras, tunix
from models.outside.keep import Keep, LayerSizes, has_not_moved, nbytes
from tests.models.outside.tiny import BUDGET, POLICIES, RECORDED, ROOT, VERSIONS, ours, run_block
from tests.tiers import matrix

SIZES = [LayerSizes(4, 2, 8, 6), LayerSizes(4, 2, 8)]


def test_padding_before_and_behind_a_row_changes_nothing():
    """A row alone, and the same row among padding on either side, leave the same tokens and the same outputs."""
    keep = Keep.of("tova", budget=8, block=4)
    tokens = np.random.default_rng(0).normal(size=(1, 11, 8, 8)).astype(np.float32)  # queries, keys and values
    before, behind = np.array([3, 0, 2]), np.array([0, 3, 1])
    place = np.arange(14) - before[:, None]
    position = np.where((place >= 0) & (place < 11), place, -1).astype(np.int32)
    padded = tokens[0][np.clip(place, 0, 10)]
    assert [int(row.argmax()) for row in position >= 0] == before.tolist()

    def feed(caches: Any, x: Any) -> Any:
        said = []
        for number, own in enumerate(caches):
            out, caches[number] = own.attend(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], scale=0.5)
            said.append(out)
        return caches, jnp.stack(said, axis=2)

    run = jax.jit(lambda position, x, caches: keep.run(feed, caches, position, x))
    caches, said = run(position, padded, keep.caches(SIZES, batch=3, dtype="float32"))
    for row in range(3):
        here = slice(before[row], 14 - behind[row])
        np.testing.assert_allclose(np.asarray(said)[row, here], np.asarray(said)[0, 3:14], atol=1e-6)
        for own in caches:
            held = np.sort(np.asarray(own.cache.position), axis=-1)
            np.testing.assert_array_equal(held[row], held[0])
    assert [own.cache.num_slots for own in caches] == [10, 12]
    assert [int((np.asarray(own.cache.position) >= 0).sum(-1).max()) for own in caches] == [
        5,
        8,
    ]  # the next query is the sixth


def test_a_window_is_observed_before_decode_evicts():
    """A policy of 4 queries evicts at every fourth step; until then, a head holds up to 3 tokens more."""
    keep = Keep.of("snapkv(window=4)", budget=8, block=4)
    (own,) = keep.caches(SIZES[1:], batch=1, dtype="float32")
    assert keep.every == 4 and own.cache.num_slots == 15
    token = np.random.default_rng(0).normal(size=(1, 1, 4, 8)).astype(np.float32)

    def feed(cache: Any, x: Any) -> Any:
        return cache.attend(x, x[:, :, :2], x[:, :, :2])[1], None

    step = jax.jit(lambda cache, place: keep.run(feed, cache, place, token)[0])
    live = []
    for number in range(20):
        own = step(own, np.full((1, 1), number, np.int32))
        live.append(int((np.asarray(own.cache.position) >= 0).sum(-1).max()))
    assert live[8:] == [9, 10, 11, 8] * 3


@pytest.mark.parametrize(
    ("policy", "budget", "sentence"),
    [
        ("h2o@model", 24, "'h2o@model' lets heads compete for slots, which a decoder of another package does not"),
        ("kvzip@uniform", 24, "has the model repeat its text"),
        ("expected_attention", 24, "reads rotary frequencies"),
        ("snapkv(window=32)", 64, "observes the last 32 queries, but a block has 16"),
        ("snapkv(window=16)", 8, "the budget is 8 tokens, but"),
    ],
)
def test_what_no_adapter_can_keep_is_refused(policy: str, budget: int, sentence: str):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        Keep.of(policy, budget, 16)


def test_a_package_that_moved_gets_one_sentence():
    with pytest.raises(RuntimeError, match=r"numpy 2.* has no b; this adapter was tried with numpy 1.0: install that"):
        has_not_moved("numpy", "1.0", {"a": 1, "b": None})


def test_what_is_no_model_of_tunix_is_refused():
    with pytest.raises(ValueError, match="the model is a SimpleNamespace; expected a Llama3, Qwen2, Qwen3 or Gemma3"):
        tunix.under_budget(SimpleNamespace(), policy="tova", budget=8)


def test_a_model_of_tunix_takes_what_it_took_before():
    """Its learner looks at the names: it gives segments to a model that takes them, or any name."""

    class Llama:
        def __call__(self, input_tokens, positions, cache, attention_mask):
            return positions

    own = tunix._model(Llama)
    names = [*inspect.signature(Llama().__call__).parameters, "decode_only_last_token"]
    assert list(inspect.signature(own().__call__).parameters) == names
    assert own()(1, positions=2, cache=None, attention_mask=None) == 2


def test_gemma_cuts_and_writes_back_a_cache_that_stays_whole():
    whole = gemma.Slots(("old",), jnp.zeros((2, 9, 0, 0)))
    part = whole[:, :5, :, :]
    assert part.shape == (2, 5, 0, 0) and part.caches == ("old",)
    written = whole.at[:, :5, :, :].set(gemma.Slots(("new",), part.room))
    assert written.shape == (2, 9, 0, 0) and written.caches == ("new",) and nbytes(written.room) == 0


def test_positions_of_prompts():
    tokens = np.array([[5, 6, 7, 0], [5, 6, 7, 8]])
    got = jax.jit(gemma.prompt_positions)(tokens, np.tile(np.arange(4), (2, 1)))
    assert got.tolist() == [[0, 1, -1, -1], [0, 1, 2, -1]]
    mask = np.array([[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]], bool)  # one row of two paddings and a token
    assert jax.jit(tunix.real_positions)(np.array([[0, 0, 0]]), mask).tolist() == [[-1, -1, 0]]


def test_the_versions_are_those_that_were_recorded():
    found = json.loads(RECORDED.read_text())
    assert {name: own["version"] for name, own in found.items()} == VERSIONS
    assert tuple(VERSIONS.values()) == (gemma.TRIED, tunix.TRIED, keras.TRIED)
    makefile = (ROOT / "Makefile").read_text()
    assert [f"{name}=={version}" in makefile for name, version in VERSIONS.items()] == [True] * 3


@matrix
def test_the_lines_for_maxtext_and_easydel_attend_and_keep_the_budget():
    """Both hand over [B, T, heads, D]; MaxText has scaled its queries, and its padding has segment 0."""
    query, key, value = np.split(np.random.default_rng(0).normal(size=(2, 6, 8, 8)).astype(np.float32), [4, 6], axis=2)
    place, segments = np.tile(np.arange(6), (2, 1)), np.arange(6) < np.array([[6], [3]])
    handed = {
        "MaxText": dict(
            query=query / 8**0.5, inputs_positions=place, decoder_segment_ids=segments.astype(int), key=key, value=value
        ),
        "EasyDeL": dict(query_states=query, key_states=key, value_states=value, position=np.where(segments, place, -1)),
    }
    layer = SimpleNamespace(attn_logits_soft_cap=None, sliding_window=None)
    known = dict(jnp=jnp, kvjax=kvjax, self=layer, policy="tova", budget=4)
    empty = kvjax.empty_cache("tova", budget=4, block=6, kv_heads=2, query_heads=4, head_dim=8, batch=2)
    want = np.asarray(jax.nn.dot_product_attention(query, key, value, is_causal=True))
    for package, name in (("MaxText", "cache"), ("EasyDeL", "cache_view")):

        def lines(given: Any, cache: Any, package: str = package, name: str = name) -> Any:
            names = known | given | {name: cache}
            run_block(package, names)
            return names["out"], names[name]

        out, cache = jax.jit(lines)(handed[package], empty)
        np.testing.assert_allclose(np.asarray(out)[segments], want[segments], atol=1e-5)
        assert np.asarray(cache.num_live).tolist() == [[4, 4], [3, 3]]


@matrix
@pytest.mark.parametrize(("package", "policy"), [(name, own) for name in VERSIONS for own in (None, *POLICIES[name])])
@pytest.mark.filterwarnings("ignore:.* sums attention over all queries:UserWarning")
def test_our_decoder_says_what_the_packages_said(package: str, policy: str | None):
    """Under a budget of 24 of 76 tokens, and without one, with the same weights."""
    recorded = json.loads(RECORDED.read_text())[package]["tokens"][policy or "full"]
    for own, said in zip(ours(package, policy, BUDGET), recorded, strict=True):
        end = own.index(0) if 0 in own else len(own)  # the packages' samplers draw no 0, which pads
        assert own[:end] == said[:end] and end >= 9
    assert len({token for row in recorded for token in row}) > 5
