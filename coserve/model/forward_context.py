"""The context of a forward in addition to the arguments that transformers passes: the engine process's only
thread-local.

The base's modules call `forward(x)`, and ops in compiled code take tensors and numbers only, so neither can be handed
the step's adapters. They read `current`; everything else takes its context as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from coserve.kernels.attention.interface import Attention, AttentionParams
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.types import SiteGroup
from coserve.model.dropout import Dropout
from coserve.model.gemm_choice import GemmChoice
from coserve.model.parallel.modules import SiteShard


@dataclass(frozen=True)
class Fused:
    """What the ops of a forward through `FusedBase` look up."""

    attention: Attention
    gemms: GemmChoice
    groups: Sequence[Sequence[SiteGroup]]
    """By layer."""
    summed: Mapping[SiteGroup, SiteShard] = field(default_factory=dict)
    """Groups whose outputs are terms, which are to be summed over the ranks."""


class TrainingSeams(Protocol):
    """What the ops of compiled training layers do, forward and backward, in the pass that runs. T packed tokens, D
    inputs, O outputs."""

    def learn(self, layer: int, group: int, x_TD: Tensor) -> Tensor:
        """(T, ΣO): the outputs of the sites of a group (its index in the layer) side by side, LoRA terms included."""
        ...

    def learn_backward(self, layer: int, group: int, dy_TO: Tensor, x_TD: Tensor) -> Tensor:
        """The gradient of x; adds the adapters' to their sums."""
        ...

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """As `Attention.attend`."""
        ...

    def attend_backward(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], out_THD: Tensor, dout_THD: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        ...

    def sum_ranks(self, place: int, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, which stays as it is. `place`: which of the layer's sums it is."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """One forward of a base, or several with the same adapters. `ForwardContext()`: the base alone."""

    lora: PreparedLora | None = None
    dropout: Dropout | None = None
    grouped: bool = False
    """Sites that read one input compute their outputs together (`PreparedLora.linear_group`)."""
    fused: Fused | None = None
    training: TrainingSeams | None = None
    """Of compiled training layers, and while they are traced."""


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
