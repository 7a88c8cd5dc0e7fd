"""A terminal, and the embedded model read once for all commands."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import models
from models import commands
from tests.bad_input.campaign import Terminal


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    raised: list[BaseException] = []
    sentence, load = commands.sentence, models.load

    def keeping(error: BaseException) -> str:
        raised.append(error)
        return sentence(error)

    monkeypatch.setattr(commands, "sentence", keeping)
    monkeypatch.setattr(
        models, "load", lambda path, **given: _retriever() if (path, *given.values()) in PLAIN else load(path, **given)
    )
    yield Terminal(capsys, raised)


PLAIN = {("retriever",), ("retriever", None), ("retriever", None, None), ("retriever", "float32", None)}


@functools.cache
def _retriever() -> tuple[models.Decoder, models.Tokenizer | None]:
    return _load("retriever")


_load = models.load
