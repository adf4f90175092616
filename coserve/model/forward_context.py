"""The context of a forward in addition to the arguments that transformers passes: the engine process's only thread-local.

The base's modules call `forward(x)`, and ops in compiled code take tensors and numbers only, so neither can be handed the
step's adapters. They read `current`; everything else takes its context as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from coserve.kernels.attention.interface import Attention
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.types import SiteGroup
from coserve.model.dropout import Dropout
from coserve.model.gemm_choice import GemmChoice
from coserve.parallel.modules import SiteShard


@dataclass(frozen=True)
class Fused:
    """What the ops of a forward through `FusedBase` look up."""

    attention: Attention
    gemms: GemmChoice
    groups: Sequence[Sequence[SiteGroup]]
    """By layer."""
    summed: Mapping[SiteGroup, SiteShard] = field(default_factory=dict)
    """Groups whose outputs are terms, which are to be summed over the ranks."""


@dataclass(frozen=True)
class ForwardContext:
    """One forward of a base, or several with the same adapters. `ForwardContext()`: the base alone."""

    lora: PreparedLora | None = None
    dropout: Dropout | None = None
    grouped: bool = False
    """Sites that read one input compute their outputs together (`PreparedLora.linear_group`)."""
    fused: Fused | None = None


class GraphCall(NamedTuple):
    """One call of a compiled graph."""

    graph: object
    inputs: tuple[object, ...]
    outputs: Sequence[object]


class _Current(threading.local):
    """This thread's running forward. Code that torch.compile traces must read nothing of it."""

    context = ForwardContext()
    layer = 0
    """The decoder layer that a fused forward is in."""
    called: GraphCall | None = None
    """Of the compiled graph that ran last; for `compiled.Layers`."""

    def pop_called(self) -> GraphCall | None:
        call, self.called = self.called, None
        return call


current = _Current()


@contextmanager
def running(context: ForwardContext) -> Iterator[None]:
    """Forwards of this thread inside have this context; the one from before is back afterwards."""
    before = current.context
    current.context = context
    try:
        yield
    finally:
        current.context = before
