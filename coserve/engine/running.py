"""The requests in the batch: the deadlines of their next tokens, and what their next step computes. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from coserve.link import RequestFailed, Tokens
from coserve.queues.policy import Due, Waiting
from coserve.queues.shapes import StepKind, StepShape, prompt_pairs
from coserve.queues.sliding import SlidingQuantile
from coserve.types import SamplingParams, Slo

ANSWERS = 64
"""How many of the last answers, about, the mean length is of."""
FIRSTS, FIRST_IN_TIME, FEW_FIRSTS = 256, 0.95, 20
"""So many of the latest steps with first tokens say how long one takes: this share of them does not exceed it. Of fewer than the last number nothing is known, as the
first ones may have loaded kernels."""
MOST, FEW = 0.9, 10
"""What is expected of an answer or a long prompt is not exceeded by this share of the last ones; of fewer than the last number nothing is known."""
CREDIT = 0.5
"""Targets between tokens by which one that came early lets the next ones come later."""


@dataclass
class _Target:
    """When a request's next token is due, and what is to be computed for it."""

    tpot: float
    """Seconds between tokens that the request asks for."""
    due: float
    context: int
    """Tokens of its prompt, and of its answer so far."""
    prefill: int
    """Those of the prompt that are to be computed; before a step computes some, as far as is known: others may be in the prefix cache."""
    adapter: Hashable
    end: float
    """When its last token is due."""
    left: int
    """Most tokens that it may still have."""
    window: float
    """Seconds from which `due` counted."""
    e2e: float
    joined: float
    """When it joined the batch."""
    passed: bool = False
    """A step was launched that did not schedule it: pages were missing, or prompts before it filled the step."""
    first_token: float = 0.0
    """When it came."""
    started: bool = False
    """It has been scheduled, and `Admitted` was sent."""
    decodes: bool = False
    """It has had its first token."""
    came: float = 0.0
    """When its last token came."""
    had: int = 0
    """Tokens of its answer so far."""


class _Seen(NamedTuple):
    """What a decision reads, until a request or a deadline changes."""

    dues: tuple[Due, ...]
    collected: tuple[Due, ...]
    """As `dues`, but without the deadlines of next tokens, which a step in flight has computed."""
    next_tokens: tuple[Due, ...]
    """Those, the first for each window."""
    launched: tuple[float, ...]
    """Times between tokens of requests whose first token a step in flight computes."""


class RunningRequests:
    """Requests that the generator has and that have not ended. Times are seconds on the caller's clock."""

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens`: maximum number of tokens of a generation step."""
        self._step_tokens = step_tokens
        self._targets: dict[str, _Target] = {}
        self._prefilling: dict[str, _Target] = {}
        """Those without a first token, in the order in which they are computed."""
        self._context = 0
        """Tokens of the others."""
        self._adapters: dict[Hashable, tuple[int, int]] = {}
        """How many requests use each adapter, and its bytes."""
        self._adapter_bytes = 0
        self._seen: _Seen | None = None
        self._firsts = SlidingQuantile(FIRSTS)
        """Seconds from joining the batch to the first token, of prompts that one step can compute: the longest that ended with each step."""
        self._uncached = SlidingQuantile(ANSWERS)
        """Shares of the last prompts of several steps that were computed, as others of their tokens were in the prefix cache."""
        self._token_seconds = SlidingQuantile(ANSWERS)
        """Mean seconds between tokens of the last answers."""
        self._answers, self._mean_decodes = 0, 0.0
        """How many answers the mean is of, and the mean of their decode steps."""

    def __len__(self) -> int:
        return len(self._targets)

    def add(
        self, id: str, slo: Slo, *, now: float, deadline: float, prompt: int, end: float = math.inf, tokens: int = 1,
        adapter: Hashable = None, adapter_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`deadline` of its first token; `prompt`: its tokens; `end`: deadline of its last token; `tokens`: most that it has."""
        target = _Target(slo.tpot, deadline, prompt, prompt, adapter, end, tokens, slo.ttft, slo.e2e or 0.0, now)
        self._targets[id] = self._prefilling[id] = target
        if adapter is not None:
            users, _ = self._adapters.get(adapter, (0, 0))
            self._adapter_bytes += 0 if users else adapter_bytes
            self._adapters[adapter] = users + 1, adapter_bytes
        self._seen = None

    def remove(self, id: str) -> bool:
        """False if it is not running."""
        self._seen = None
        target = self._targets.pop(id, None)
        if target is None:
            return False
        self._prefilling.pop(id, None)
        if target.decodes:
            self._context -= target.context
        if target.adapter is not None:
            users, size = self._adapters[target.adapter]
            self._adapters[target.adapter] = users - 1, size
            if users == 1:
                del self._adapters[target.adapter]
                self._adapter_bytes -= size
        return True

    def computed(self, left: Mapping[str, int]) -> None:
        """A step was launched that computes something of these requests' prompts; `left`: tokens of each that are to be computed after it."""
        for id, tokens in left.items():
            if (target := self._prefilling.get(id)) is not None:
                if target.prefill == target.context > self._step_tokens:  # its first step
                    computed = min(target.context - tokens, self._step_tokens)
                    self._uncached.add((tokens + computed) / target.context)
                target.prefill = tokens
                self._seen = None

    def passed_over(self, id: str) -> bool:
        """It is in the batch, and the steps launched since it joined had no pages or no room for it."""
        target = self._targets.get(id)
        return target is not None and target.passed and not target.started

    def start(self, ids: Sequence[str]) -> list[str]:
        """These were scheduled for the first time, by a step that was launched. Returns those that are still running."""
        running = [id for id in ids if id in self._targets]
        for id in running:
            self._targets[id].started = True
        for target in self._prefilling.values():
            target.passed = target.passed or not target.started
        return running

    def expected_decodes(self, sampling: SamplingParams) -> float:
        """Steps from the first to the last token of an answer: as many as it may have where no end token ends it, else as many as answers so far had."""
        most = max(0, sampling.max_tokens - 1)
        return most if sampling.ignore_eos else min(most, max(sampling.min_tokens - 1.0, self._mean_decodes))

    def most_decodes(self, places: int) -> float:
        """Most tokens until so many requests have ended; infinite where fewer run."""
        if places > len(self._targets):
            return math.inf
        return nsmallest(places, (target.left for target in self._targets.values()))[-1]

    @property
    def first_token_seconds(self) -> float:
        """Seconds from joining the batch to the first token of a prompt that one step can compute: 95% of the latest steps took no longer; 0: not known."""
        return self._firsts.at(FIRST_IN_TIME, few=FEW_FIRSTS)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts in the batch that are still to be computed, as far as is known."""
        return sum(target.prefill for target in self._prefilling.values())

    @property
    def uncached_share(self) -> float:
        """Share of the tokens of a prompt of several steps that the prefix cache does not have: 90% of the last such prompts had no more; 1: not known."""
        return self._uncached.at(MOST, few=FEW, unknown=1.0)

    @property
    def token_seconds(self) -> float:
        """Mean seconds between tokens of an answer, steps with prompts of others included: 90% of the last answers had no more; 0: not known."""
        return self._token_seconds.at(MOST, few=FEW)

    @property
    def started(self) -> int:
        """How many have been scheduled."""
        return sum(target.started for target in self._targets.values())

    def accept(self, messages: Sequence[Tokens | RequestFailed], now: float) -> list[Tokens | RequestFailed]:
        """Update the deadlines from a step's results. Returns the results of requests that were not cancelled meanwhile."""
        wanted: list[Tokens | RequestFailed] = []
        if messages:
            self._seen = None
        self._see_first_tokens(messages, now)
        for message in messages:
            target = self._targets.get(message.id)
            if target is None:
                continue
            if isinstance(message, RequestFailed) or message.finished is not None:
                if isinstance(message, Tokens):
                    self._answered(target, target.had + len(message.tokens), now)
                self.remove(message.id)
            elif message.tokens:  # chunks of prompt scores have none
                count = len(message.tokens)
                target.due = _next(target.due if target.decodes else now, now, target.tpot)
                target.window, target.came = target.tpot, now
                target.left -= count
                target.had += count
                target.context += count
                if target.decodes:
                    self._context += count
                else:
                    target.decodes, target.first_token = True, now
                    self._context += target.context
                    del self._prefilling[message.id]
            wanted.append(message)
        return wanted

    def _see_first_tokens(self, messages: Sequence[Tokens | RequestFailed], now: float) -> None:
        """One sample for all of a step: they are late together."""
        longest = 0.0
        for message in messages:
            target = self._prefilling.get(message.id) if isinstance(message, Tokens) and message.tokens else None
            if target is not None and target.context <= self._step_tokens:
                longest = max(longest, now - target.joined)
        if longest > 0:
            self._firsts.add(longest)

    def _answered(self, target: _Target, tokens: int, now: float) -> None:
        if target.decodes and tokens > 1:
            self._token_seconds.add((now - target.first_token) / (tokens - 1))
        self._answers = min(self._answers + 1, ANSWERS)
        self._mean_decodes += (max(0, tokens - 1) - self._mean_decodes) / self._answers

    def step_kind(self) -> StepKind:
        """The kind of the next step."""
        return "prefill" if any(target.prefill for target in self._prefilling.values()) else "decode"

    def next_step(self, waiting: Sequence[Waiting]) -> StepShape:
        """What the next step computes if `waiting` are admitted."""
        # Their first tokens are computed, and have others after them.
        launched = [target for target in self._prefilling.values() if not target.prefill and target.left > 1]
        decodes = len(self._targets) - len(self._prefilling) + len(launched)
        context = self._context + sum(target.context for target in launched)
        budget = self._step_tokens - decodes
        prefill = pairs = 0
        for target in self._prefilling.values():
            if budget <= 0:
                break
            if target.prefill:
                tokens = min(target.prefill, budget)
                prefill += tokens
                pairs += prompt_pairs(tokens, target.context - target.prefill)
                budget -= tokens
        for each in waiting:
            if budget <= 0:
                break
            tokens = min(each.tokens, budget)
            prefill += tokens
            pairs += prompt_pairs(tokens)
            budget -= tokens
        return StepShape(decodes, context, prefill, pairs, self._adapter_bytes)

    def view(self, collected: float | None = None) -> tuple[Due, ...]:
        """The first deadline for each number of steps and decodes, and each window. `collected`: a step in flight has computed the
        next tokens of all whose prompts it has computed, and they come at this time; the deadlines are those of the tokens after them."""
        seen = self._see()
        if collected is None:
            return seen.dues
        later = list(seen.collected)
        for due in seen.next_tokens:
            deadline = _next(due.deadline, collected, due.window)
            later.append(Due(deadline, 1, 0, due.window, deadline - collected - due.window))
        later += [Due(collected + tpot, 1, 0, tpot) for tpot in seen.launched]
        return tuple(later)

    def _see(self) -> _Seen:
        if self._seen is None:
            next_tokens: dict[float, tuple[float, float]] = {}
            others: dict[tuple[int, int, float, float, bool], float] = {}
            launched: dict[tuple[int, int, float, float, bool], float] = {}
            """First tokens that a step in flight computes."""
            window, earliest, oldest = (
                0.0,
                math.inf,
                math.inf,
            )  # most have the same window: a decision waits for this loop
            pending, tpots = 0, set[float]()
            for target in self._targets.values():
                steps = 1
                if target.decodes:
                    if target.window != window:
                        window = target.window
                        earliest, oldest = next_tokens.get(window, (math.inf, math.inf))
                    if target.due < earliest or target.came < oldest:
                        earliest, oldest = min(target.due, earliest), min(target.came, oldest)
                        next_tokens[window] = earliest, oldest
                else:
                    pending += target.prefill
                    steps = max(1, -(-pending // self._step_tokens))
                    first = steps, 0, target.window, 0.0, True
                    of = others if target.prefill else launched
                    if not target.prefill and target.left > 1:
                        tpots.add(target.tpot)
                    of[first] = min(target.due, of.get(first, math.inf))
                if target.end < math.inf:
                    last = steps, max(0, target.left - 1), target.e2e, 0.0, False
                    others[last] = min(target.end, others.get(last, math.inf))
            collected = tuple([Due(due, *about) for about, due in others.items()])
            firsts = tuple([Due(due, *about) for about, due in launched.items()])
            nexts = tuple([Due(due, 1, 0, w, due - came - w) for w, (due, came) in next_tokens.items()])
            self._seen = _Seen(collected + firsts + nexts, collected, nexts, tuple(tpots))
        return self._seen


def _next(due: float, came: float, tpot: float) -> float:
    """The deadline of a token, if the one before was due at `due` and `came`: tokens are due `tpot` apart, whenever they come, so
    that their mean is kept and no more time is lost than was saved."""
    return min(max(due, came - tpot), came + CREDIT * tpot) + tpot
