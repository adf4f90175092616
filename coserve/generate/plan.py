"""The next step: what it would compute if it were launched now, with and without the requests that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coserve.core.link import RequestFailed, Tokens
from coserve.core.types import AdapterRef
from coserve.queues.deadlines import Deadlines
from coserve.queues.request import Request
from coserve.queues.shapes import StepShape, prompt_pairs


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` tokens of a request, computed in one step."""

    request: Request
    tokens: int


@dataclass(frozen=True)
class Plan:
    """A step that holds no pages yet. It is good until something changes in the scheduler."""

    shares: Sequence[Share]
    """Of requests that hold pages: decodes, then prompts under way."""
    waiting: tuple[Request, ...]
    """Requests in the queue that can be admitted now, in the order of admission."""
    headroom: int
    """How many can."""
    queued: int
    """How many requests wait in the queue, `waiting` included."""
    first_arrival: float | None
    """Of the oldest of them."""
    step_tokens: int
    """Most tokens of a step."""
    blocked: bool
    """Without the requests that wait it would compute nothing, as the first in line waits for its adapter to be read
    again."""
    deadlines: Deadlines
    admitting_nobody: StepShape
    """What the step computes without the requests that wait. Of prompts that hold no pages yet: if there are pages for
    them, and nothing of them is cached."""
    admitting_all: StepShape


class Ran(NamedTuple):
    """What a step, or the collection of one, came to."""

    messages: list[Tokens | RequestFailed]
    """One for each token or failure."""
    started: list[str]
    """Requests that are computed for the first time. Before that they waited for a place in the batch, or for pages."""
    computed: StepShape | None
    """What the steps computed that were collected; None: there were none."""


class Room:
    """What a step has left: tokens, and among them such of prompts that are scored."""

    def __init__(self, tokens: int, scored: int) -> None:
        self.tokens, self._scored = tokens, scored

    def for_prompt(self, request: Request) -> int:
        """Tokens of the request that fit."""
        left = min(self.tokens, self._scored) if request.scores_prompt else self.tokens
        return min(left, request.pending)

    def take(self, share: Share) -> Share:
        self.tokens -= share.tokens
        if share.request.scores_prompt and share.request.pending > 1:
            self._scored -= share.tokens
        return share

    def fill(self, prompts: Iterable[Request], *, in_order: bool = False) -> list[Share]:
        """Shares of these prompts, one after another; `in_order`: none after the first for which there is no room."""
        found = list[Share]()
        for request in prompts:
            tokens = self.for_prompt(request)
            if tokens > 0:
                found.append(self.take(Share(request, tokens)))
            elif in_order:
                break
        return found


def step_shape(
    shares: Iterable[Share], adapter_bytes: Callable[[AdapterRef], int], *, alone: bool = False
) -> StepShape:
    """The composition of a step, from which its time is predicted, before its tokens are counted as computed.
    `adapter_bytes`: of an adapter's matrices; `alone`: no other step is in flight."""
    decodes = context = prefill = pairs = 0
    refs = set[AdapterRef | None]()
    for share in shares:
        request = share.request
        refs.add(request.message.adapter)
        if share.tokens == 1:
            decodes += 1
            context += len(request.tokens) + request.in_flight
        else:
            prefill += share.tokens
            pairs += prompt_pairs(share.tokens, request.computed)
    size = sum([adapter_bytes(ref) for ref in refs if ref is not None])
    return StepShape(decodes, context, prefill, pairs, size, int(alone))
