"""Memory that runs out at a chosen call, as torch reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

Point = tuple[object, str]
"""A module or class and the name of its function that allocates."""


@dataclass
class Faults:
    """`calls` so far of all points, and how many of them `failed`."""

    calls: int = 0
    failed: int = 0


def out_of_memory() -> BaseException:
    """A new error."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextmanager
def out_of_memory_at(
    points: Sequence[Point],
    wanted: Callable[[int], bool],
    *,
    after: bool = False,
    error: Callable[[], BaseException] = out_of_memory,
) -> Iterator[Faults]:
    """Calls of `points` whose number (from 0) is `wanted` raise, before or `after` they did their work."""
    faults = Faults()

    def failing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            number, faults.calls = faults.calls, faults.calls + 1
            fails = wanted(number)
            found = None if fails and not after else function(*args, **kwargs)
            if fails:
                faults.failed += 1
                raise error()
            return found

        return call

    with ExitStack() as stack:
        for owner, name in points:
            stack.enter_context(mock.patch.object(owner, name, failing(getattr(owner, name))))
        yield faults
