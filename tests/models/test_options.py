"""Settings as one value, or as keyword arguments."""

import dataclasses
from typing import get_type_hints

import numpy as np
import pytest

import models
from models.options import AnswerSettings, AskSettings, EngineSettings, Options, PromptSettings
from tests.models import tiny
from tests.models.tiny import decoder

GIVEN = dict(policy=tiny.WINDOW, **tiny.SETTINGS)


def test_the_keyword_arguments_are_the_fields():
    fields = get_type_hints(Options)
    taken = [get_type_hints(settings) for settings in (PromptSettings, AnswerSettings, AskSettings, EngineSettings)]
    assert dict.fromkeys(name for settings in taken for name in settings).keys() == fields.keys()
    assert all(fields[name] == kind for settings in taken for name, kind in settings.items())


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


def test_each_function_takes_its_own_settings():
    for call, wrong in {
        "prefill": lambda: models.prefill(decoder(), tiny.TOKENS, max_new_tokens=3),
        "generate": lambda: models.generate(decoder(), tiny.TOKENS, reserve=3),
        "stream": lambda: models.stream(decoder(), tiny.TOKENS, polciy="h2o"),
        "Engine": lambda: models.Engine(decoder(), rows=1, select="oracle"),
        "submit": lambda: models.Engine(decoder(), rows=1).submit([1], budget=3),
        "prefill_each": lambda: models.prefill_each(decoder(), tiny.TOKENS, policies=["h2o"], policy="h2o"),
    }.items():
        with pytest.raises(TypeError, match=rf"^{call}\(\) takes no argument '\w+'\."):
            wrong()
    with pytest.raises(TypeError, match="Did you mean 'policy'"):
        models.stream(decoder(), tiny.TOKENS, polciy="h2o")
    with pytest.raises(TypeError, match=r"options is a dict; expected a models\.Options"):
        models.generate(decoder(), tiny.TOKENS, options={"policy": "h2o"})
    with pytest.raises(ValueError, match=r"but prefill\(\) makes no selection"):
        models.prefill(decoder(), tiny.TOKENS, options=Options(select="oracle", budget=4))
