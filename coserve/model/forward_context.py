"""The context of a forward besides the arguments that transformers passes; the engine process's only thread-local.

The base's modules call `forward(x)`, and ops in compiled code take tensors and numbers only, so neither can be handed
the step's adapters. They read `current`; everything else takes its context as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from coserve.kernels.attention.interface import Attention
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.types import SiteGroup
from coserve.kernels.quantized.weights import QuantizedWeight
from coserve.kernels.recurrent.interface import Recurrence
from coserve.model.adapters.end_terms import Ends
from coserve.model.dropout import Dropout
from coserve.model.gemm_choice import GemmChoice
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.modules import SiteShard


@dataclass(frozen=True)
class Fused:
    """Lookup data for the ops of a forward through `FusedBase`."""

    attention: Attention
    gemms: GemmChoice
    groups: Sequence[Sequence[SiteGroup]]
    """Groups of each layer."""
    summed: Mapping[SiteGroup, SiteShard] = field(default_factory=dict)
    """Groups of row-parallel sites, whose outputs are to be summed over the tensor-parallel ranks."""
    quantized: Mapping[SiteGroup, QuantizedWeight] = field(default_factory=dict)
    """Weights of the groups that are quantised."""
    experts: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """The names of each layer's parameters of experts, gate and up first."""
    opaque_experts: Mapping[int, nn.Module] = field(default_factory=dict)
    """Each layer's module of experts, if LoRA servers may compute its terms."""
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks over which experts' outputs are summed."""


@dataclass(frozen=True)
class ForwardContext:
    """The context of one forward of a base, or of several with the same adapters. `ForwardContext()`: no adapters."""

    lora: PreparedLora | None = None
    dropout: Dropout | None = None
    grouped: bool = False
    """Whether sites that read one input compute their outputs together (`PreparedLora.linear_group`)."""
    fused: Fused | None = None
    training: object | None = None
    """The `RunningPass` behind the ops of compiled training layers, and while they are traced; see `training.ops`."""
    packed: bool = False
    """Whether linear modules use their packed weights (`model.packed`)."""
    ends: Ends | None = None
    """Changes of adapters at the input embedding and the head."""


class GraphCall(NamedTuple):
    """One call of a compiled graph."""

    graph: object
    inputs: tuple[object, ...]
    outputs: Sequence[object]


class _Current(threading.local):
    """This thread's running forward. Code that torch.compile traces must not read it."""

    context = ForwardContext()
    layer = 0
    """Index of the decoder layer that a fused forward or a recurrent mixer is in."""
    recurrence: Recurrence | None = None
    """The running batch's recurrence; None outside of forwards, and for bases without recurrent layers."""
    called: GraphCall | None = None
    """Call of the compiled graph that ran last; for `compiled.Layers`."""

    def pop_called(self) -> GraphCall | None:
        call, self.called = self.called, None
        return call


current = _Current()


def running_fused() -> Fused:
    """Return the lookup data of the running forward, which is one through `FusedBase`."""
    fused = current.context.fused
    assert fused is not None, "expected to run within FusedBase.forward"
    return fused


@contextmanager
def running(context: ForwardContext) -> Iterator[None]:
    """Set this thread's context inside, and restore the previous one afterwards."""
    before = current.context
    current.context = context
    try:
        yield
    finally:
        current.context = before


ATTENTION_FIELDS = "float scaling, int? window, float? softcap, Tensor? sinks, bool chunked"
"""`AttentionFields` in the schema of an op."""


def register_ops(*ops: tuple[str, str, Callable[..., object], Callable[..., object]]) -> torch.library.Library:
    """Register opaque ops of the namespace `coserve`, each by its name, schema, implementation and result for fake
    tensors. They last as long as the returned library. By hand, as `torch.library.custom_op` adds checks to every call
    that these ops do not need."""
    library = torch.library.Library("coserve", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema, real, fake in ops:
        library.define(name + schema)  # type: ignore[no-untyped-call]
        library.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"coserve::{name}", fake, lib=library)
    return library
