"""The composition of a planned step, from which its time is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coserve.generate.schedule import Share
from coserve.queues.shapes import StepShape
from coserve.types import AdapterRef


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
