"""The requests in the batch, and when their next tokens are due. Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coserve.link import RequestFailed, Tokens
from coserve.queues.policy import Running

StepKind = Literal["prefill", "decode"]
"""Kinds of generation steps: with a prompt still to be read, or without."""
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


@dataclass
class _Promise:
    """When a request's next token is due, and about how many steps it takes until then."""

    tpot: float
    due: float
    steps: int
    started: bool = False
    """It has been scheduled: `Admitted` was sent."""
    begun: bool = False
    """It has had a token."""


class RunningRequests:
    """Those that the generator was given and that have not ended. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def add(self, id: str, *, tpot: float, deadline: float, steps: int) -> None:
        """`deadline`: its first token is due; `steps`: generation steps until then."""
        self._promises[id] = _Promise(tpot, deadline, steps)

    def remove(self, id: str) -> bool:
        """False if it does not run."""
        return self._promises.pop(id, None) is not None

    def start(self, id: str) -> bool:
        """A request was scheduled for the first time. False if it does not run any more."""
        promise = self._promises.get(id)
        if promise is not None:
            promise.started = True
        return promise is not None

    @property
    def started(self) -> int:
        """How many of them have been scheduled."""
        return sum(promise.started for promise in self._promises.values())

    def accept(self, messages: Sequence[Tokens | RequestFailed], now: float) -> list[Tokens | RequestFailed]:
        """Take note of a step's results; returns those of requests that were not cancelled while it ran."""
        wanted: list[Tokens | RequestFailed] = []
        for message in messages:
            promise = self._promises.get(message.id)
            if promise is None:
                continue
            if isinstance(message, RequestFailed) or message.finished is not None:
                del self._promises[message.id]
            elif message.tokens:  # pieces of a prompt's scores bring none
                promise.due = now + promise.tpot
                promise.steps, promise.begun = 1, True
            wanted.append(message)
        return wanted

    def step_kind(self) -> StepKind:
        """Of the next step."""
        return "decode" if all(promise.begun for promise in self._promises.values()) else "prefill"

    def view(self) -> tuple[Running, ...]:
        """For the policy."""
        return tuple(Running(id, promise.due, promise.steps) for id, promise in self._promises.items())
