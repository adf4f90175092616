"""A launched step, and the composition of a planned one, from which its time is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coserve.generate.execution.interface import StepInFlight
from coserve.generate.schedule import Share
from coserve.queues.shapes import StepShape
from coserve.types import AdapterRef


@dataclass(frozen=True)
class LaunchedShares:
    """A step that an executor has launched, and what it computes."""

    step: StepInFlight
    shares: list[Share]
    samples: frozenset[int]
    """Numbers of the sequences that sample a token."""
    shape: StepShape


def step_shape(shares: Sequence[Share], adapter_bytes: Callable[[AdapterRef], int], *, alone: bool) -> StepShape:
    """Of shares whose tokens are not yet counted as computed. `adapter_bytes`: of an adapter's matrices; `alone`: no other step is
    in flight."""
    decodes = [share for share in shares if share.tokens == 1]
    refs = {share.sequence.adapter for share in shares}
    size = sum(adapter_bytes(ref) for ref in refs if ref is not None)
    shape = StepShape(len(decodes), sum(share.sequence.length for share in decodes), 0, 0, size, int(alone))
    for share in shares:
        if share.tokens > 1:
            shape = shape.and_prompt(share.tokens, share.sequence.computed)
    return shape
