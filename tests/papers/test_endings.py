"""Endings of a compressed prompt against whole sequences."""

import itertools

import numpy as np

from evals import loglikelihood
from evals.answering import Feed
from evals.run_settings import Setting
from papers.choices import endings
from papers.choices.tasks import Sample

LENGTHS, QUESTIONS = (42, 44, 43), [7, 8, 7]  # of prompts: as many blocks, and as much room, in every batch


def test_endings_are_as_likely_as_in_whole_sequences(tiny):
    model, rng, policy = tiny[0], np.random.default_rng(1), "snapkv(window=4)+caote"
    prompts = [rng.integers(0, 90, length).tolist() for length in LENGTHS]
    ends = [[rng.integers(0, 90, size).tolist() for size in (1, 3)] for _ in prompts]
    settings = dict(block=8, when="prompt")
    samples = [
        Sample(prompt, len(prompt) - question, tuple(own), 0, (1, 1))
        for prompt, own, question in zip(prompts, ends, QUESTIONS, strict=True)
    ]
    asked = Setting(policy, 12, "prompt", "unknown")
    found = {row: behind for _, row, behind in endings.likelihoods(model, samples, [asked], range(3), Feed(8, 2))}
    questions = [question for question in QUESTIONS for _ in range(2)]
    whole = [sample.tokens + end for sample in samples for end in sample.choices]
    held = [len(end) + question for end, question in zip(itertools.chain(*ends), questions, strict=True)]
    rows = iter(loglikelihood.predict(model, whole, held, policy=policy, budget=12, **settings))
    for place, own in enumerate(ends):
        wanted = [next(rows).log_probability[-len(end) :].sum() for end in own]
        np.testing.assert_allclose(found[place].log_probability, wanted, atol=1e-4)
        assert 0 < found[place].cache_bytes <= found[place].peak_cache_bytes
