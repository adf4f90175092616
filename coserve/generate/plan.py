"""The plan of the next step: what it would compute, with and without the waiting requests; and the token budget of
steps, lowered when memory runs out, raised again after a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.types import AdapterRef
from coserve.queues.deadlines import Deadlines
from coserve.queues.request import Request
from coserve.queues.shapes import StepShape, prompt_pairs

PATIENCE = 64
"""Steps until a lowered budget is doubled again. Each further shortage doubles this number, up to `LONGEST`."""
LONGEST = 4096
"""Most steps until a lowered budget is doubled again."""


class Scheduled(Struct, frozen=True):
    """The next `tokens` tokens of a request, computed in one step."""

    request: Request
    tokens: int


@dataclass(frozen=True)
class Plan:
    """A proposed step that holds no pages yet. Valid until the scheduler changes."""

    scheduled: Sequence[Scheduled]
    """Tokens of requests that hold pages: decodes, then prompts under way."""
    waiting: tuple[Request, ...]
    """Requests in the queue that can be admitted now, in the order of admission."""
    batch_headroom: int
    """How many batch-class requests can be admitted now."""
    queued: int
    """How many requests wait in the queue, `waiting` included."""
    first_arrival: float | None
    """Arrival of the oldest queued request."""
    step_tokens: int
    """Token budget of a step."""
    blocked: bool
    """Whether the step would compute nothing without the waiting requests, because all requests waiting for pages wait
    for their adapters to be read again."""
    deadlines: Deadlines
    admitting_nobody: StepShape
    """Shape of the step without the waiting requests. Assumes that there are pages for all prompts, and no cached
    prefix."""
    admitting_all: StepShape


class Ran(NamedTuple):
    """The outcome of a step, or of collecting one."""

    messages: list[Tokens | RequestFailed]
    """One message for each token or failure."""
    started: dict[str, int]
    """Requests in their first step, with the tokens of their prompts that the prefix cache had."""
    computed: StepShape | None
    """Combined shape of the collected steps; None: none was collected."""


class BudgetLeft:
    """Remaining budget of a step: tokens, and among them tokens of prompts that are scored."""

    def __init__(self, tokens: int, scored: int) -> None:
        self.tokens, self._scored = tokens, scored

    def for_prompt(self, request: Request) -> int:
        """How many of the request's next tokens fit."""
        left = min(self.tokens, self._scored) if request.scores_prompt else self.tokens
        return min(left, request.chunk)

    def take(self, item: Scheduled) -> Scheduled:
        self.tokens -= item.tokens
        if item.request.scores_prompt and item.request.pending > 1:
            self._scored -= item.tokens
        return item

    def fill(self, prompts: Iterable[Request], *, in_order: bool = False) -> list[Scheduled]:
        """Take tokens of these prompts, in order; `in_order`: stop at the first that does not fit."""
        found = list[Scheduled]()
        for request in prompts:
            tokens = self.for_prompt(request)
            if tokens > 0:
                found.append(self.take(Scheduled(request, tokens)))
            elif in_order:
                break
        return found


def step_shape(
    scheduled: Iterable[Scheduled], adapter_bytes: Callable[[AdapterRef], int], *, alone: bool = False
) -> StepShape:
    """The composition of a step, from which its time is predicted. Call it before `Request.computed` advances.
    `adapter_bytes`: size of an adapter's matrices; `alone`: no other step is in flight."""
    decodes = context = prefill = pairs = 0
    refs = set[AdapterRef | None]()
    for item in scheduled:
        request = item.request
        refs.add(request.paged_adapter)
        if item.tokens == 1:
            decodes += 1
            context += len(request.tokens) + request.in_flight
        else:
            prefill += item.tokens
            pairs += prompt_pairs(item.tokens, request.computed)
    size = sum([adapter_bytes(ref) for ref in refs if ref is not None])
    return StepShape(decodes, context, prefill, pairs, size, int(alone))


class StepBudget:
    """Token budget of a step, from 1 to `full`."""

    def __init__(self, full: int) -> None:
        self.full = self.tokens = full
        self._patience = PATIENCE // 2
        self._left = 0
        """Steps until the budget doubles."""

    @property
    def lowered(self) -> bool:
        return self.tokens < self.full

    def lower(self, tried: int) -> None:
        """Memory ran out in a step of `tried` tokens: halve it."""
        self.tokens = max(1, min(self.tokens, tried // 2))
        self._patience = min(LONGEST, 2 * self._patience)
        self._left = self._patience

    def succeeded(self) -> None:
        """A step had enough memory: count it towards raising the budget."""
        if not self.lowered:
            return
        self._left -= 1
        if self._left <= 0:
            self.tokens, self._left = min(self.full, 2 * self.tokens), self._patience
