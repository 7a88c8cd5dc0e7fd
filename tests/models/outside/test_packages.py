"""The packages themselves, each where it is installed; tests/models/outside/tiny.py says how."""

import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from models.outside import gemma, keras, tunix
from models.outside.keep import nbytes
from tests.models.outside import tiny
from tests.models.outside.tiny import ALL, BLOCK, BUDGET, LENGTH, POLICIES, VERSIONS

pytestmark = [
    pytest.mark.nightly,  # needs another package, in an environment of its own
    pytest.mark.filterwarnings("ignore"),
]
os.environ.setdefault("KERAS_BACKEND", "jax")
HOW: Any = dict(policy="h2o+caote+protect(recent=0)", budget=BUDGET, block=BLOCK)
WHOLE: Any = dict(policy="h2o+caote+protect(recent=0)", budget=ALL, block=BLOCK)
IMPORTS = {"gemma": "gemma", "google-tunix": "tunix", "keras-hub": "keras_hub"}


@pytest.fixture(autouse=True)
def _jaxtyping_is_as_the_packages_know_it(monkeypatch):
    monkeypatch.setattr(jaxtyping, "Array", jax.Array)  # kauldron, which gemma needs, takes no union


def need(package: str) -> Any:
    return pytest.importorskip(IMPORTS[package], reason=f"{package} is not installed: run make outside")


def recorded(package: str, policy: str = "full") -> list[list[int]]:
    return json.loads(tiny.RECORDED.read_text())[package]["tokens"][policy]


@pytest.mark.parametrize("package", VERSIONS)
def test_tokens(package: str):
    """A budget that holds everything gives the package's own tokens, and a smaller one those that were recorded."""
    need(package)
    assert tiny.said(package, None, 0) == tiny.said(package, "h2o+caote+protect(recent=0)", ALL) == recorded(package)
    for policy in POLICIES[package]:
        assert tiny.said(package, policy, BUDGET) == recorded(package, policy)


def test_the_block_of_the_page_for_gemma(monkeypatch):
    need("gemma")
    from gemma import gm
    from gemma.gm.nn._transformer import ModelInfo

    model, params = tiny.gemma_model()
    monkeypatch.setattr(gm.nn.Transformer, "INFO", ModelInfo(tokenizer_version=3))
    monkeypatch.setattr(gm.nn, "Gemma3_4B", lambda: model)
    monkeypatch.setattr(gm.text.Tokenizer, "from_version", lambda version: tiny.gemma_words())
    said = tiny.run_block("gemma", dict(params=params, book=tiny.texts()[0]))
    assert tiny.Words().encode(said)[: tiny.NEW] == recorded("gemma")[0]


def test_the_block_of_the_page_for_tunix():
    """The second prompt, whose answer ends."""
    need("google-tunix")
    names = dict(llama=tiny.tunix_model(), tokenizer=tiny.Words(), prompts=tiny.texts()[1:])
    (said,) = tiny.run_block("Tunix", names).text
    tokens = recorded("google-tunix")[1]
    assert tiny.Words().encode(said)[:4] == tokens[: tokens.index(tiny.Words().eos_id())]


def test_the_block_of_the_page_for_keras(monkeypatch):
    """Ends at the fourth token that the package said."""
    hub, tokens = need("keras-hub"), recorded("keras-hub")[0]

    class Preprocessor:
        tokenizer = SimpleNamespace(end_token_id=tokens[3])

        def generate_preprocess(self, texts: list[str], sequence_length: int) -> dict[str, np.ndarray]:
            (row,) = map(tiny.Words().encode, texts)
            ids = np.pad(row, (0, sequence_length - len(row)))[None]
            return dict(token_ids=ids, padding_mask=(ids > 0).astype(np.int32))

        def generate_postprocess(self, said: dict[str, jax.Array]) -> list[str]:
            return [tiny.Words().decode(said["token_ids"][0, LENGTH : LENGTH + 3])]

    model = tiny.keras_model()
    model.preprocessor = Preprocessor()
    monkeypatch.setattr(hub.models.CausalLM, "from_preset", lambda name: model)
    assert tiny.Words().encode(tiny.run_block("Keras", dict(book=tiny.texts()[0]))) == tokens[:3]


def test_gemma_rows_of_two_lengths_and_bytes():
    need("gemma")
    model, params = tiny.gemma_model()
    prompts = [tiny.texts()[0], tiny.texts()[1][:80]]
    length = 4096
    full, before = tiny.gemma_tokens(model, params, prompts, length)
    same, _ = tiny.gemma_tokens(gemma.under_budget(model, **WHOLE), params, prompts, length)
    _, after = tiny.gemma_tokens(gemma.under_budget(model, **HOW), params, prompts, length)
    assert same == full
    slots = [own.cache.num_slots for own in after.cache["layer_0"]["k"].caches]
    assert slots == [BUDGET + BLOCK] * 2 and nbytes(before.cache) > 90 * nbytes(after.cache)


@pytest.mark.parametrize("version", [3, 4])
def test_gemma_chats_as_if_all_tokens_were_one_prompt(version: int, monkeypatch):
    """Two turns; gemma's own second turn says the same once its mask is no longer a slot ahead of its cache."""
    need("gemma")
    from gemma import gm
    from gemma.gm.text._turn_utils import PrevTurns

    model, params = tiny.gemma_model() if version == 3 else tiny.gemma_4_model()
    asked = [tiny.texts()[0], tiny.texts()[1][:80]]

    def turns(model: Any) -> list[list[int]]:
        how: Any = dict(tokenizer=tiny.gemma_words(), cache_length=1024, max_out_length=tiny.NEW, multi_turn=True)
        sampler, said = gm.text.ChatSampler(model=model, params=params, **how), []
        for text in asked:
            sampler.chat(text)
            said.append([token for token in sampler.last_state.predicted_tokens[0].tolist() if token])
        return said

    own, full = turns(gemma.under_budget(model, **WHOLE)), turns(model)
    together = " ".join([asked[0], tiny.Words().decode(own[0][:-1]), asked[1]])  # an answer's last token is never fed
    (at_once,) = tiny.gemma_tokens(model, params, [together])[0]
    assert own == [full[0], at_once] and full[1] != at_once
    seen = PrevTurns.used_cache_length
    monkeypatch.setattr(PrevTurns, "used_cache_length", property(lambda self: max(seen.fget(self) - 1, 0)))
    assert turns(model) == own


def test_gemma_goes_on_behind_answers_of_two_lengths():
    """The second answer ends at its fourth token; in the second turn both rows say what each says alone."""
    need("gemma")
    model, params = tiny.gemma_model()
    sampler = dataclasses.replace(
        tiny.gemma_sampler(gemma.under_budget(model, **WHOLE), params, 256), stop_tokens=(58,)
    )

    def second(texts: list[str]) -> list[list[int]]:
        state = sampler.sample(texts, return_state=True).state
        return sampler.sample([text[:80] for text in texts], last_state=state, return_state=True).tokens.tolist()

    assert second(tiny.texts()) == [second([text])[0] for text in tiny.texts()]
    assert recorded("gemma")[1][3] == 58


def test_gemma_chats_for_longer_than_its_budget():
    """Three turns, in which no head ever holds more than the budget; the second goes on from the first's cache."""
    need("gemma")
    model, params = tiny.gemma_model()
    model = gemma.under_budget(model, **HOW)
    sampler = tiny.gemma_sampler(model, params, 512)
    state, seen = None, 0
    for text in tiny.texts() * 2:
        out = sampler.sample(text, last_state=state, return_state=True)
        state, seen = out.state, seen + LENGTH
        caches = state.cache["layer_0"]["k"].caches
        assert all(int(own.cache.num_live.max()) <= BUDGET for own in caches)
        assert int(caches[0].cache.next_position[0]) >= seen


def test_gemma_4_and_what_is_refused():
    need("gemma")
    from gemma import gm
    from gemma.gm.nn.gemma3n._transformer import Gemma3nTransformer as Transformer3n

    model, _ = tiny.gemma_model()
    four, params = tiny.gemma_4_model()
    full, _ = tiny.gemma_tokens(four, params, tiny.texts())
    assert tiny.gemma_tokens(gemma.under_budget(four, **WHOLE), params, tiny.texts())[0] == full
    _, state = tiny.gemma_tokens(gemma.under_budget(four, **HOW), params, tiny.texts())
    assert [own.cache.key.shape for own in state.cache["layer_0"]["k"].caches] == [(2, 2, 40, 16), (2, 1, 40, 32)]
    with pytest.raises(ValueError, match="share keys and values"):
        gemma.under_budget(gm.nn.Gemma4_E2B(), **HOW)
    with pytest.raises(ValueError, match="expected a Gemma 2, 3 or 4"):
        gemma.under_budget(Transformer3n(config=None, tokens="tokens"), **HOW)
    budgeted = gemma.under_budget(model, **HOW)
    cache = budgeted.init_cache(batch_size=1, dtype=jnp.float32, cache_length=8)
    with pytest.raises(ValueError, match="give text alone"):
        budgeted.apply({}, jnp.ones((1, 4), jnp.int32), cache=cache, positions=None, images=np.zeros(1))


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Gemma3"])
def test_other_models_of_tunix(name: str):
    """Rows of two lengths, with padding before them."""
    need("google-tunix")
    import importlib

    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler

    module = importlib.import_module(f"tunix.models.{name.lower()}.model")
    sizes = dict(num_layers=2, embed_dim=64, hidden_dim=64, num_heads=4, head_dim=16, num_kv_heads=2)
    sizes |= (
        dict(num_embed=128, sliding_window_size=24, param_dtype=jnp.float32)
        if name == "Gemma3"
        else dict(vocab_size=128, rope_theta=10_000, norm_eps=1e-6)
    )
    graph, state = nnx.split(getattr(module, name)(module.ModelConfig(**sizes), rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(state)
    drawn = [jax.random.normal(jax.random.key(i), x.shape) / (1 if x.ndim == 1 else 3) for i, x in enumerate(leaves)]
    model = nnx.merge(graph, jax.tree.unflatten(tree, drawn))
    prompts = [tiny.texts()[0], tiny.texts()[1][:80]]
    full = tiny.tunix_tokens(model, prompts)
    own = tunix.under_budget(model, **WHOLE)
    assert tiny.tunix_tokens(own, prompts, size=10**6) == full
    assert jax.tree.structure(nnx.state(own)) == jax.tree.structure(nnx.state(model))
    if name != "Gemma3":  # the others' num_embed is the width of the model, and their logits do not fit
        return
    for echo in (False, True):
        how: Any = dict(max_prompt_length=LENGTH, eos_tokens=[500], return_logits=True, echo=echo)
        samplers = (Sampler(one, tiny.Words(), CacheConfig(128, 2, 2, 16)) for one in (model, own))
        want, got = (sampler(tiny.texts(), 4, **how).logits for sampler in samplers)
        np.testing.assert_allclose(np.array(got)[:, -4:], np.array(want)[:, -4:], atol=1e-3)


def test_a_rollout_of_tunix_longer_than_its_memory():
    """New weights go in as before, and the cache does not grow with its size."""
    need("google-tunix")
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler

    model = tiny.tunix_model()
    own = tunix.under_budget(model, **HOW)
    sampler = Sampler(own, tiny.Words(), CacheConfig(10**6, 2, 2, 16))
    first = sampler(tiny.texts(), 200, max_prompt_length=LENGTH, eos_tokens=[500]).tokens
    assert [len(row) for row in first] == [200, 200]
    own_bytes = nbytes(own.init_cache(2, 10**6, jnp.float32))
    assert own_bytes < 2 * 2 * 2 * 2 * 16 * 4 * (BUDGET + BLOCK) * 1.2
    sampler.transformer_state = jax.tree.map(lambda x: x * 1.5, nnx.variables(model))
    assert not np.array_equal(sampler(tiny.texts(), 200, max_prompt_length=LENGTH, eos_tokens=[500]).tokens, first)


def test_the_learner_of_tunix_sees_all_tokens_of_a_rollout():
    """Without a cache, a Llama under a budget is Tunix's own, which takes no segments."""
    need("google-tunix")
    from flax import nnx
    from tunix.rl.common import compute_per_token_logps

    model = tiny.tunix_model()
    own = tunix.under_budget(model, **HOW)
    tokens = jnp.asarray(tiny.PROMPTS)
    how: Any = dict(prompt_tokens=tokens[:, :40], completion_tokens=tokens[:, 40:], pad_id=0, eos_id=1)
    want, got = (compute_per_token_logps(*nnx.split(one), **how) for one in (model, own))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["Mistral", "Qwen", "Qwen3", "Gemma", "Gemma3", "GPT2"])
def test_other_models_of_keras_hub(name: str):
    """Rows of two lengths."""
    hub = need("keras-hub")
    sizes: Any = dict(
        vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64, intermediate_dim=64
    )
    if name in ("Qwen3", "Gemma", "Gemma3"):
        sizes["head_dim"] = 16
    if name == "Mistral":
        sizes["sliding_window"] = 24
    if name == "Gemma3":
        sizes |= dict(image_size=None, sliding_window_size=24, use_query_key_norm=True, vision_encoder=None)
    if name == "GPT2":
        sizes = dict(vocabulary_size=128, num_layers=2, num_heads=4, hidden_dim=64, intermediate_dim=64)
        sizes["max_sequence_length"] = 128
    backbone = getattr(hub.models, f"{name}Backbone")(**sizes)
    drawn = [jax.random.normal(jax.random.key(i), w.shape) / 3 for i, w in enumerate(backbone.get_weights())]
    backbone.set_weights([np.array(own) for own in drawn])
    model = getattr(hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    full = tiny.keras_tokens(model, (LENGTH, 50))
    assert tiny.keras_tokens(keras.under_budget(model, **WHOLE), (LENGTH, 50)) == full


def test_bytes_and_refusals_of_keras_hub():
    hub = need("keras-hub")
    own = keras.under_budget(tiny.keras_model(), **HOW)
    caches = own.keep.caches(keras.sizes_of(own), batch=1, dtype="float32")
    assert [cache.cache.num_slots for cache in caches] == [BUDGET + BLOCK] * 2
    backbone = hub.models.Phi3Backbone(128, 2, 64, 64, 4, 2)
    with pytest.raises(ValueError, match="keras-hub cannot hand over the attention of Phi3CausalLM"):
        keras.under_budget(hub.models.Phi3CausalLM(backbone=backbone), **HOW)
