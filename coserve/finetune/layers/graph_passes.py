"""Passes over the layers that warm up, capture or replay CUDA graphs. T packed tokens, D hidden."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from coserve.finetune.layers.compiled import CompiledLayerPass
from coserve.finetune.layers.interface import LayerPass
from coserve.kernels.attention.fixed import FixedAttention
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.graph_memory import Recorder
from coserve.kernels.lora.interface import FixedLora, PreparedLora
from coserve.model.faults import out_of_memory
from coserve.model.layers import LayerCall, LayerInputs


class CaptureFailed(RuntimeError):
    """A capture failed: the batch must run again, without graphs from now on."""


@dataclass(eq=False)
class ShapeGraphs:
    """The CUDA graphs of one batch shape, and their static inputs."""

    inputs: LayerInputs
    attention: FixedAttention
    lora: FixedLora
    begin: Callable[[], CompiledLayerPass]
    """Starts a pass over `inputs`."""
    first: int
    """The lowest trained layer."""
    warm: bool = False
    """Whether a batch has run, so that all kernels are compiled."""
    forward: list[Callable[[], None]] = field(default_factory=list)
    backward: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Replay functions by layer."""
    output: Tensor | None = None
    """Output of the last layer (1, T, D)."""
    used: int = 0
    """Sequence number of the last batch that used the graphs."""

    def __post_init__(self) -> None:
        self.gradient = torch.empty_like(self.inputs.h_1TD)
        """Gradient of the last layer's output (1, T, D)."""

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.inputs.calls)

    @property
    def complete(self) -> bool:
        return self.first in self.backward

    def load(self, inputs: LayerInputs, lora: PreparedLora) -> None:
        """Copy a batch into the static inputs. Tables first: with programmatic dependent launch, LoRA kernels may read
        them before the preceding kernel has ended."""
        assert isinstance(inputs.attention, PackedAttention), "expected packed rows"
        self.lora.take(lora)
        self.attention.take(inputs.attention.bounds)
        for own, new in zip(tensors_of(self.inputs), tensors_of(inputs), strict=True):
            own.copy_(new)


class PooledPass:
    """Implements `LayerPass` without graphs, but in the graphs' memory pool, which would otherwise lie idle."""

    def __init__(self, layers: LayerPass, recorder: Recorder) -> None:
        self._layers, self._in_pool = layers, recorder.pool_of_pass()

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        with self._in_pool():
            return self._layers.forward(i, h_1TD)

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        with self._in_pool():
            return self._layers.backward(i, gradient_1TD)


class WarmUpPass(PooledPass):
    """Implements `LayerPass` without graphs, with the same launches and in the same memory pool as the graphs will
    have."""

    def __init__(self, graphs: ShapeGraphs, recorder: Recorder) -> None:
        super().__init__(graphs.begin(), recorder)
        self._graphs = graphs

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        return super().forward(i, self._graphs.inputs.h_1TD if i == 0 else h_1TD)

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        found_1TD = super().backward(i, gradient_1TD)
        self._graphs.warm |= i == self._graphs.first
        return found_1TD


class CapturePass:
    """Implements `LayerPass` and captures the layers that it runs."""

    def __init__(self, graphs: ShapeGraphs, recorder: Recorder, stop: Callable[[str], None]) -> None:
        """`stop` is called with the reason if a capture fails."""
        self._graphs, self._recorder, self._stop, self._layers = graphs, recorder, stop, graphs.begin()
        graphs.forward, graphs.backward = [], {}  # drop those of an abandoned pass

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        own, layers = self._graphs, self._layers
        given_1TD = own.inputs.h_1TD if i == 0 else h_1TD
        replay, output_1TD = self._recorded(lambda: layers.forward(i, given_1TD))
        own.forward.append(replay)
        if i + 1 == own.count:
            own.output = output_1TD
        return output_1TD

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        own, layers = self._graphs, self._layers
        given_1TD = own.gradient.copy_(gradient_1TD) if i + 1 == own.count else gradient_1TD
        own.backward[i], found_1TD = self._recorded(lambda: layers.backward(i, given_1TD))
        return found_1TD

    def _recorded(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record one layer. Raises `CaptureFailed`."""
        try:
            return self._recorder.record(run)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            self._stop(str(error))
            error.with_traceback(None)  # the traceback would keep this pass, and so the pool, alive
            raise CaptureFailed(f"layers could not be captured: {error}") from error


class ReplayPass:
    """Implements `LayerPass` by replaying graphs, which hand tensors from layer to layer in their own memory. `forward`
    returns the last layer's output, valid only once that layer has run. `backward` returns its argument, which is not
    read."""

    def __init__(self, graphs: ShapeGraphs) -> None:
        self._graphs = graphs

    def forward(self, i: int, h_1TD: Tensor) -> Tensor:
        self._graphs.forward[i]()
        assert self._graphs.output is not None, "expected complete graphs"
        return self._graphs.output

    def backward(self, i: int, gradient_1TD: Tensor) -> Tensor:
        if i + 1 == self._graphs.count:
            self._graphs.gradient.copy_(gradient_1TD)
        self._graphs.backward[i]()
        return gradient_1TD


def leaves_of(inputs: LayerInputs) -> list[object]:
    """The model's inputs to its layers, flattened."""
    return [inputs.h_1TD, *(leaf for call in inputs.calls for leaf in pytree.tree_leaves((call.args, call.kwargs)))]


def tensors_of(inputs: LayerInputs) -> list[Tensor]:
    """Tensors that layers read, each once."""
    return list({id(leaf): leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)}.values())


def key_of(inputs: LayerInputs) -> Hashable:
    """Key of the inputs: tensor sizes, and all other values but attention, since constants are part of the graphs."""
    return tuple([_key_of(leaf) for leaf in leaves_of(inputs) if not isinstance(leaf, PackedAttention)])


def _key_of(leaf: object) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf


def copied(inputs: LayerInputs) -> LayerInputs:
    """A copy of the inputs with new tensors for the layers."""
    own = {id(tensor): tensor.clone() for tensor in tensors_of(inputs)}

    def put(leaf: object) -> object:
        return own[id(leaf)] if isinstance(leaf, Tensor) else leaf

    calls = [LayerCall(*pytree.tree_map(put, (call.args, call.kwargs))) for call in inputs.calls]
    return replace(inputs, h_1TD=own[id(inputs.h_1TD)], calls=tuple(calls))
