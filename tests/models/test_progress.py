"""Progress on standard error: lines where it is no terminal, and a bar where it is."""

import io
import sys

import numpy as np

import models
from models import progress
from models.progress import Progress, progress_bar
from tests.models import tiny
from tests.tiers import matrix


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_every_few_seconds_where_there_is_no_terminal(capsys):
    with Progress(every=0) as shown:
        shown.at("reading", 128, 1024, "token")
        shown.at("reading", 1024, 1024, "token")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("[reading: 128 of 1,024 tokens, ") and second.startswith(
        "[reading: 1,024 of 1,024 tokens, "
    )
    assert list(progress_bar("word", over=["one", "two"], every=0)) == ["one", "two"]
    assert "[2 of 2 words, " in capsys.readouterr().err
    assert list(progress_bar("word", over=iter(["one"]))) == ["one"]  # at once, and of unknown length
    with Progress(every=1e9) as seldom, Progress(every=0, quiet=True) as quiet:
        for shown in (seldom, quiet):
            shown.at("reading", 128, 1024, "token")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Progress(every=0) as shown:
        shown.at("reading", 512, 1024, "token")
        shown.at("answering", 1, 2, "token")
    assert "reading:  50%" in screen.getvalue() and "answering:  50%" in screen.getvalue()
    assert "[reading" not in screen.getvalue()


@matrix
def test_calls_in_python_say_how_far_they_are(capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0)
    model, made = tiny.decoder(), dict(policy="h2o+caote", **tiny.SETTINGS)
    quiet = models.generate(model, tiny.DOCUMENT, **made)
    assert capsys.readouterr().err == ""
    shown = models.generate(model, tiny.DOCUMENT, progress=True, **made)
    np.testing.assert_array_equal(quiet.tokens, shown.tokens)
    err = capsys.readouterr().err
    assert "[reading: " in err and f"[answering: 2 of {shown.tokens.shape[1]} tokens, " in err
    engine = models.Engine(model, rows=1, progress=True, **made)
    for prompt in tiny.DOCUMENT[:1], tiny.DOCUMENT[:1, :20]:
        engine.submit(prompt[0])
    assert [token.ended for token in engine.run()].count(True) == 2
    assert "[answering: 1 of 2 requests, " in capsys.readouterr().err
