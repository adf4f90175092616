"""The deadlines of the requests in the batch, as policies see them. Pure: no torch, no IO, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coserve.queues.policy import Due
from coserve.queues.request import Request, next_deadline

_About = tuple[int, int, float, float, bool]
"""The fields of a `Due` after its deadline."""


class Deadlines:
    """The earliest deadlines of the batch, one for each distinct (steps, decodes, window): their number does not grow
    with the batch."""

    def __init__(self, requests: Iterable[Request], step_tokens: int) -> None:
        """`requests` in the order in which their prompts are computed; `step_tokens`: token budget of a step."""
        next_tokens: dict[float, tuple[float, float]] = {}
        others, launched = dict[_About, float](), dict[_About, float]()
        """`launched`: first tokens that a step in flight computes."""
        window, earliest, oldest = 0.0, math.inf, math.inf  # cached: most requests have the same window
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
                prompt = max(0, request.prompt_tokens - max(request.computed, request.prefix))
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
        """Return the deadlines. `collected`: when the tokens of the step in flight are expected; each request whose
        prompt is computed then counts with the deadline of the token after that step's. None: no step is in flight."""
        if collected is None:
            return self._others + self._launched + self._next
        later = [*self._others]
        for due in self._next:
            deadline = next_deadline(due.deadline, collected, due.window)
            later.append(Due(deadline, 1, 0, due.window, deadline - collected - due.window))
        return (*later, *(Due(collected + tpot, 1, 0, tpot) for tpot in self._tpots))
