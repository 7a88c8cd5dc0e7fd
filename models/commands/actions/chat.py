"""The command line of `python -m models.chat`: a conversation of any length in a cache of fixed size.

A turn feeds only its new tokens to the model; all turns together feed the tokens of the chat template over the whole
conversation. If the template renders an earlier answer differently (without its thoughts, for example), the turn of
that answer is fed again as rendered, to the cache from before it.
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
import numpy as np

import kvjax
import models
from kvjax._src.quantise import check_dtypes
from kvjax._src.split_cache import ModelCache
from kvjax.schedule import power_of_two
from models import commands, hosts
from models.asking import automatic, checked, is_automatic
from models.commands.shared_flags import run_settings, with_template_values
from models.commands.terminal import REPEATED, Screen, policy_in_words, sizes_in_words
from models.loading import published_sampling
from models.networks import load_networks, wanted_by
from models.prompts import kept_of
from models.sampling import Draws, Repetition, Sampling
from models.sizing import checked_budget, full_cache_bytes
from models.states import without_room

POLICY, BUDGET = "window", 1024  # or AUTO's
GATE = "gate@model(normalise=False,cap=8)"  # with a cap, as a conversation has no end
COMMANDS = "/save FILE, /load FILE, /forget, /memory, /help and /quit"
ANSWER = "kvjaxanswerstandshere"  # a placeholder that shows what a template puts after an answer


class Memory(NamedTuple):
    """The state of a conversation.

    ``pending`` are tokens of its last answer that the cache has not seen, ``seen`` the distinct ones of its whole text.
    """

    cache: ModelCache | None = None
    pending: tuple[int, ...] = ()
    seen: frozenset[int] = frozenset()


class Conversation:
    """A conversation with a model. A turn that fails or is stopped before its answer leaves it as it was.

    Args:
        model, tokenizer: see :func:`models.load`. Without a chat template the model continues plain text.
        policy, budget, settings: see :func:`models.stream`.
        seed: the random seed for a temperature above 0.
        system: the text of the system message.
        may_repeat: whether an answer goes on that says the same three times or more; by default it is ended there.

    Example:
        >>> import models
        >>> from models.commands.actions.chat import Conversation
        >>> talk = Conversation(
        ...     *models.load("retriever"), policy="tova", budget=64, block=32,
        ...     max_new_tokens=4
        ... )
        >>> said = "The code of amber falcon is 4719. The river was calm.\\n"
        >>> said += "Question: what is the code of amber falcon?\\n"
        >>> said += "Answer: the code of amber falcon is"
        >>> "".join(talk.answer(said))[:5]
        ' 4719'
    """

    now: Memory
    before: Memory  # as of before the last turn
    turn: list[dict[str, str]]  # the last message and its answer, which ``before`` lacks
    told: str  # that turn as it was fed to the model
    repeated: bool  # whether the last answer was ended because it repeated itself
    peak_nbytes: int  # the size of the largest cache so far; that of the turn before is kept, too

    def __init__(
        self,
        model: models.Decoder,
        tokenizer: models.Tokenizer,
        *,
        policy: kvjax.Policy | str | None = None,
        budget: int | float | None = None,
        seed: int = 0,
        system: str | None = None,
        may_repeat: bool = False,
        **settings: Any,
    ):
        self.model, self.tokenizer, self.key = model, tokenizer, jax.random.key(seed)
        self.policy, self.budget, self.settings = models.with_repeat_prompt(policy, tokenizer), budget, settings
        self.projection = models.output_projection(model, policy)
        self.system = [] if system is None else [_message("system", system)]
        self.may_repeat, self.stopped, self.repeated = may_repeat, False, False
        self.forget()
        self._stream(Memory(), [0])  # checks the arguments; nothing runs yet

    def forget(self) -> None:
        """Start a new conversation."""
        self.peak_nbytes = 0
        self._go_on_from(Memory())

    @property
    def seen(self) -> int:
        """Return the number of tokens that have been fed to the model."""
        return 0 if self.now.cache is None else int(self.now.cache.next_position[0])

    @property
    def held(self) -> int:
        """Return the number of tokens in the fullest head."""
        return 0 if self.now.cache is None else int(hosts.fetched(self.now.cache.num_live).max())

    @property
    def nbytes(self) -> int:
        """Return the size of the cache in bytes."""
        return 0 if self.now.cache is None else self.now.cache.nbytes

    @property
    def full_nbytes(self) -> int:
        """Return the size of a cache that holds all tokens of the conversation, in bytes."""
        return full_cache_bytes(self.model, self.seen, self.settings.get("cache_dtype"))

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer to a message in pieces, one per token as it comes; "" where it completes no text.

        The turn is part of the conversation once the last piece has come. A loop that is left before leaves the
        conversation as it was; :meth:`stop` ends an answer that stays.

        Raises:
            ValueError: the template or the model rejects the message.
            KeyboardInterrupt: :meth:`stop` was called before the answer began.
        """
        self.stopped = self.repeated = False
        said, again = self._take(text), Repetition()
        now, end, pieces, answer, last = self.now, self.model.config.eos, self.tokenizer.stream(), "", -1
        fed = self._encode(now, said)
        seen = set(now.seen.union(fed))
        for last, cache in self._stream(now, fed):
            seen.update(() if last in end else (last,))
            now = now._replace(cache=cache, pending=(last,))
            answer += (piece := "" if last in end else pieces.add(last))
            yield piece
            self.repeated = not self.may_repeat and again.add(last)
            if self.stopped or self.repeated:
                break
        answer += (piece := pieces.finish())
        # The template itself ends an answer, so the end token is not fed; the last token of a stopped answer is.
        now = now._replace(cache=_at_rest(now.cache), seen=frozenset(seen))
        self.now = now._replace(pending=()) if last in end else now
        self.turn = [_message("user", text), _message("assistant", answer)]
        self.told = said + answer
        yield piece

    def stop(self) -> None:
        """End the current answer after its next token; it stays in the conversation."""
        self.stopped = True

    def keep(self, path: str | Path) -> None:
        """Write the cache into a file, from which :meth:`load` continues; the conversation goes on as if it had not."""
        if self.now.cache is None:
            raise ValueError("nothing has been said yet; send a message before /save.")
        if Path(path).exists():
            try:
                kvjax.cache_info(path)
            except ValueError:
                raise ValueError(f"{path} exists and is not a conversation; name another file.") from None
        # Fed here, the pending tokens would be a block of their own, from which the policy evicts.
        tokens: Any = dict(pending=self.now.pending, seen=sorted(self.now.seen))
        kvjax.save_cache(path, self.now.cache, **tokens, **self._made_with())

    def load(self, path: str | Path) -> None:
        """Continue the conversation of a file that :meth:`keep` wrote, with the same model, policy and budget."""
        info = kvjax.cache_info(path)
        dtype = self.settings.get("cache_dtype") or self.model.embedding[...].dtype.name
        for name, ours in (self._made_with() | {"dtype": str(check_dtypes(dtype))}).items():
            theirs = info[name]
            if theirs != ours:
                which = "another model" if name == "model" else f"the {name} {theirs}, and this one has {ours}"
                raise ValueError(f"{path} is of a conversation with {which}; start one with the same settings.")
        cache: Any = kvjax.load_cache(path, policy=self.policy)
        kept_of(self.model, cache, self.policy, 1)
        if not info["seen"] and self.settings.get("repetition_penalty") not in (None, 1):
            raise ValueError(f"{path} does not say which tokens were said, which a repetition penalty needs; use 1.")
        self._go_on_from(Memory(cache, tuple(info["pending"]), frozenset(info["seen"])))

    def _go_on_from(self, memory: Memory) -> None:
        """Continue from a memory; its last turn is never fed again."""
        self.before = self.now = memory
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self.turn, self.told = [], ""

    def _take(self, text: str) -> str:
        """Return the text to feed for a message, after making the cache agree with the template so far."""
        if self.tokenizer.chat_template is None:
            begun = self.now.cache is not None
            self._go_on_from(self.now)
            return "\n" + text if begun else text
        message = _message("user", text)
        said = self._rendered(self.now, [message])
        if self.turn:
            whole = self._rendered(self.before, [*self.turn, message])
            if not whole.endswith(said):
                raise ValueError("the chat template renders each turn differently; use /forget.")
            settled = whole.removesuffix(said)
            again = settled != self.told
            self._go_on_from(self._fed_again(settled) if again else self.now)
        return said

    def _rendered(self, memory: Memory, messages: list[dict[str, str]]) -> str:
        """Render messages by the template, as they follow those in the memory."""
        if memory.cache is None:
            return self.tokenizer.chat([*self.system, *messages])
        held = [_message("user", "?"), _message("assistant", ANSWER)]
        _, mark, behind = self.tokenizer.chat([*self.system, *held, *messages]).partition(ANSWER)
        if not mark:
            raise ValueError("the chat template leaves earlier answers out, so no cache can continue; use /forget.")
        return behind

    def _encode(self, memory: Memory, text: str) -> list[int]:
        """Return the tokens of a text that follows what is in the memory."""
        if memory.cache is None:
            return self.tokenizer.encode(text, add_special_tokens=self.tokenizer.chat_template is None)
        return self.tokenizer.continuation(text, *memory.pending[-1:])

    def _fed_again(self, text: str) -> Memory:
        """Return the memory from before the last turn after that turn's text, as it is rendered now."""
        fed = self._encode(self.before, text)
        ((_, cache),) = self._stream(self.before, fed, max_new_tokens=1)
        return Memory(cache, (), self.before.seen.union(fed))

    def _stream(self, memory: Memory, tokens: list[int], **settings: Any) -> Iterator[tuple[int, ModelCache]]:
        seen = np.isin(np.arange(self.model.config.vocab_size), list(memory.seen))
        with warnings.catch_warnings():
            # It advises to evict once, but a conversation has no end.
            warnings.filterwarnings("ignore", ".*made to choose once")
            steps = models.stream(
                self.model,
                [[*memory.pending, *tokens]],
                cache=memory.cache,
                policy=self.policy,
                budget=self.budget,
                key=Draws(jax.random.fold_in(self.key, self.seen), seen[None]),
                projection=self.projection,
                on_block=self._note,
                **self.settings | settings,
            )
        return self._measured(steps)

    def _measured(self, steps: Iterator[tuple[Any, ModelCache]]) -> Iterator[tuple[int, ModelCache]]:
        for token, cache in steps:
            self._measure(cache)
            yield int(token[0]), cache

    def _measure(self, cache: ModelCache) -> None:
        self.peak_nbytes = max(self.peak_nbytes, cache.nbytes)

    def _note(self, done: int, total: int, cache: ModelCache) -> None:
        """Measure the cache, and abort a turn that was stopped before its answer began."""
        self._measure(cache)
        if self.stopped:
            raise KeyboardInterrupt

    def _made_with(self) -> dict[str, Any]:
        name = "full" if self.policy is None else self.policy.name
        return {"model": models.fingerprint(self.model), "policy": name, "budget": self.budget}


def command(flags: argparse.Namespace) -> None:
    policy, budget = _checked(flags)  # before the weights are read
    sampling = _sampling(flags)
    model, tokenizer = models.load(flags.model, dtype=flags.dtype)
    if is_automatic(flags.policy) and flags.load is None:
        policy = kvjax.parse(automatic(model, None, POLICY, GATE, flags.model))
        budget = checked_budget(policy, budget, flags.block)
    networks = load_networks(None, flags.model, model, [wanted_by(policy)], dtype=flags.dtype)
    tokenizer = with_template_values(flags, commands.check_tokenizer(flags.model, tokenizer))
    screen = Screen()
    if tokenizer.chat_template is None:
        if flags.system is not None:
            raise ValueError(f"{flags.model} has no chat template, so it takes no system message; leave --system out.")
        screen.say("this model has no chat template: it continues your text as it is.")
    talk = Conversation(
        model, tokenizer, policy=policy, budget=budget, seed=flags.seed, system=flags.system,
        may_repeat=flags.may_repeat, networks=networks or None, **run_settings(flags) | sampling._asdict(),
    )  # fmt: skip
    screen.say(f"{flags.model} · {policy_in_words(policy, budget)} · {_sampling_in_words(sampling)}")
    if flags.load is not None:
        _command(talk, f"/load {flags.load}", screen)
    shown = sys.stdin.isatty()
    if shown:
        with contextlib.suppress(ImportError):  # readline gives input() a history, and makes a pasted text one message
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        screen.say(f"{COMMANDS}; Ctrl-C ends an answer.")
    with screen.compiling():
        while _next(talk, screen, shown):
            pass


def _next(talk: Conversation, screen: Screen, shown: bool) -> bool:
    """Answer one line of the user, and tell whether there may be another."""
    try:
        line = input("> " if shown else "")
        if line.strip() == "/quit":
            return False
        if line.startswith("/"):
            _command(talk, line, screen)
        elif line.strip():
            _turn(talk, line, screen)
    except EOFError:
        return False
    except BrokenPipeError:
        raise
    except UnicodeDecodeError:
        screen.say("error: this line is not UTF-8 text.")
    except (ValueError, OSError) as error:
        screen.say(f"error: {commands.sentence(error)}")
    except KeyboardInterrupt:
        if not shown:
            raise
        print(flush=True)
        screen.say("/quit or Ctrl-D leaves.")
    return True


def _sampling(flags: argparse.Namespace) -> Sampling:
    """Return the sampling of the flags; where they name no temperature, that of the model's authors."""
    given = {name: getattr(flags, name) for name in Sampling._fields if getattr(flags, name) is not None}
    if flags.temperature is not None:
        return Sampling.of(**given)
    return Sampling.of(**published_sampling(flags.model)._asdict() | given)


def _sampling_in_words(sampling: Sampling) -> str:
    drawn = sampling.temperature is not None
    said = sampling if drawn else Sampling(repetition_penalty=sampling.repetition_penalty)
    words = [f"{name} {value:g}" for name, value in said._asdict().items() if value is not None]
    return ", ".join(words if drawn else ["the most likely tokens", *words])


def _checked(flags: argparse.Namespace) -> tuple[kvjax.Policy | None, int | float | None]:
    """Return the policy and the budget of the flags, else of the file to load, else the default ones."""
    said: dict[str, Any] = {} if flags.load is None else kvjax.cache_info(flags.load)
    policy = said.get("policy") if is_automatic(flags.policy) else flags.policy
    budget = said.get("budget") if flags.budget is None else flags.budget
    return checked(policy, budget, flags.block, (POLICY, BUDGET))


def _turn(talk: Conversation, text: str, screen: Screen) -> None:
    """Print an answer as it comes, then the size of the conversation."""

    def stop(*_: Any) -> None:
        if talk.stopped:
            raise KeyboardInterrupt
        talk.stop()  # after a whole step: a step in progress has already donated the cache

    times = []
    before = signal.signal(signal.SIGINT, stop)
    try:
        for piece in talk.answer(text):
            times.append(time.monotonic())
            screen.write(piece)
    except KeyboardInterrupt:
        screen.say("stopped; the conversation is as it was before this message.")
        return
    finally:
        signal.signal(signal.SIGINT, before)
    screen.end()
    if talk.repeated:
        screen.say(REPEATED)
    *times, _ = times  # the last piece is not a token, but the rest of the text
    rate = f" · {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
    screen.say(_status(talk) + rate)


def _command(talk: Conversation, line: str, screen: Screen) -> None:
    name, _, rest = line.strip().partition(" ")
    path = os.path.expanduser(rest.strip())
    if name in ("/save", "/load") and not path:
        raise ValueError(f"{name} needs the name of a file, such as talk.cache.")
    if name == "/save":
        talk.keep(path)
        screen.say(f"saved in {path}: {_status(talk)}")
    elif name == "/load":
        talk.load(path)
        screen.say(f"{path}: {_status(talk)}")
    elif name == "/forget":
        talk.forget()
        screen.say("forgotten; this is a new conversation.")
    elif name == "/memory":
        screen.say(f"{policy_in_words(talk.policy, talk.budget)} · {_status(talk)}")
    elif name == "/help":
        screen.say(f"{COMMANDS}; Ctrl-C ends an answer.")
    else:
        raise ValueError(f"unknown command {name[:60]}; expected {COMMANDS}. A space in front sends it as a message.")


def _at_rest(cache: Any) -> Any:
    """Return a cache without the room for an answer where that is most of it, as it is after a few words."""
    small = without_room(cache, power_of_two)  # few sizes, as each is compiled
    return small if 2 * small.nbytes < cache.nbytes else cache


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _status(talk: Conversation) -> str:
    if talk.now.cache is None:
        return "nothing seen yet"
    sizes = sizes_in_words(talk.nbytes, talk.full_nbytes, talk.peak_nbytes)
    return f"{talk.seen:,} tokens seen · {talk.held:,} held · {sizes}"
