"""One request from its arrival to its end: queued, loading its adapter, active in the batch, ended. Pure: no torch, no
IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from coserve.core.link import Generate
from coserve.core.types import AdapterRef, FinishReason, SamplingParams

CREDIT = 0.5
"""Targets between tokens by which one that came early lets the next ones come later."""


class State(Enum):
    """What a request waits for, or does."""

    QUEUED = "queued"
    """It waits for its turn in the queue."""
    LOADING = "loading"
    """It has a place in the batch, and its adapter is being read."""
    ACTIVE = "active"
    """It is in the batch. It holds pages, or is in line for them."""
    ENDED = "ended"


class PrefixKeys(Protocol):
    """`memory.prefix.PageKeys`."""

    def first(self, pages: int, tokens: Sequence[int]) -> Sequence[bytes]: ...


@dataclass(eq=False, slots=True)
class Request:
    """Prompt and output, when they are due, and how much of them the KV cache holds. Times are seconds on the engine's
    clock."""

    message: Generate
    arrived: float = 0.0
    state: State = State.QUEUED
    number: int = -1
    """Of its entry into the batch, and of no other request. The earlier of two wins when pages run out."""
    max_tokens: int = field(init=False)
    """As asked for, but in the batch at most what the context leaves."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, the base's end-of-sequence tokens included unless ignored; known in the batch."""
    tokens: list[int] = field(init=False)
    """Prompt, then output as far as the host knows it."""
    in_flight: int = 0
    """Sampled tokens not yet copied to the host."""

    deadline: float = field(init=False)
    """Of its first token."""
    end: float = field(init=False)
    """Deadline of its last token; infinite without one."""
    due: float = field(init=False)
    """Deadline of its next token."""
    window: float = field(init=False)
    """Seconds from which `due` counts."""
    came: float | None = None
    """When its last token came; None: it has none."""

    keys: PrefixKeys | None = None
    """Keys under which other requests find its full pages; None: they cannot."""
    holds_adapter: bool = False
    """Its adapter is in pages for it."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose keys and values are in the pages."""
    labelled: int = 0
    """Leading pages that others can find."""
    shared: int = 0
    """Leading pages that others had computed when it got its own, and may hold."""
    started: bool = False
    """It has had pages before now, or has them."""
    scored: int = 1
    """Leading prompt tokens whose log-probabilities are out, if asked for; the first has none."""

    def __post_init__(self) -> None:
        slo = self.message.slo
        self.max_tokens, self.tokens = self.message.sampling.max_tokens, list(self.message.prompt)
        self.deadline = self.due = self.arrived + slo.ttft
        self.window, self.end = slo.ttft, math.inf if slo.e2e is None else self.arrived + slo.e2e

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.message.adapter

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def scores_prompt(self) -> bool:
        """Logits of the whole prompt are wanted, so it computes every token itself and shares no pages of others."""
        return self.sampling.prompt_logprobs is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """The prompt is to be scored, and not all of it is yet (or that is all there is to do)."""
        return self.scores_prompt and (self.scored < len(self.message.prompt) or not self.max_tokens)

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[len(self.message.prompt) :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.message.prompt)

    @property
    def decodes(self) -> int:
        """Most decode steps from its next token to its last."""
        return max(0, self.max_tokens - self.generated - 1)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; none once its last one is in flight."""
        if self.in_flight and self.generated + self.in_flight >= self.max_tokens:
            return 0
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def length(self) -> int:
        """Tokens, including those in flight."""
        return len(self.tokens) + self.in_flight

    def banned(self) -> frozenset[int]:
        """Tokens that must not be sampled next, because fewer than `min_tokens` are out or in flight."""
        return self.stop_ids if self.generated + self.in_flight < self.sampling.min_tokens else frozenset()

    def push(self, token: int) -> FinishReason | None:
        """Append the chosen token (one that ends the sequence is part of its output) and say whether that was all."""
        self.tokens.append(token)
        if token in self.stop_ids and self.generated >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.max_tokens else None

    def token_came(self, now: float) -> None:
        """A token was sent to the client: the next one has a deadline of its own."""
        tpot = self.message.slo.tpot
        self.due = next_deadline(now if self.came is None else self.due, now, tpot)
        self.window, self.came = tpot, now


def next_deadline(due: float, came: float, tpot: float) -> float:
    """The deadline of a token, if the one before was due at `due` and `came`: tokens are due `tpot` apart, whenever
    they come, so that their mean is kept and no more time is lost than was saved."""
    return min(max(due, came - tpot), came + CREDIT * tpot) + tpot
