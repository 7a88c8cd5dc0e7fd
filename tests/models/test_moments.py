"""When a run evicts: by default, as published, and as it is told."""

import warnings

import pytest

import kvjax
import models
from kvjax.chains import LINKS
from kvjax.schedule import moments
from models import engine
from tests.models.tiny import DOCUMENT, SETTINGS, decoder

AT_EVERY_BLOCK = "h2o tova streaming h2o+caote tova+fast_caote snapkv+caote keydiff key_norm q_filters"
AT_ONCE = (
    "snapkv snapkv@adakv snapkv@pyramid snapkv+critical laprox@model cake@cake lava@lava expected_attention curdkv"
)
AT_ONCE += " lagkv finch kvzip+pool"
# docs/methods.md has the sources
PUBLISHED = dict.fromkeys(AT_EVERY_BLOCK.split(), ("block", 1)) | dict.fromkeys(AT_ONCE.split(), ("prompt", 0))
PUBLISHED["sage"] = ("prompt", 1)
PUBLISHED["rkv"] = ("prompt", 128)
USUAL = {"h2o+caote": 1, "snapkv": 32, "snapkv(window=8)+caote@adakv": 8, "h2o@cake": 32, "h2o@cake(window=5)": 5}
USUAL["rkv"] = 128


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


def test_where_no_paper_says_when_there_is_nothing_to_take():
    with pytest.raises(ValueError, match=r"no paper says when 'random' evicts; give when='block' or when='prompt'"):
        models.generate(decoder(), DOCUMENT, policy="random", budget=16, when="published")


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
        models.stream(decoder(), DOCUMENT, block=8, **settings | dict(policy="h2o"))


def test_the_warning_names_the_line_that_asked(monkeypatch):
    monkeypatch.setattr(engine, "_run_prompt", None)  # it is warned before anything runs
    with pytest.warns(UserWarning) as caught, pytest.raises(TypeError):
        models.prefill(decoder(), DOCUMENT, policy="sage", **SETTINGS)
    assert caught[0].filename == __file__
