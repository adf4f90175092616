"""One request from its arrival to its end: queued, loading its adapter, active in the batch, ended. Pure: no torch, no
IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason

CREDIT = 0.5
"""A token that came early lets the next ones be later, by at most this many TPOTs."""


PLACEHOLDER = -1
"""Token id of a KV prefix's tokens, which have trained keys and values instead of a word of the vocabulary."""


class State(Enum):
    """A stage of a request's life."""

    QUEUED = "queued"
    """It waits in the queue."""
    LOADING = "loading"
    """It has a place in the batch; its adapter is being read, or its grammar compiled."""
    ACTIVE = "active"
    """It is in the batch: it holds pages, or waits for them."""
    ENDED = "ended"


class PrefixKeys(Protocol):
    """The interface of `memory.prefix.PageKeys`."""

    def first(self, pages: int, tokens: Sequence[int]) -> Sequence[bytes]: ...


class Constraint(Protocol):
    """The interface of `generate.grammars.Matcher`: the grammar that a request's tokens follow."""

    @property
    def error(self) -> str:
        """The error that ends the text, such as a grammar that became too complex; empty: none."""

    def accept(self, token: int) -> bool:
        """Take a sampled token. Return whether the text is complete, or there is an `error`."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a sequence's recurrent state, which a step writes into pages."""

    tokens: int
    """Tokens that the state has seen: a whole number of pages."""
    pages: list[int]


@dataclass(eq=False, slots=True)
class Request:
    """A request: prompt and output, deadlines, and its state in the KV cache. Times are seconds on the engine's
    clock."""

    message: Generate
    arrived: float = 0.0
    state: State = State.QUEUED
    number: int = -1
    """Unique number, in order of entry into the batch; -1 before. The lower of two wins when pages run out."""
    max_tokens: int = field(init=False)
    """Most output tokens: as requested, and in the batch at most what the context leaves."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, including the base's end-of-sequence tokens unless ignored. Set on entry into the batch."""
    tokens: list[int] = field(init=False)
    """Prompt, then the output tokens copied to the host. Before them, the placeholders of a KV prefix's tokens."""
    prefix: int = 0
    """Tokens of its adapter's KV prefix. Set on entry into the batch."""
    prompt_tokens: int = field(init=False)
    """Tokens before the first generated one, a KV prefix's included."""
    has_lora: bool = True
    """Whether its adapter has matrices, besides a KV prefix. Set on entry into the batch."""
    in_flight: int = 0
    """Sampled tokens not yet copied to the host."""

    deadline: float = field(init=False)
    """Deadline of its first token."""
    end: float = field(init=False)
    """Deadline of its last token; infinite without one."""
    due: float = field(init=False)
    """Deadline of its next token."""
    window: float = field(init=False)
    """Seconds that the target of `due` allows: TTFT, then TPOT."""
    came: float | None = None
    """When its last token was sent; None before the first."""

    constraint: Constraint | None = None
    """The grammar that its tokens follow; None: none. Set on entry into the batch."""
    keys: PrefixKeys | None = None
    """Prefix-cache keys of its full pages; None: they are not shared."""
    awaits_adapter: bool = False
    """Whether it waits for its adapter to be read."""
    holds_adapter: bool = False
    """Whether it holds a reference to its adapter's pages."""
    passed_since: float | None = None
    """Time from which later requests were allowed to pass it in the line, because there was no room for its adapter;
    None: not since it was last active."""
    pages: tuple[int, ...] = ()
    """Pages of its tokens, in order. The same tuple until they change: attention knows unchanged ones by identity."""
    slot: int = -1
    """Slot of its recurrent state while it holds pages; -1: none."""
    restored: list[int] = field(default_factory=list)
    """Pages of the snapshot from which its next step begins; held until then."""
    saved: Snapshot | None = None
    """The snapshot that the step in flight saves."""
    snapshots_at: tuple[int, ...] = ()
    """Numbers of tokens of its prompt after which a snapshot is to be saved, so a chunk ends there; ascending."""
    computed: int = 0
    """Leading tokens whose keys and values are in the pages."""
    labelled: int = 0
    """Leading pages published in the prefix cache."""
    shared: int = 0
    """Leading pages found in the prefix cache when it became active; others may hold them too."""
    cached: int = 0
    """Tokens of its prompt that it found in the prefix cache when it first became active."""
    started: bool = False
    """Whether it has ever held pages."""
    scored: int = 1
    """Leading tokens of `tokens` whose log-probabilities were sent, if requested; the prompt's first one has none."""

    def __post_init__(self) -> None:
        slo = self.message.slo
        self.max_tokens, self.tokens = self.message.sampling.max_tokens, list(self.message.prompt)
        self.prompt_tokens = len(self.tokens)
        self.deadline = self.due = self.arrived + slo.ttft
        self.window, self.end = slo.ttft, math.inf if slo.e2e is None else self.arrived + slo.e2e

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.message.adapter

    @property
    def paged_adapter(self) -> AdapterRef | None:
        """The adapter whose matrices it needs in pages; None: it has no adapter, or only a KV prefix, which is
        in the request's own pages."""
        return self.message.adapter if self.has_lora else None

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are requested: it computes every token itself and uses no cached
        prefix."""
        return self.sampling.prompt_logprobs is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether prompt scores are still missing (or nothing but scores is requested)."""
        return self.scores_prompt and (self.scored < self.prompt_tokens or not self.max_tokens)

    def precede(self, prefix: int) -> None:
        """Put the tokens of a KV prefix in front of the prompt."""
        self.prefix, self.tokens = prefix, [PLACEHOLDER] * prefix + self.tokens
        self.prompt_tokens += prefix
        self.scored += prefix

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def decodes(self) -> int:
        """Most decode steps from its next token to its last."""
        return max(0, self.max_tokens - self.generated - 1)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; none once its last one is in flight."""
        length = len(self.tokens) + self.in_flight
        if self.in_flight and length - self.prompt_tokens >= self.max_tokens:
            return 0
        return length - max(self.computed, self.prefix)

    @property
    def chunk(self) -> int:
        """Most tokens of it that one step may compute."""
        return min([self.pending, *(end - self.computed for end in self.snapshots_at if end > self.computed)])

    @property
    def length(self) -> int:
        """Tokens, including those in flight."""
        return len(self.tokens) + self.in_flight

    def banned(self) -> frozenset[int]:
        """Tokens that must not be sampled next, because fewer than `min_tokens` are out or in flight."""
        return self.stop_ids if self.generated + self.in_flight < self.sampling.min_tokens else frozenset()

    def push(self, token: int) -> FinishReason | None:
        """Append the sampled token (one that ends the sequence is part of the output). Return the finish reason, if it
        ended."""
        self.tokens.append(token)
        if token in self.stop_ids and self.generated >= self.sampling.min_tokens:
            return FinishReason.STOP
        if self.constraint is not None and self.constraint.accept(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self.max_tokens else None

    def token_came(self, now: float) -> None:
        """Record that a token was sent to the client, and set the next deadline."""
        tpot = self.message.slo.tpot
        self.due = next_deadline(now if self.came is None else self.due, now, tpot)
        self.window, self.came = tpot, now


def next_deadline(due: float, came: float, tpot: float) -> float:
    """Deadline of a token whose predecessor was due at `due` and came at `came`. Tokens are due `tpot` apart from the
    deadlines, not from their arrivals, so the mean TPOT is kept; the time saved or lost that carries over is
    limited."""
    return min(max(due, came - tpot), came + CREDIT * tpot) + tpot
