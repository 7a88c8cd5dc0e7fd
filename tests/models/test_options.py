"""Test what a run is told: settings in one value or arguments, when it evicts, and what it refuses before it begins."""

import dataclasses
import functools
import warnings
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest

import kvjax
import models
from kvjax._src.chains import LINKS
from kvjax.schedule import When, moments
from models import asking, commands, engine
from models.commands import ask, chat
from models.commands.actions.chat import BUDGET, POLICY
from models.commands.shared_flags import FLAGS, SAMPLING
from models.options import AnswerSettings, AskSettings, EngineSettings, Options, PromptSettings
from models.planning import overflowing, plan_run
from models.prompts import check_prompt
from models.sampling import Sampling
from tests.models import reference, tiny
from tests.models.tiny import DOCUMENT, SETTINGS, decoder

GIVEN = dict(policy=tiny.WINDOW, **tiny.SETTINGS)


def test_the_keyword_arguments_are_the_fields():
    fields = get_type_hints(Options)
    taken = [get_type_hints(settings) for settings in (PromptSettings, AnswerSettings, AskSettings, EngineSettings)]
    assert dict.fromkeys(name for settings in taken for name in settings).keys() == fields.keys()
    assert all(fields[name] == kind for settings in taken for name, kind in settings.items())


def test_flags_have_the_defaults_of_options():
    """They are written twice, as the modules of options import JAX."""
    names = ("block", "sinks", "max_new_tokens", "temperature", "repetition_penalty")
    assert [FLAGS[name]["default"] for name in names] == [getattr(Options, name) for name in names]
    assert Sampling._fields == SAMPLING and FLAGS["when"]["choices"] == get_args(When)
    assert ask.parser().get_default("policy") is None and asking.is_automatic(None)
    own = {ask: (asking.POLICY, asking.BUDGET), chat: (POLICY, BUDGET)}
    for command, (policy, budget) in own.items():
        said = " ".join(command.parser().format_help().split())
        assert f"else {policy};" in said and f"(default: {budget}; none for 'full')" in said


def test_options_are_keyword_arguments_that_come_first():
    options = Options(**GIVEN, max_new_tokens=9, end=())
    given = models.generate(decoder(), tiny.TOKENS, lengths=tiny.LENGTHS, **GIVEN, max_new_tokens=9, end=())
    same = models.generate(decoder(), tiny.TOKENS, lengths=tiny.LENGTHS, options=options)
    np.testing.assert_array_equal(same.tokens, given.tokens)
    np.testing.assert_array_equal(same.cache.position, given.cache.position)
    changed = dataclasses.replace(options, budget=1, max_new_tokens=1)
    back = dict(budget=GIVEN["budget"], max_new_tokens=9)
    again = models.generate(decoder(), tiny.TOKENS, lengths=tiny.LENGTHS, options=changed, **back)
    np.testing.assert_array_equal(again.tokens, given.tokens)


AT_EVERY_BLOCK = "h2o tova streaming h2o+caote tova+fast_caote snapkv+caote keydiff key_norm q_filters"
AT_ONCE = "snapkv snapkv@adakv snapkv@pyramid snapkv+critical laprox cake lava expected_attention curdkv"
AT_ONCE += " lagkv finch kvzip+pool@uniform restkv defensivekv"
# docs/methods.md has the sources
PUBLISHED = dict.fromkeys(AT_EVERY_BLOCK.split(), ("block", 1)) | dict.fromkeys(AT_ONCE.split(), ("prompt", 0))
PUBLISHED |= dict.fromkeys(("sage", "d2o"), ("prompt", 1))
PUBLISHED["rkv"] = ("prompt", 128)
USUAL = {"h2o+caote": 1, "snapkv": 32, "snapkv(window=8)+caote@adakv": 8, "h2o@cake": 32, "h2o@cake(window=5)": 5}
USUAL |= {"rkv": 128, "restkv(window=16)": 16}


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_published_moments_are_those_of_the_paper(name, expected):
    assert moments(kvjax.parse(name), "published", None) == expected


def test_every_paper_of_a_base_score_says_when():
    silent = {name for name, make in LINKS.items() if make().base and make().published is None}
    assert silent == {"butler", "random"}, "TokenButler's paper evicts nothing, a random choice has none"
    told = [make().published.source for make in LINKS.values() if make().published]
    assert all("arXiv" in source or "openreview" in source for source in told)


@pytest.mark.parametrize(("name", "every"), USUAL.items(), ids=USUAL)
def test_by_default_a_policy_waits_for_its_window(name, every):
    assert moments(kvjax.parse(name), "block", None) == ("block", every)


def test_explicit_steps_win():
    assert [moments(kvjax.parse("snapkv"), when, 3)[1] for when in ("block", "prompt", "published")] == [3] * 3


def test_sage_warns_where_it_is_chosen_anew_by_every_block():
    """A stream that nobody reads says so already."""
    settings = dict(policy="sage", budget=16, max_new_tokens=2, end=())
    with pytest.warns(UserWarning, match=r"'sage' is made to choose once, .* 60 tokens comes in blocks of 8") as caught:
        models.stream(decoder(), DOCUMENT, block=8, **settings)
    assert caught[0].filename == __file__, "the warning names the line that asked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.stream(decoder(), DOCUMENT, block=8, when="published", **settings)
        models.stream(decoder(), DOCUMENT, block=64, **settings)
        models.stream(decoder(), DOCUMENT, block=8, **settings | dict(policy="tova"))


@pytest.mark.parametrize("policy", ["h2o+protect(recent=0)", "h2o+caote+pool+protect(recent=0)@layer"])
def test_sums_that_never_fall_are_warned_of_where_an_answer_evicts(policy):
    with pytest.warns(UserWarning, match="what the model has just written is not kept") as caught:
        models.stream(decoder(), DOCUMENT, policy=policy, budget=16, block=8, max_new_tokens=2)
    said = str(caught[0].message)
    assert said.startswith(f"{policy!r} sums attention over all queries") and "'+protect(recent=0.5)'" in said
    assert len(caught) == 1 and caught[0].filename == __file__


def test_sums_are_not_warned_of_where_nothing_new_leaves():
    stream = functools.partial(models.stream, decoder(), DOCUMENT, block=8, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in ("h2o", "h2o(accumulate=False)", "tova+caote", "snapkv(window=4)"):
            stream(policy=policy, budget=16)
        stream(policy="h2o+protect(recent=0)", budget=16, evict_every=0)
        stream(policy="h2o+protect(recent=0)", budget=62)


@pytest.mark.matrix
def test_plain_sums_freeze_and_half_for_the_newest_keeps_them():
    kept = {}
    for policy in ("h2o+protect(recent=0)", "h2o"):
        with warnings.catch_warnings(action="ignore"):
            out = models.generate(decoder(), DOCUMENT, policy=policy, budget=24, block=8, max_new_tokens=100, end=())
        kept[policy] = int((np.asarray(out.cache.position) >= len(DOCUMENT[0]) + 70).sum(-1).max())
    assert kept == {"h2o+protect(recent=0)": 0, "h2o": 12}


def test_copies_beyond_the_model_s_positions_are_warned_of():
    stream = functools.partial(models.stream, decoder(CONFIG), np.zeros((1, 50), int), block=8, max_new_tokens=1)
    with pytest.warns(UserWarning, match="tokens again at positions up to 65, but the model was made for texts of 64"):
        stream(policy="kvzip(chunk=8)@uniform", budget=16, evict_every=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream(policy="kvzip(chunk=4)@uniform", budget=16, evict_every=0)
        stream(policy="kvzip(chunk=8)@uniform", budget=51, evict_every=0)


def test_the_warning_names_the_line_that_asked(monkeypatch):
    monkeypatch.setattr(engine, "_feed", None)  # it is warned before anything runs
    with pytest.warns(UserWarning) as caught, pytest.raises(TypeError):
        models.prefill(decoder(), DOCUMENT, policy="sage", **SETTINGS)
    assert caught[0].filename == __file__


CONFIG = tiny.config(max_positions=64)  # what is longer is refused
TOKENS = np.arange(40)[None]


@pytest.mark.parametrize("run", [models.prefill, models.generate, models.stream])
def test_each_kind_of_run_refuses_what_cannot_be_before_anything_runs(model, run):
    with pytest.raises(ValueError, match=r"the budget is 16 tokens, but .* 4 first and 20 last ones: give at least 24"):
        run(model, TOKENS, policy="h2o+protect(sinks=4,recent=20)", budget=16)
    with pytest.raises(ValueError, match=r"take (65|129) positions, but the model has 64: shorten the prompt"):
        run(model, np.zeros((1, 65), int))


def test_positions_are_enough_for_prompt_and_answer_or_tokens_are_evicted(model):
    said = "take 65 positions, but the model has 64: shorten the prompt"
    with pytest.raises(ValueError, match=said):  # what is refused is refused here already
        models.stream(model, TOKENS, max_new_tokens=25, end=())
    assert iter(models.stream(model, TOKENS, max_new_tokens=24, end=()))
    assert iter(models.stream(model, np.tile(TOKENS, (1, 3)), policy="tova", budget=8, block=8, end=()))


def test_what_does_not_fit_its_budget_is_repeated_and_what_fits_is_not():
    """Rows of one token less than the budget, of as many, and of one more; an answer of one token, then of two."""
    lengths = np.array([15, 16, 17])
    given = check_prompt(decoder(), np.zeros((3, 17), int), lengths, None)
    for reserve, answers in ((1, [False, True, True]), (2, [True, True, True])):
        options = Options(kvjax.parse("kvzip@uniform"), 16, 8, reserve=reserve)
        context, later = overflowing(plan_run(decoder(), given, options)[0].plan, given, options)
        assert context.tolist() == [False, False, True] and later.tolist() == answers


def test_padding_outside_the_vocabulary_does_no_harm(model):
    tokens = np.where(np.arange(40) < 30, TOKENS, -1)
    with_padding = models.prefill(model, tokens, lengths=np.array([30]), block=16).logits
    np.testing.assert_allclose(with_padding, models.prefill(model, TOKENS, lengths=np.array([30]), block=16).logits)


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


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(number):
    weights = reference.parameters(CONFIG)
    broken = reference.decoder(CONFIG, weights | {"norm": np.full_like(weights["norm"], number)})
    with pytest.raises(ValueError, match=r"the model's logits are NaN or infinite: .* float32 is too narrow"):
        next(models.stream(broken, TOKENS, max_new_tokens=2))


def test_a_share_may_be_a_percentage():
    assert models.Options(budget="25%").budget == 0.25
    assert models.Options(budget=" 12.5 %").budget == 0.125
    assert commands.parse_budget("25%") == 0.25
