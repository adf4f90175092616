"""The deadlines of the requests in the batch, as policies see them. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coserve.queues.policy import Due
from coserve.queues.request import Request, next_deadline

_About = tuple[int, int, float, float, bool]
"""A `Due` without its deadline."""


class Deadlines:
    """The first deadline for each number of steps and decodes, and each window: a policy reads a few, however many
    requests run."""

    def __init__(self, requests: Iterable[Request], step_tokens: int) -> None:
        """`requests` in the order in which their prompts are computed; `step_tokens`: most tokens of a step."""
        next_tokens: dict[float, tuple[float, float]] = {}
        others, launched = dict[_About, float](), dict[_About, float]()
        """First tokens that are launched: a step in flight computes them."""
        window, earliest, oldest = 0.0, math.inf, math.inf  # most have the same window: a decision waits for this loop
        pending, tpots = 0, set[float]()
        for request in requests:
            steps = 1
            if (came := request.came) is not None:
                if request.window != window:
                    window = request.window
                    earliest, oldest = next_tokens.get(window, (math.inf, math.inf))
                if request.due < earliest or came < oldest:
                    earliest, oldest = min(request.due, earliest), min(came, oldest)
                    next_tokens[window] = earliest, oldest
            else:
                prompt = max(0, len(request.message.prompt) - request.computed)
                pending += prompt
                steps = max(1, -(-pending // step_tokens))
                of, first = others if prompt else launched, (steps, 0, request.window, 0.0, True)
                of[first] = min(request.due, of.get(first, math.inf))
                if not prompt and request.decodes:
                    tpots.add(request.message.slo.tpot)
            if request.end < math.inf:
                last = steps, request.decodes, request.message.slo.e2e or 0.0, 0.0, False
                others[last] = min(request.end, others.get(last, math.inf))
        self._others = tuple([Due(due, *about) for about, due in others.items()])
        self._launched = tuple([Due(due, *about) for about, due in launched.items()])
        self._next = tuple([Due(due, 1, 0, w, due - came - w) for w, (due, came) in next_tokens.items()])
        self._tpots = tuple(tpots)

    def view(self, collected: float | None = None) -> tuple[Due, ...]:
        """`collected`: a step in flight has computed the next tokens of all whose prompts it has computed, and they
        come at this time; the deadlines are those of the tokens after them. None: no step is in flight."""
        if collected is None:
            return self._others + self._launched + self._next
        later = [*self._others]
        for due in self._next:
            deadline = next_deadline(due.deadline, collected, due.window)
            later.append(Due(deadline, 1, 0, due.window, deadline - collected - due.window))
        return (*later, *(Due(collected + tpot, 1, 0, tpot) for tpot in self._tpots))
