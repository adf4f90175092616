"""The requests in the batch, with the deadlines of their next tokens. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coserve.link import RequestFailed, Tokens
from coserve.queues.policy import Due
from coserve.types import Slo

StepKind = Literal["prefill", "decode"]
"""Kinds of generation steps: with prefill, or decode only."""
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


@dataclass
class _Target:
    """When a request's next token is due, and about how many steps that token takes."""

    tpot: float
    """Seconds between tokens that the request asks for."""
    due: float
    steps: int
    end: float
    """When its last token is due."""
    left: int
    """Most tokens that it may still have."""
    window: float
    """Seconds from which `due` counted."""
    e2e: float
    started: bool = False
    """It has been scheduled, and `Admitted` was sent."""
    decodes: bool = False
    """It has had its first token."""


class RunningRequests:
    """Requests that the generator has and that have not ended. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._seen: tuple[tuple[Due, ...], StepKind] | None = None
        """`view` and `step_kind`, until a request or a deadline changes."""

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, id: str, slo: Slo, *, deadline: float, steps: int, end: float = math.inf, tokens: int = 1) -> None:
        """`deadline` of its first token; `steps` that it takes; `end`: deadline of its last token; `tokens`: most that it has."""
        self._targets[id] = _Target(slo.tpot, deadline, steps, end, tokens, slo.ttft, slo.e2e or 0.0)
        self._seen = None

    def remove(self, id: str) -> bool:
        """False if it is not running."""
        self._seen = None
        return self._targets.pop(id, None) is not None

    def start(self, id: str) -> bool:
        """The request was scheduled for the first time. False if it is no longer running."""
        target = self._targets.get(id)
        if target is not None:
            target.started = True
        return target is not None

    @property
    def started(self) -> int:
        """How many have been scheduled."""
        return sum(target.started for target in self._targets.values())

    def accept(self, messages: Sequence[Tokens | RequestFailed], now: float) -> list[Tokens | RequestFailed]:
        """Update the deadlines from a step's results. Returns the results of requests that were not cancelled meanwhile."""
        wanted: list[Tokens | RequestFailed] = []
        if messages:
            self._seen = None
        for message in messages:
            target = self._targets.get(message.id)
            if target is None:
                continue
            if isinstance(message, RequestFailed) or message.finished is not None:
                del self._targets[message.id]
            elif message.tokens:  # chunks of prompt scores have none
                target.due, target.window = now + target.tpot, target.tpot
                target.left -= len(message.tokens)
                target.steps, target.decodes = 1, True
            wanted.append(message)
        return wanted

    def step_kind(self) -> StepKind:
        """The kind of the next step."""
        return self._see()[1]

    def view(self) -> tuple[Due, ...]:
        """The first deadline for each number of steps and decodes, and each window."""
        return self._see()[0]

    def _see(self) -> tuple[tuple[Due, ...], StepKind]:
        if self._seen is None:
            targets = self._targets
            kind: StepKind = "decode" if all(target.decodes for target in targets.values()) else "prefill"
            first: dict[tuple[int, int, float], float] = {}
            at, earliest = (0, 0, 0.0), math.inf  # most have the same steps and window: a decision waits for this loop
            for target in targets.values():
                steps, window, due = target.steps, target.window, target.due
                if steps != at[0] or window != at[2]:
                    at = steps, 0, window
                    earliest = first.get(at, math.inf)
                if due < earliest:
                    earliest = due
                    first[at] = min(due, first.get(at, math.inf))
                if target.end < math.inf:
                    last = steps, max(0, target.left - 1), target.e2e
                    first[last] = min(target.end, first.get(last, math.inf))
            self._seen = tuple([Due(due, *about) for about, due in first.items()]), kind
        return self._seen
