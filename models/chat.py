"""The command line of `python -m models.chat`: a conversation of any length in a cache of one size.

Only what is new goes through the model in a turn, and together these are the tokens of the chat template over the whole
conversation. Where the template writes an answer in another way once it is past (without its thoughts, say), the cache
from before that answer's turn takes the turn again, as the template has it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import kvjax
import models
from kvjax.policy import policy_of
from models import commands, selecting
from models.cli import add_run_flags, run_settings
from models.layer_caches import AnyCache
from models.plan import kept_of

POLICY, BUDGET = "snapkv+caote", 1024
EXAMPLES = """examples:
  python -m models.chat smollm2 --policy snapkv+caote --budget 1024
  python -m models.chat path/to/Qwen3-0.6B --policy "h2o+protect(sinks=4,recent=0.5)" --budget 512 --temperature 0.7
  python -m models.chat smollm2 --load talk.cache

in the conversation:
  /keep FILE   write the conversation's cache into a file
  /load FILE   go on with the conversation of a file
  /new         forget all, and begin anew
  /help        say what there is
  /quit        leave, as Ctrl-D does; Ctrl-C ends an answer
"""
COMMANDS = "/keep FILE, /load FILE, /new, /help and /quit"
ANSWER = "kvjaxanswerstandshere"  # by which a template says what stands behind an answer


class Memory(NamedTuple):
    """Holds what is there of a talk; ``pending`` are tokens of an answer cut off that the cache has not met."""

    cache: AnyCache | None = None
    pending: tuple[int, ...] = ()


class Conversation:
    """A conversation with a model. A turn that fails or is given up leaves it as it was.

    Args:
        model: it answers.
        tokenizer: the model's. Without a chat template the model goes on from plain text.
        policy: what to keep, a policy or its short name; None or "full" keeps all.
        budget: tokens that each head keeps, where there is a policy.
        seed: for a temperature above 0.
        system: what the system's message says.
        settings: further arguments of :func:`models.stream`.

    Raises:
        ValueError: a policy, a budget or a setting that cannot be.

    Example:
        >>> import models
        >>> from models.chat import Conversation
        >>> talk = Conversation(*models.load("retriever"), policy="h2o", budget=64, block=32, max_new_tokens=4)
        >>> _ = list(talk.answer("The code of amber falcon is 4719. The river was calm."))
        >>> question = "Question: what is the code of amber falcon?\\nAnswer: the code of amber falcon is"
        >>> "".join(talk.answer(question))[:5]
        ' 4719'
    """

    now: Memory
    before: Memory  # the last turn
    turn: list[dict[str, str]]  # the last message and its answer, while before lacks them
    told: str  # that turn as it went through the model

    def __init__(
        self,
        model: models.Decoder,
        tokenizer: models.Tokenizer,
        *,
        policy: kvjax.Policy | str | None = None,
        budget: int | float | None = None,
        seed: int = 0,
        system: str | None = None,
        **settings: Any,
    ):
        self.model, self.tokenizer, self.key = model, tokenizer, jax.random.key(seed)
        self.policy, self.budget, self.settings = policy_of(policy), budget, settings
        self.projection = models.output_projection(model, policy)
        self.system = [] if system is None else [_message("system", system)]
        self.stopped = False
        self.forget()
        self._stream([0], None)  # says what cannot be; nothing runs yet

    def forget(self) -> None:
        """Begins anew."""
        self._go_on_from(Memory())

    @property
    def seen(self) -> int:
        """Tokens that have gone through the model."""
        return 0 if self.now.cache is None else int(self.now.cache.next_position[0])

    @property
    def held(self) -> int:
        """Tokens that the fullest head holds."""
        return 0 if self.now.cache is None else int(self.now.cache.num_live.max())

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return 0 if self.now.cache is None else self.now.cache.nbytes

    def answer(self, text: str) -> Iterator[str]:
        """Gives the answer to a message in pieces, one for each token as it comes; "" where it completes no text.

        Raises:
            ValueError: a message that the template or the model does not take.
            KeyboardInterrupt: it was stopped before the answer began.
        """
        self.stopped = False
        said = self._take(text)
        now, end, pieces, answer, last = self.now, self.model.config.eos, self.tokenizer.stream(), "", -1
        for last, cache in self._stream([*now.pending, *self._encode(said)], now.cache):
            now = Memory(cache, (last,))
            answer += (piece := "" if last in end else pieces.add(last))
            yield piece
            if self.stopped:
                break
        answer += (piece := pieces.finish())
        # A template ends an answer itself, so the end token is not fed; the last token of one cut off is.
        self.now = now._replace(pending=()) if last in end else now
        self.turn = [_message("user", text), _message("assistant", answer)]
        self.told = said + answer
        yield piece

    def stop(self) -> None:
        """Ends the answer that is being given behind its next token; it stays in the conversation."""
        self.stopped = True

    def keep(self, path: str | Path) -> None:
        """Writes the cache into a file, from which :meth:`load` goes on.

        Raises:
            ValueError: nothing to keep yet, or a file that holds something else.
        """
        if self.now.cache is None:
            raise ValueError("nothing has been said yet, so there is nothing to keep.")
        if Path(path).exists():
            try:
                kvjax.cache_info(path)
            except ValueError:
                raise ValueError(f"{path} is there and holds no conversation; name another file.") from None
        cache = self._feed(self.now) if self.now.pending else self.now.cache
        self.now = Memory(cache)
        kvjax.save_cache(path, models.stacked(cache), **self._made_with())

    def load(self, path: str | Path) -> None:
        """Goes on with the conversation of a file that :meth:`keep` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no conversation, a damaged one, or one with another model, policy or budget.
        """
        info = kvjax.cache_info(path)
        for name, ours in (self._made_with() | {"dtype": self.model.embedding[...].dtype.name}).items():
            theirs = info[name]
            if theirs != ours:
                which = "another model" if name == "model" else f"the {name} {theirs}, and this one has {ours}"
                raise ValueError(f"{path} is of a conversation with {which}; begin one that has what it has.")
        cache = kvjax.load_cache(path, policy=self.policy)
        kept_of(self.model, cache, self.policy, 1)
        self._go_on_from(Memory(cache))

    def _go_on_from(self, memory: Memory) -> None:
        """Takes a memory as it is: its last turn is not taken again."""
        self.before = self.now = memory
        self.turn, self.told = [], ""

    def _take(self, text: str) -> str:
        """Finds what is to be fed of a message, once what stands before it is as the template wants it."""
        if self.tokenizer.chat_template is None:
            begun = self.now.cache is not None
            self._go_on_from(self.now)
            return "\n" + text if begun else text
        message = _message("user", text)
        said = self._rendered(self.now, [message])
        if self.turn:
            whole = self._rendered(self.before, [*self.turn, message])
            if not whole.endswith(said):
                raise ValueError("the chat template writes each turn in its own way, so no cache goes on; begin /new.")
            settled = whole.removesuffix(said)
            again = settled != self.told
            self._go_on_from(Memory(self._feed(self.before, settled)) if again else self.now)
        return said

    def _rendered(self, memory: Memory, messages: list[dict[str, str]]) -> str:
        """Renders what the template makes of messages, behind those that the memory holds."""
        if memory.cache is None:
            return self.tokenizer.chat([*self.system, *messages])
        held = [_message("user", "?"), _message("assistant", ANSWER)]
        _, mark, behind = self.tokenizer.chat([*self.system, *held, *messages]).partition(ANSWER)
        if not mark:
            raise ValueError("the chat template leaves earlier answers out, so no cache goes on from one; begin /new.")
        return behind

    def _encode(self, text: str) -> list[int]:
        begins = self.tokenizer.chat_template is None and self.now.cache is None
        return self.tokenizer.encode(text, add_special_tokens=begins)

    def _feed(self, memory: Memory, text: str = "") -> AnyCache:
        """The cache behind what is pending and a text."""
        ((_, cache),) = self._stream([*memory.pending, *self._encode(text)], memory.cache, max_new_tokens=1)
        return cache

    def _stream(self, tokens: list[int], cache: AnyCache | None, **settings: Any) -> Iterator[tuple[int, AnyCache]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it advises to evict once, and a conversation has no end
            steps = models.stream(
                self.model,
                [tokens],
                cache=cache,
                policy=self.policy,
                budget=self.budget,
                key=jax.random.fold_in(self.key, self.seen),
                projection=self.projection,
                on_block=self._give_up,
                **self.settings | settings,
            )
        return ((int(token[0]), cache) for token, cache in steps)

    def _give_up(self, done: int, total: int) -> None:
        """Leaves a turn whose answer has not begun."""
        if self.stopped:
            raise KeyboardInterrupt

    def _made_with(self) -> dict[str, Any]:
        name = "full" if self.policy is None else self.policy.name
        return {"model": models.fingerprint(self.model), "policy": name, "budget": self.budget}


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the flags."""
    flags = commands.parser(
        "kvjax-chat", "models.chat", description="A chat in the terminal whose memory does not grow.", examples=EXAMPLES
    )
    flags.add_argument(
        "model", help="'smollm2', 'retriever' (inside the package), a Hugging Face folder, a GGUF file or a hub name"
    )
    flags.add_argument("--policy", help=f"what to keep; 'full' keeps all, and memory grows (default: {POLICY})")
    flags.add_argument("--budget", type=int, help=f"tokens that each head keeps (default: {BUDGET}; none for 'full')")
    flags.add_argument("--system", help="what the system's message says (default: what the chat template says)")
    flags.add_argument(
        "--load", metavar="FILE",
        help="go on with a conversation that /keep wrote, by its policy and budget (default: begin anew)",
    )  # fmt: skip
    add_run_flags(flags, max_new_tokens=512)
    commands.add_cache_flag(flags)
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = parser().parse_args(arguments)
    commands.keep_compiled(vars(flags).pop("compilation_cache"))
    return commands.run(lambda: _chat(flags), "models.chat")


def _chat(flags: argparse.Namespace) -> None:
    policy, budget = _checked(flags)  # before the weights are read
    model, tokenizer = models.load(flags.model, dtype=flags.dtype)
    if tokenizer is None:
        raise ValueError(f"{flags.model} has no tokenizer.json, and text needs one; copy it from the model's source.")
    if tokenizer.chat_template is None:
        if flags.system is not None:
            raise ValueError(f"{flags.model} has no chat template, so nothing says where a system's message stands.")
        _say("this model has no chat template: it goes on from your text as it stands.")
    talk = Conversation(
        model, tokenizer, policy=policy, budget=budget, seed=flags.seed, system=flags.system, **run_settings(flags)
    )
    if flags.load is not None:
        _command(talk, f"/load {flags.load}")
    shown = sys.stdin.isatty()
    if shown:
        with contextlib.suppress(ImportError):  # with it, input() has a history, and a pasted text is one message
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        _say(f"{COMMANDS}; Ctrl-C ends an answer.")
    while True:
        try:
            line = input("> " if shown else "")
            if line.strip() == "/quit":
                return
            if line.startswith("/"):
                _command(talk, line)
            elif line.strip():
                _turn(talk, line)
        except EOFError:
            return
        except BrokenPipeError:
            raise
        except UnicodeDecodeError:
            _say("error: this line is not UTF-8 text.")
        except (ValueError, OSError) as error:
            _say(f"error: {commands.sentence(error)}")
        except KeyboardInterrupt:
            if not shown:
                raise
            print(flush=True)
            _say("/quit or Ctrl-D leaves.")


def _checked(flags: argparse.Namespace) -> tuple[kvjax.Policy | None, int | float | None]:
    """The policy and the budget of the flags, or of the file to go on from, or the usual ones."""
    said: dict[str, Any] = {} if flags.load is None else kvjax.cache_info(flags.load)
    policy = policy_of(flags.policy if flags.policy is not None else said.get("policy") or POLICY)
    if policy is None:
        if flags.budget is not None:
            raise ValueError(f"'full' keeps all, but a budget of {flags.budget} was given; leave one of them out.")
        return None, None
    if selecting.asks_for_predictor(policy, None) is not None:
        raise ValueError(
            f"{policy.name!r} scores by a predictor, which remembers tokens beside the cache, so no later turn can go "
            f"on; take another policy, such as {POLICY}."
        )
    budget = flags.budget if flags.budget is not None else said.get("budget") or BUDGET
    if isinstance(budget, int):
        kvjax.check_budget(policy, budget)
    kvjax.check_block(policy, flags.block)
    return policy, budget


def _turn(talk: Conversation, text: str) -> None:
    """Prints an answer as it comes, and what the conversation takes then."""

    def stop(*_: Any) -> None:
        if talk.stopped:
            raise KeyboardInterrupt
        talk.stop()  # behind a whole step: one in flight has used the cache up

    times = []
    before = signal.signal(signal.SIGINT, stop)
    try:
        for piece in talk.answer(text):
            times.append(time.monotonic())
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        _say("given up; the conversation is as it was before this message.")
        return
    finally:
        signal.signal(signal.SIGINT, before)
    print(flush=True)
    *times, _ = times  # the last piece is no token, but what is left of the text
    rate = f" · {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
    _say(_status(talk) + rate)


def _command(talk: Conversation, line: str) -> None:
    name, _, rest = line.strip().partition(" ")
    path = os.path.expanduser(rest.strip())
    if name in ("/keep", "/load") and not path:
        raise ValueError(f"{name} needs the name of a file.")
    if name == "/keep":
        talk.keep(path)
        _say(f"kept in {path}: {_status(talk)}")
    elif name == "/load":
        talk.load(path)
        _say(f"{path}: {_status(talk)}")
    elif name == "/new":
        talk.forget()
        _say("begun anew.")
    elif name == "/help":
        _say(f"{COMMANDS}; Ctrl-C ends an answer.")
    else:
        raise ValueError(f"there is no {name[:60]}; there are {COMMANDS}. A space in front makes it a message.")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _status(talk: Conversation) -> str:
    return f"{talk.seen:,} tokens seen · {talk.held:,} held · {talk.nbytes / 2**20:.2f} MiB"


def _say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
