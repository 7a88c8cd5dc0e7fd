"""Bad input to prefill, generate and stream: one clear sentence each, before anything runs."""

import jax
import numpy as np
import pytest

import models
from models import Config
from tests.models import reference

CONFIG = Config(48, 16, 16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64)
TOKENS = np.arange(40)[None]


RUNS = {  # the other values that cannot be: tests/bad_input
    "an unknown policy": (dict(policy="h2oo", budget=16), r"unknown policy 'h2oo' .* expected one of .*h2o.*snapkv"),
    "a budget smaller than what is protected": (
        dict(policy="h2o+protect(sinks=4,recent=20)", budget=16),
        r"the budget is 16 tokens, but .* 4 first and 20 last ones: give at least 24",
    ),
    "a budget smaller than the window": (dict(policy="snapkv", budget=16), r"budget is 16 .*0 first and 32 last"),
    "a ratio too small for a window": (dict(policy="snapkv(window=8)", budget=0.1), r"budget is 4 tokens, .* 8 last"),
    "a policy without a budget": (dict(policy="h2o"), r"the policy 'h2o' needs a budget: slots per head, or a ratio"),
    "a budget for the full cache": (dict(policy="full", budget=16), r"a budget of 16 was given without a policy"),
    "a total smaller than what all heads protect": (
        dict(policy="snapkv(window=12)@model", budget=10),
        r"the budget is 10 tokens, but .*@model' always keeps 0 first and 12 last",
    ),
    "a window larger than the block": (
        dict(policy="snapkv(window=16)", budget=20, block=8),
        r"observes the last 16 queries, but a block has 8: give a block of at least 16, or a smaller window",
    ),
    "a question without a context": (dict(policy="h2o", budget=16, question=40), r"some context must come before it"),
    "rotations under turned positions": (
        dict(policy="expected_attention+positions", budget=16),
        r"turns queries back by their positions in the text, but the cache's are 'compact'",
    ),
    "a length beyond the tokens": (dict(lengths=np.array([41])), r"lengths are \[41\]; .* to 40"),
    "no token": (dict(tokens=np.zeros((1, 0), int)), r"the prompt is empty \(tokens \(1, 0\)\); give at least 1 token"),
    "fractions": (dict(tokens=np.ones((1, 5))), r"tokens are float64 \(1, 5\); expected integers"),
    "a token beyond the vocabulary": (dict(tokens=[[1, 48]]), "token 48 is outside the vocabulary of 48; .*tokenizer"),
    "too many positions": (dict(tokens=np.zeros((1, 65), int)), r"take (65|129) positions, but the model has 64: "),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("run", [models.prefill, models.generate, models.stream])
def test_a_run_refuses(model, run, arguments, message):
    given = dict(tokens=TOKENS) | arguments
    with pytest.raises(ValueError, match=message) as error:
        run(model, given.pop("tokens"), **given)
    assert "\n" not in str(error.value)


def test_the_answer_counts_towards_the_positions_of_a_full_cache(model):
    with pytest.raises(ValueError, match=r"the prompt and its answer take 65 positions, but the model has 64"):
        models.generate(model, TOKENS, max_new_tokens=25)
    models.stream(model, TOKENS, max_new_tokens=24, end=())  # what is refused is refused here already


def test_a_prompt_beyond_the_models_positions_is_fine_where_tokens_are_evicted(model):
    tokens = np.tile(TOKENS, (1, 3))
    with pytest.raises(ValueError, match="but the model has 64: shorten the prompt"):
        models.stream(model, tokens)
    models.stream(model, tokens, policy="h2o", budget=8, block=8, max_new_tokens=4, end=())


def test_padding_outside_the_vocabulary_does_no_harm(model):
    tokens = np.where(np.arange(40) < 30, TOKENS, -1)
    with_padding = models.prefill(model, tokens, lengths=np.array([30]), block=16).logits
    np.testing.assert_allclose(with_padding, models.prefill(model, TOKENS, lengths=np.array([30]), block=16).logits)


SAMPLING = {
    "a temperature below zero": (dict(temperature=-1.0), r"temperature is -1.0; give 0 .* or more"),
    "draws without a key": (dict(temperature=1.0), r"temperature is above 0 but no key was given; pass key="),
}


@pytest.mark.parametrize(("arguments", "message"), SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("run", [models.generate, models.stream])
def test_decoding_refuses(model, run, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(model, TOKENS, policy="h2o", budget=16, **arguments)


@pytest.mark.parametrize("run", [models.prefill, models.generate, models.stream])
@pytest.mark.parametrize("traced", ["tokens", "lengths", "question"])
def test_a_traced_prompt_is_refused(model, run, traced):
    given = dict(tokens=TOKENS, lengths=np.array([40]), question=np.array([2]))

    def inside(argument):
        settings = given | {traced: argument}
        return run(model, settings.pop("tokens"), policy="h2o", budget=16, **settings)

    with pytest.raises(ValueError, match=r"the prompt is traced .* call prefill, generate and stream outside"):
        jax.jit(inside)(given[traced])


def test_a_ratio_is_rounded_up_once_from_the_exact_product(model):
    cache, _ = models.prefill(model, np.arange(100)[None] % 48, policy="tova", budget=0.07, block=10)
    assert cache.num_live.max() == 7


def test_every_rows_budget_must_hold_what_is_protected(model):
    tokens, lengths = np.zeros((2, 64), np.int32), np.array([4, 64])
    with pytest.raises(ValueError, match=r"the budget is 16 tokens, but .* always keeps 8 first and 9 last"):
        models.prefill(
            model, tokens, lengths=lengths, policy="tova+protect(sinks=0.5,recent=0.6)", budget=0.25, block=8
        )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(number):
    weights = reference.parameters(CONFIG)
    broken = reference.decoder(CONFIG, weights | {"norm": np.full_like(weights["norm"], number)})
    with pytest.raises(ValueError, match=r"the model's logits are NaN or infinite: .* float32 is too narrow"):
        next(models.stream(broken, TOKENS, max_new_tokens=2))
