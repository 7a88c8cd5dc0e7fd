"""When a run evicts: by default, as published, and as it is told."""

import warnings

import numpy as np
import pytest

import kvjax
import models
from kvjax.chains import LINKS
from kvjax.schedule import moments
from tests.models.tiny import DOCUMENT, SETTINGS, WINDOW, decoder
from tests.tiers import first

PUBLISHED = {  # docs/methods.md has the sources
    "h2o": ("block", 1),
    "tova": ("block", 1),
    "streaming": ("block", 1),
    "h2o+caote": ("block", 1),
    "tova+fast_caote": ("block", 1),
    "snapkv+caote": ("block", 1),
    "keydiff": ("block", 1),
    "key_norm": ("block", 1),
    "snapkv": ("prompt", 0),
    "snapkv@adakv": ("prompt", 0),
    "snapkv@pyramid": ("prompt", 0),
    "snapkv+critical": ("prompt", 0),
    "laprox@model": ("prompt", 0),
    "cake@cake": ("prompt", 0),
    "lava@lava": ("prompt", 0),
    "expected_attention": ("prompt", 0),
    "q_filters": ("block", 1),
    "curdkv": ("prompt", 0),
    "lagkv": ("prompt", 0),
    "finch": ("prompt", 0),
    "sage": ("prompt", 1),
    "kvzip+pool": ("prompt", 0),
}
USUAL = {
    "h2o+caote": 1,
    "tova": 1,
    "expected_attention": 1,
    "snapkv": 32,
    "snapkv(window=8)+caote@adakv": 8,
    "laprox(window=16)@model": 16,
    "lava": 32,
    "h2o@cake": 32,
    "h2o@cake(window=5)": 5,
}


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items(), ids=PUBLISHED)
def test_published_moments_are_those_of_the_paper(name, expected):
    assert moments(kvjax.parse(name), "published", None) == expected


def test_every_paper_of_a_base_score_says_when():
    silent = {name for name, make in LINKS.items() if make().base and make().published is None}
    assert silent == {"butler", "random"}, "TokenButler's paper evicts nothing, a random choice has none"
    assert all("arXiv" in make().published.source for make in LINKS.values() if make().published)


@pytest.mark.parametrize(("name", "every"), USUAL.items(), ids=USUAL)
def test_by_default_a_policy_waits_for_its_window(name, every):
    assert moments(kvjax.parse(name), "block", None) == ("block", every)


@pytest.mark.parametrize("when", ["block", "prompt", "published"])
def test_explicit_steps_win(when):
    assert moments(kvjax.parse("snapkv"), when, 3)[1] == 3


def test_where_no_paper_says_when_there_is_nothing_to_take():
    with pytest.raises(ValueError, match=r"no paper says when 'random' evicts; give when='block' or when='prompt'"):
        models.generate(decoder(), DOCUMENT, policy="random", budget=16, when="published")


@pytest.mark.parametrize(("policy", "when", "evict_every"), first(0, [
    ("snapkv(window=4)", "prompt", 0), ("h2o", "block", 1), ("laprox(window=4)@model", "prompt", 0),
]))  # fmt: skip
def test_published_is_these_moments(policy, when, evict_every):
    settings = dict(policy=policy, max_new_tokens=6, end=(), **SETTINGS)
    published = models.generate(decoder(), DOCUMENT, when="published", **settings)
    told = models.generate(decoder(), DOCUMENT, when=when, evict_every=evict_every, **settings)
    assert published.tokens.tolist() == told.tokens.tolist()
    assert published.cache.num_live.tolist() == told.cache.num_live.tolist()
    if evict_every == 0:
        assert published.cache.num_live.sum() == (16 + 5) * 4


def test_nobody_leaves_within_a_window_and_then_the_budget_holds():
    steps = models.stream(decoder(), DOCUMENT, policy=WINDOW, max_new_tokens=10, end=(), **SETTINGS)
    live = [int(np.asarray(cache.num_live).max()) for _, cache in steps]
    assert live == [16, 17, 18, 19, 16, 17, 18, 19, 16, 17]


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


@pytest.mark.matrix
@pytest.mark.parametrize("run", [models.prefill, models.generate])
def test_the_warning_names_the_line_that_asked(run):
    with pytest.warns(UserWarning) as caught:
        run(decoder(), DOCUMENT, policy="sage", **SETTINGS)
    assert caught[0].filename == __file__
