"""Progress on standard error: lines where it is no terminal, and a bar where it is."""

import io
import sys

from models.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_every_few_seconds_where_there_is_no_terminal(capsys):
    with Progress(every=0) as progress:
        progress.at("reading", 128, 1024, "token")
        progress.at("reading", 1024, 1024, "token")
    assert capsys.readouterr().err == "[reading: 128 of 1,024 tokens]\n[reading: 1,024 of 1,024 tokens]\n"
    with Progress(every=1e9) as seldom, Progress(every=0, quiet=True) as quiet:
        for progress in (seldom, quiet):
            progress.at("reading", 128, 1024, "token")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Progress(every=0) as progress:
        progress.at("reading", 512, 1024, "token")
        progress.at("answering", 1, 2, "token")
    assert "reading:  50%" in screen.getvalue() and "answering:  50%" in screen.getvalue()
    assert "[reading" not in screen.getvalue()
