"""The requests in the batch, with the deadlines of their next tokens. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coserve.link import RequestFailed, Tokens
from coserve.queues.policy import Running

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
    started: bool = False
    """It has been scheduled, and `Admitted` was sent."""
    decodes: bool = False
    """It has had its first token."""


class RunningRequests:
    """Requests that the generator has and that have not ended. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, id: str, *, tpot: float, deadline: float, steps: int) -> None:
        """`deadline` of its first token; `steps` that it takes."""
        self._targets[id] = _Target(tpot, deadline, steps)

    def remove(self, id: str) -> bool:
        """False if it is not running."""
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
        for message in messages:
            target = self._targets.get(message.id)
            if target is None:
                continue
            if isinstance(message, RequestFailed) or message.finished is not None:
                del self._targets[message.id]
            elif message.tokens:  # chunks of prompt scores have none
                target.due = now + target.tpot
                target.steps, target.decodes = 1, True
            wanted.append(message)
        return wanted

    def step_kind(self) -> StepKind:
        """The kind of the next step."""
        return "decode" if all(target.decodes for target in self._targets.values()) else "prefill"

    def view(self) -> tuple[Running, ...]:
        """For the policy."""
        return tuple(Running(id, target.due, target.steps) for id, target in self._targets.items())
