"""Continuous batching: requests come and go, and each row of the batch always takes the same memory.

A request's prompt is fed alone, one block between two decode steps, so that no answer waits longer than a block. Its
cache then joins a free row of the batch (:func:`kvjax.join`). Each token is the one that :func:`models.generate` would
give to the request alone. There is one compiled program per kind of step, whatever comes and goes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jaxtyping import Array, Int

import kvjax
from kvjax._src.chains import policy_of
from kvjax._src.checks import check_count
from kvjax._src.split_cache import ModelCache
from kvjax.allocation import CAP
from kvjax.schedule import HostOrDevice, Phase, Text
from models import engine, hosts
from models.decoder import Decoder, check_decoder
from models.driver import Choice, Steps, check_finite, choice_of, feed_blocks, next_token
from models.options import EngineSettings, Options, RequestSettings, options_of
from models.plan import Rows
from models.planning import plan_run
from models.progress import Progress
from models.prompts import CheckedPrompt, check_prompt
from models.sampling import Draws, Sampling
from models.selecting import check_memory_is_kept
from models.states import settled
from models.steps import DecodeState, decode_phase


class NewToken(NamedTuple):
    """One token of an answer; ``ended`` marks the last one."""

    handle: int
    token: int
    ended: bool


@dataclasses.dataclass
class _Request:
    """A request: first waiting, then fed block by block, then in a row of the batch."""

    handle: int
    prompt: CheckedPrompt
    choice: Choice
    draws: Draws
    made: int = 0
    token: int = 0
    length: int = 0  # of the prompt
    budget: int = 0  # of a decode step; 0 without a policy
    unseen: list[int] = dataclasses.field(default_factory=list)  # what was fed since the last eviction


class Engine:
    """A batch of rows that requests share: a prompt joins a row when another ends, submitted before or during a run.

    Args:
        model: the model; on a mesh only with data=1, as prompts are fed one by one.
        rows: how many answers are made at once.
        options, settings: of all requests, see :class:`Options`; ``max_new_tokens``, ``end`` and how tokens are
            drawn are those of a request that gives no others, and no answer is longer.
        longest_prompt: the most tokens of a prompt, which sizes the rows without a policy or under a ratio; by default
            as many as the model's positions allow. A budget in slots needs no such limit.

    Raises:
        ValueError: for arguments that :func:`models.generate` refuses, or a policy that reads a network which
            remembers every token.

    Example:
        >>> import models
        >>> model = models.Decoder.tiny()
        >>> engine = models.Engine(model, rows=2, policy="tova", budget=16, block=8)
        >>> handles = [engine.submit(range(length)) for length in (40, 9, 21)]
        >>> answers = {handle: [] for handle in handles}
        >>> for made in engine.run():
        ...     answers[made.handle].append(made.token)
        >>> [len(answer) for answer in answers.values()]
        [64, 64, 64]
    """

    def __init__(
        self,
        model: Decoder,
        *,
        rows: int,
        longest_prompt: int | None = None,
        options: Options | None = None,
        **settings: Unpack[EngineSettings],
    ):
        check_decoder(model)
        self.model = model
        rows = check_count("rows", rows, 1, "the batch has at least 1 row")
        asked = options_of("Engine", EngineSettings, options, settings)
        most = asked.max_new_tokens
        longest = max(1, model.config.max_positions - most) if longest_prompt is None else longest_prompt
        longest = check_count("longest_prompt", longest, 1, "a prompt has at least 1 token")
        policy = policy_of(asked.policy)
        if policy is not None:
            check_memory_is_kept(policy, "'snapkv+caote'")
        self._options = dataclasses.replace(asked, policy=policy, reserve=most, reading_budget=None)
        # Any prompts of this size: the plan says how large the rows are.
        # A budget in slots has the same rows for all prompts, those of one that is longer than any head's share.
        least = int(CAP) * asked.budget + asked.block if isinstance(asked.budget, int) else 1
        prompt = CheckedPrompt(Text.of(np.zeros((rows, max(longest, least)), np.int32)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about these prompts
            run, sizes = plan_run(model, prompt, self._options)
        self._options = dataclasses.replace(self._options, networks=run.network)  # found once
        plan = run.plan
        if plan.mesh is not None and plan.mesh.shape["data"] > 1:
            raise ValueError("the model is on a mesh that splits rows, but prompts are fed one by one; use data=1.")
        if plan.policy is not None and not plan.policy.allocation.fills and plan.evict_every > 1:
            raise ValueError(
                f"{plan.policy.name!r} evicts below a threshold in all rows at once, every {plan.evict_every} steps, "
                "but requests join at different steps; give evict_every=1, or 0 for never."
            )
        # Only a cache of the whole prompt, in rows or before the eviction, needs to know how long prompts are.
        own, windows = self._options.budget, model.config.cached_windows
        fixed = isinstance(own, int) and sizes.slots > max(
            own if window is None else min(own, window) for window in windows
        )
        self._longest = None if fixed else longest
        # Prompts are fed in rows of their own, so no row of the batch ever holds a whole prompt.
        sizes = dataclasses.replace(sizes, prompt_slots=())
        if asked.projection is None:
            projection = engine.output_projection(model, plan.policy)
            self._options = dataclasses.replace(self._options, projection=projection)
            run = dataclasses.replace(run, projection=projection)
        self._steps = Steps.of(run, sizes)
        state = self._steps.start(rows)  # the rows that join have no more to remember than after their prompts
        self._state = dataclasses.replace(state, cache=settled(state.cache, plan))
        self._rows: list[_Request | None] = [None] * rows
        self._waiting: collections.deque[_Request] = collections.deque()
        self._entering: tuple[_Request, Any] | None = None
        # Tokens of the last step, where a loop over run() ended.
        self._unread: collections.deque[NewToken] = collections.deque()
        self._last_handle = -1

    def submit(
        self,
        tokens: Sequence[int] | Int[HostOrDevice, "T"],
        *,
        key: Array | None = None,
        **settings: Unpack[RequestSettings],
    ) -> int:
        """Queue a prompt, and return the handle by which its tokens come.

        Args:
            tokens: the prompt, one row.
            settings: of the answer, see :class:`Options`; by default those of the engine.
            key: draws the tokens where the temperature is above 0.

        Raises:
            ValueError: as :func:`models.generate`, or if the prompt or the answer is longer than the engine allows.
        """
        given = np.asarray(list(tokens))
        prompt = check_prompt(self.model, (given if given.size else given.astype(int))[None], None, None)
        allowed, own = self._options.max_new_tokens, options_of("submit", RequestSettings, self._options, settings)
        most, length = own.max_new_tokens, int(prompt.text.lengths[0])
        for what, count, limit in (("longest_prompt", length, self._longest), ("max_new_tokens", most, allowed)):
            if limit is not None and count > limit:
                raise ValueError(
                    f"the request has {what} {count}, but the engine's rows are for {limit}; make the engine with a "
                    f"larger {what}=."
                )
        choice, draws = choice_of(self.model, own, key, prompt)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when the prompt is fed
            plan_run(self.model, prompt, self._options)  # a prompt that cannot run is refused here
        self._last_handle += 1
        request = _Request(self._last_handle, prompt, choice, draws, length=length)
        self._waiting.append(request)
        return request.handle

    def cancel(self, handle: int) -> None:
        """Drop a request wherever it is; one that has ended, or that there never was, is ignored."""
        self._waiting = collections.deque(request for request in self._waiting if request.handle != handle)
        self._unread = collections.deque(made for made in self._unread if made.handle != handle)
        if self._entering is not None and self._entering[0].handle == handle:
            self._entering = None
        for row, request in enumerate(self._rows):
            if request is not None and request.handle == handle:
                self._leave(row)

    @property
    def cache(self) -> ModelCache:
        """Return the cache of all rows, valid until the next step.

        It lacks each row's newest token; :meth:`run` may not have yielded that token yet, but :meth:`step` returns it.
        """
        return self._state.cache

    @property
    def idle(self) -> bool:
        """Tell whether no request and no token is left."""
        return not (self._waiting or self._unread or self._entering is not None or any(self._rows))

    def run(self) -> Iterator[NewToken]:
        """Yield tokens as they come until no request is left; a loop that was left goes on with the next token.

        The option ``progress`` shows how many requests have ended.
        """
        ended = 0
        with Progress(quiet=not self._options.progress) as shown:
            while not self.idle:
                shown.at("answering", ended, ended + self._left, "request")
                if not self._unread:
                    self._unread.extend(self.step())
                if self._unread:
                    made = self._unread.popleft()
                    ended += made.ended
                    yield made

    @property
    def _left(self) -> int:
        """Return the number of requests whose last token is still to be yielded."""
        ended = sum(made.ended for made in self._unread)
        return len(self._waiting) + (self._entering is not None) + sum(map(bool, self._rows)) + ended

    def step(self) -> list[NewToken]:
        """Feed one block of the oldest waiting prompt if a row is free, and make one token in each row in use."""
        made = [*self._unread]
        self._unread.clear()
        made += self._feed()
        if any(self._rows):
            made += self._decode()
        return made

    def _feed(self) -> list[NewToken]:
        if self._entering is None and self._waiting and None in self._rows:
            request = self._waiting.popleft()
            self._entering = request, self._blocks(request)
        if self._entering is None:
            return []
        request, blocks = self._entering
        try:
            next(blocks)
            return []
        except StopIteration as end:
            self._entering = None
            state, hidden = end.value
        except BaseException:
            self._entering = None
            raise
        token, finite = self._chosen(request, hidden)
        check_finite(self.model, finite)
        made = self._note(request, token)
        if not made.ended:
            row = self._rows.index(None)
            self._state = dataclasses.replace(self._state, cache=_join(self._state.cache, np.int32(row), state.cache))
            self._rows[row] = request
        return [made]

    def _blocks(self, request: _Request) -> Generator[Any, None, tuple[DecodeState, Array]]:
        """Feed a request's prompt, one block per ``next``."""
        run, sizes, prompt = engine.prepare(self.model, request.prompt, self._options)
        if run.rows.decode_budgets is not None:
            request.budget = int(run.rows.decode_budgets[0])
        return (yield from feed_blocks(dataclasses.replace(self._steps, run=run, sizes=sizes), prompt))

    def _decode(self) -> list[NewToken]:
        """Feed each row's last token, and choose the next ones."""
        plan = self._steps.run.plan
        every, all_slots = plan.evict_every, self._state.cache.num_slots + 1
        tokens, position, lengths = (np.zeros(len(self._rows), np.int32) for _ in range(3))
        position[:] = -1
        budgets = np.full(len(self._rows), all_slots, np.int32)  # a row that is not due waits
        due = False
        for row, request in enumerate(self._rows):
            if request is not None:
                tokens[row], lengths[row] = request.token, request.length
                position[row] = request.length + request.made - 1
                request.unseen = [*request.unseen[1 - every :], request.token] if every > 1 else [request.token]
                if every and request.made % every == 0:
                    budgets[row], due = request.budget, True
        phase = decode_phase(plan, every) if due else Phase(evicts=False, compressed=True)
        numbers = Rows(*jax.device_put((lengths, *((budgets, budgets) if plan.policy is not None else ()))))
        steps = dataclasses.replace(self._steps, run=dataclasses.replace(self._steps.run, rows=numbers))
        hidden, self._state = steps.block(self._state, tokens[:, None], position[:, None], phase)
        if due and plan.repeats is not None:
            idle = budgets == all_slots
            rows = [np.zeros(every, np.int32) if request is None else request.unseen for request in self._rows]
            answers = np.array([np.resize(row, every) for row in rows])
            self._state = steps.repeated(self._state, answers, idle)
        greedy = hosts.fetched(next_token(self.model.config, self.model.ends(), hidden, Draws(), Sampling())[0])
        made = []
        for row, request in enumerate(self._rows):
            if request is None:
                continue
            token = int(greedy[row])
            if not request.choice.sampling.greedy:
                token, _ = self._chosen(request, hidden[row : row + 1])
            made.append(self._note(request, token))
            if made[-1].ended:
                self._leave(row)
        return made

    def _chosen(self, request: _Request, hidden: Array) -> tuple[int, Array]:
        """Choose a request's next token, and return whether its logits are finite."""
        model, sampling = self.model, request.choice.sampling
        chosen, request.draws, finite = next_token(model.config, model.ends(), hidden, request.draws, sampling)
        return int(hosts.fetched(chosen)[0]), finite

    def _note(self, request: _Request, token: int) -> NewToken:
        request.token, request.made = token, request.made + 1
        return NewToken(request.handle, token, token in request.choice.end or request.made == request.choice.most)

    def _leave(self, row: int) -> None:
        self._rows[row] = None
        self._state = dataclasses.replace(self._state, cache=_leave(self._state.cache, np.int32(row)))


@functools.partial(jax.jit, donate_argnames="cache")
def _join(cache: ModelCache, row: Int[Array, ""], one: ModelCache) -> ModelCache:
    return kvjax.join(cache, row, one)


_leave = jax.jit(kvjax.leave, donate_argnames="cache")
