"""The queue as the policy sees it."""

from __future__ import annotations

import math
from itertools import accumulate

from coserve.queues.inference import InferenceQueue, Queued
from coserve.queues.policy import Waiting


class QueueView:
    """`step_tokens`: maximum number of tokens of a generation step."""

    def __init__(self, queue: InferenceQueue, step_tokens: int) -> None:
        self._queue, self._step_tokens = queue, step_tokens
        self._seen: tuple[tuple[Queued, ...], tuple[Waiting, ...]] = (), ()

    def waiting(self) -> tuple[Waiting, ...]:
        """The queue in order. A request's `steps` include those of the prompts before it."""
        entries = self._queue.waiting()
        if entries is not self._seen[0]:  # cached until the queue changes: it may be long
            tokens = accumulate(len(entry.message.prompt) for entry in entries)
            waiting = tuple(
                Waiting(entry.message.id, entry.arrived, entry.deadline, math.ceil(total / self._step_tokens))
                for entry, total in zip(entries, tokens, strict=True)
            )
            self._seen = entries, waiting
        return self._seen[1]
