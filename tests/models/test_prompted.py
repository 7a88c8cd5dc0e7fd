"""A text behind the prompt scores the prompt's tokens by the text's attention, anew after each block."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from models import repeating
from tests.models.test_kvzip import kept
from tests.models.tiny import decoder

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 32))
WORDS = (7, 3, 9, 4)
POLICY = repeating.asking(
    kvjax.parse("prompted(text='x',sinks=0)@uniform"), kvjax.RepeatPrompt(WORDS[:3], (), WORDS[3:])
)
LAST = kvjax.base_score("largest", lambda o: jnp.max(o.columns.max, axis=2, keepdims=True), statistics=("max",))


def test_what_the_text_attends_to_is_kept():
    """As if the text ended the prompt, and a policy scored by the attention of its last block."""
    cache, _ = models.prefill(decoder(), TOKENS, policy=POLICY, budget=10, block=16, when="prompt")
    policy = kvjax.chain(LAST, kvjax.protect(recent=len(WORDS)))
    prompt = np.concatenate([TOKENS, np.broadcast_to(WORDS, (2, len(WORDS)))], axis=1)
    expected, _ = models.prefill(decoder(), prompt, policy=policy, budget=10 + len(WORDS), block=4, when="prompt")
    np.testing.assert_array_equal(kept(cache, 32), kept(expected, 36)[..., :32])
    assert cache.next_position.tolist() == [32, 32]


def test_each_block_is_followed_by_the_text():
    whole, _ = models.prefill(decoder(), TOKENS, policy=POLICY, budget=10, block=16)
    first, _ = models.prefill(decoder(), TOKENS[:, :16], policy=POLICY, budget=10, block=16, when="prompt")
    settings = dict(policy=POLICY, budget=10, block=16, when="prompt")
    expected, _ = models.prefill(decoder(), TOKENS[:, 16:], cache=first, **settings)
    np.testing.assert_array_equal(kept(whole, 32), kept(expected, 32))


@pytest.mark.matrix
def test_the_topic_that_is_named_stays():
    model, tokenizer = models.load("retriever")
    lines = [f"The code of {name} is {code}." for name, code in (("amber falcon", 4719), ("silver otter", 2856))]
    document = f"{lines[0]} {lines[1]} " + "The river was calm. " * 20
    cue = "Answer: the code of {} is"
    answers = {}
    for name in ("amber falcon", "silver otter"):
        policy = f"prompted(text='the code of {name} is')+pool(kernel=9,pooling='max')"
        settings = dict(policy=policy, budget=24, block=16, max_new_tokens=4)
        answers[name] = models.ask(model, tokenizer, document, cue.format(name), **settings).answers[0]
    assert "4719" in answers["amber falcon"] and "2856" in answers["silver otter"]


@pytest.mark.parametrize("text", ["", "  "])
def test_a_text_is_needed(text):
    with pytest.raises(ValueError, match="give the words that are fed after each block"):
        kvjax.prompted(text=text)


def test_words_without_tokens_are_refused():
    with pytest.raises(ValueError, match=r"'who\?' is fed behind the prompt, but has no tokens yet"):
        models.prefill(decoder(), TOKENS, policy="prompted(text='who?')", budget=10, block=16)
