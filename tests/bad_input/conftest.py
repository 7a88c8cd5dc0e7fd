"""A terminal, and the embedded model read once for all commands."""

import functools
from collections.abc import Callable, Iterator

import pytest

import models
from models import commands
from tests.bad_input.campaign import Terminal


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    raised: list[BaseException] = []
    sentence = commands.sentence

    def keeping(error: BaseException) -> str:
        raised.append(error)
        return sentence(error)

    monkeypatch.setattr(commands, "sentence", keeping)
    monkeypatch.setattr(models, "load", lambda path, **given: _of(path)(path, **given))
    yield Terminal(capsys, raised)


def _of(path: object) -> Callable[..., tuple[models.Decoder, models.Tokenizer | None]]:
    return _once if path == "retriever" else _load


_load = models.load
_once = functools.cache(_load)
