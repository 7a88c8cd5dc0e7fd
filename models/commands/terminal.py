"""Shows answers in a terminal: words unbroken at line ends, and notes that go away.

Where the output is no terminal, text is written as it comes, and there are no notes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator

import jax

from kvjax import Policy

REPEATED = "ended, as the answer repeated itself; --may-repeat lets it go on."
LOWERED, COMPILED = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"


class Screen:
    """Writes answers to standard output, and notes and figures to standard error."""

    def __init__(self) -> None:
        self.width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self.column = 0
        self.word = self.gap = ""  # the last word, and the blanks before it
        self.notes, self.noted = sys.stderr.isatty(), False

    def write(self, piece: str) -> None:
        """Write a piece of an answer; the last word, which may not be whole, waits for the next piece."""
        if piece:
            self.clear()
        if self.width is None:
            print(piece, end="", flush=True)
            return
        for part in re.findall(r"\s|\S+", piece):
            if not part.isspace():
                self.word += part
                if any(_columns(character) > 1 for character in part):  # scripts that put no spaces between words
                    self._put_word()
                continue
            self._put_word()
            if part == "\n":
                self._break()
            else:
                self.gap += part
        sys.stdout.flush()

    def end(self) -> None:
        """End an answer, and its line."""
        self._put_word()
        self._break()
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Print a line of figures in brackets, on standard error."""
        self.clear()
        if self.column or self.word:
            self.end()
        print(f"[{text}]", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show a note until something else is written, unless a line of an answer has begun."""
        if self.notes and not self.column:
            text = f"[{text}]"[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self.noted = True

    def clear(self) -> None:
        """Take the note away."""
        if self.noted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.noted = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Note "compiling ..." while JAX compiles, or reads a compiled program."""

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event == LOWERED:
                self.note("compiling ...")
            elif event == COMPILED:
                self.clear()

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
            self.clear()

    def _put_word(self) -> None:
        if not self.word:
            return
        columns = sum(map(_columns, self.gap + self.word))
        if self.width is not None and self.column and self.column + columns > self.width:
            self._break()
        print(self.gap + self.word, end="")
        self.column += sum(map(_columns, self.gap + self.word))
        self.word = self.gap = ""

    def _break(self) -> None:
        print()
        self.column, self.gap = 0, ""


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def sizes_in_words(held: int, full: int, peak: int) -> str:
    """Return the bytes of a cache, of a full one, and of the largest that there was, as commands print them."""
    now, whole, most = (f"{size / 2**20:.{1 if full >= 10 * 2**20 else 2}f}" for size in (held, full, peak))
    said = f"{now} of {whole} MiB ({held / full:.0%})" if held <= full else f"{now} MiB ({whole} would hold all tokens)"
    return f"{said}, peak {most}"


def policy_in_words(policy: Policy | str | None, budget: int | float | None) -> str:
    """Return a policy and its budget, as commands print them."""
    many = (
        f"{budget:.0%} of the tokens" if isinstance(budget, float) else f"{budget:,} tokens per head" if budget else ""
    )
    name = "full" if policy is None else str(policy if isinstance(policy, str) else policy.name)
    return f"{name}, keeps {many or 'all tokens'}"
