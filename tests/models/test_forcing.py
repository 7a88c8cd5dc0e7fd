"""Teacher forcing: a text that the model has made leaves the cache that making it left, and predicts it again."""

import numpy as np
import pytest

import models
from tests.models.tiny import SETTINGS, TOKENS, decoder, held
from tests.tiers import first


@pytest.mark.parametrize("policy", first(2, ["h2o+caote", "kvzip(sinks=2)", "rkv(window=4)@adakv"]))
def test_what_was_made_is_made_again(policy):
    settings = dict(policy=policy, evict_every=4, **SETTINGS)
    prompt = TOKENS[:2, :20]
    out = models.generate(decoder(), prompt, max_new_tokens=22, end=(), **settings)
    made = np.asarray(out.tokens)
    text, lengths = np.concatenate([prompt, made[:, :-1]], axis=1), np.array([41, 33])
    cache, hidden = models.teacher_forced(decoder(), text, lengths=lengths, prompt=20, **settings)
    said = np.asarray(decoder().logits(hidden)).argmax(-1)
    np.testing.assert_array_equal(said[0], made[0])
    np.testing.assert_array_equal(said[1, : 33 - 20 + 1], made[1, : 33 - 20 + 1])
    np.testing.assert_array_equal(cache.next_position, lengths)
    assert held(cache, 0) == held(out.cache, 0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("prompt", "message"),
    [(0, r"prompt is 0; give at least 1 token"), (60, r"a text has 60 tokens, and its prompt 60; give longer texts")],
)
def test_a_text_is_longer_than_its_prompt(prompt, message):
    with pytest.raises(ValueError, match=message):
        models.teacher_forced(decoder(), TOKENS[:1], prompt=prompt, policy="h2o", **SETTINGS)
