"""Endings of a compressed prompt against whole sequences."""

import numpy as np

from evals import loglikelihood
from papers.choices import endings

LENGTHS, QUESTIONS = (42, 44, 43), [7, 8, 7]  # of prompts: as many blocks, and as much room, in every batch


def test_endings_are_as_likely_as_in_whole_sequences(tiny):
    model, rng, policy = tiny[0], np.random.default_rng(1), "snapkv(window=4)+caote"
    prompts = [rng.integers(0, 90, length).tolist() for length in LENGTHS]
    ends = [[rng.integers(0, 90, size).tolist() for size in (1, 3)] for _ in prompts]
    settings = dict(block=8, when="prompt")
    found = endings.likelihoods(model, prompts, ends, QUESTIONS, batch=2, policies=[(policy, 12)], **settings)[0]
    asked = [
        (prompt, end, question) for prompt, own, question in zip(prompts, ends, QUESTIONS, strict=True) for end in own
    ]
    held, whole = [len(end) + question for _, end, question in asked], [prompt + end for prompt, end, _ in asked]
    rows = iter(loglikelihood.predict(model, whole, held, policy=policy, budget=12, **settings))
    for own, behind in zip(ends, found, strict=True):
        wanted = [next(rows).log_probability[-len(end) :].sum() for end in own]
        np.testing.assert_allclose(behind.log_probability, wanted, atol=1e-4)
        assert 0 < behind.cache_bytes <= behind.peak_cache_bytes
