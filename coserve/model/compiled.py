"""Compiled decoder layers whose guards are checked once a step instead of once a layer.

torch.compile checks some three hundred guards on every call of a layer, which takes longer than launching the layer's
kernels. Layers of one kind agree in everything that guards check, and differences between steps (one row or many) are
the same for all layers. So in each step only the first layer of a kind (the leader) goes through torch.compile, which
selects the graph or compiles a new one. The other layers call that graph directly with their own weights. The mapping
from a layer's arguments to the graph's inputs is observed: a layer is bound to a graph after torch.compile has run it
twice with consistent inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coserve.model.forward_context import GraphCall, current

Backend = Callable[[torch.fx.GraphModule, Sequence[Tensor]], Callable[..., Sequence[object]]]


class Graph:
    """One compiled trace of a layer. Several threads may run it at once."""

    def __init__(self, run: Callable[..., Sequence[object]]) -> None:
        self.run = run

    def __call__(self, *inputs: object) -> Sequence[object]:
        outputs = self.run(*inputs)
        current.called = GraphCall(self, inputs, outputs)
        return outputs


def compiler(backend: Backend) -> Backend:
    """Wrap `backend` so that its graphs record their calls in `current`."""
    return lambda module, inputs: Graph(backend(module, inputs))


@dataclass(frozen=True)
class Binding:
    """How the arguments and results of a layer map to the inputs and outputs of its compiled graph."""

    rows: int
    """Rows (tokens) of the step that this was observed in."""
    fixed: tuple[object, ...]
    """For each input of the graph: its value if it is the same in every step, else None."""
    given: tuple[tuple[int, int], ...]
    """(input of the graph, tensor argument of the layer) for each input that is an argument of the layer."""
    counts: tuple[int, ...]
    """Indices of the graph's inputs that are the step's number of rows."""
    result: int | tuple[int | None, ...]
    """Indices of the graph's outputs that the layer returns: one, or a tuple of indices and Nones."""

    def call(self, graph: Graph, tensors: Sequence[Tensor], rows: int) -> object:
        """Run the graph and return the layer's output for these arguments."""
        inputs = list(self.fixed)
        for place, which in self.given:
            inputs[place] = tensors[which]
        for place in self.counts:
            inputs[place] = rows
        outputs = graph.run(*inputs)
        if isinstance(self.result, int):
            return outputs[self.result]
        return tuple(None if which is None else outputs[which] for which in self.result)

    def confirms(self, other: Binding) -> bool:
        """Whether two observations agree.

        A number of rows can be told from a constant only if the two differ in rows, or if the graph is for one row
        only.
        """
        numbers = bool(self.counts) or any(isinstance(value, int) for value in self.fixed)
        return (
            (self.given, self.counts, self.result) == (other.given, other.counts, other.result)
            and all(_same(a, b) for a, b in zip(self.fixed, other.fixed, strict=True))
            and (not numbers or self.rows != other.rows or self.rows == 1)
        )


def observe(call: GraphCall, tensors: Sequence[Tensor], rows: int, result: object) -> Binding | None:
    """Return the binding that explains how a layer with these arguments and this result made `call`, or None."""
    fixed, given, counts = list(call.inputs), list[tuple[int, int]](), list[int]()
    for place, value in enumerate(call.inputs):
        which = next((i for i, tensor in enumerate(tensors) if tensor is value), None)
        if which is not None:
            given.append((place, which))
        elif isinstance(value, int) and value == rows:
            counts.append(place)
        elif isinstance(value, Tensor | int | float):
            continue
        else:
            return None
        fixed[place] = None
    outputs: dict[int, int] = {id(output): i for i, output in enumerate(call.outputs)}
    found: int | tuple[int | None, ...]
    if isinstance(result, tuple):
        if any(part is not None and id(part) not in outputs for part in result):
            return None
        found = tuple(None if part is None else outputs[id(part)] for part in result)
    elif id(result) in outputs:
        found = outputs[id(result)]
    else:
        return None
    return Binding(rows, tuple(fixed), tuple(given), tuple(counts), found)


def _same(a: object, b: object) -> bool:
    """Whether two values are the same tensor or the same number. torch.compile wraps a layer's constant in a new tensor
    on each call."""
    if a is b or (isinstance(a, int | float) and a == b):
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() == 0):
        return False
    return a.device.type == b.device.type == "cpu" and a.dtype == b.dtype and a.item() == b.item()


class Layers:
    """Calls a base's layers; guards are checked for the leaders alone. A step is `begin`, then all layers in order. Not
    thread-safe."""

    def __init__(self, layers: Sequence[nn.Module], forwards: Sequence[Callable[..., object]]) -> None:
        """`forwards`: compiled with `compiler`, or plain functions, which are simply called."""
        self._layers, self._forwards = layers, forwards
        self._leaders: list[int | None] = [None] * len(layers)
        """For each bound layer, the index of its leader: the first layer that runs the same graphs."""
        self._bound: list[dict[Graph, Binding]] = [{} for _ in layers]
        self._seen: list[dict[Graph, Binding]] = [{} for _ in layers]
        """For each layer, bindings observed once."""
        self._ran: list[Graph | None] = [None] * len(layers)
        """The graph that each layer ran through torch.compile in this step; None: not run yet, or bound."""
        self._rows = 0

    def begin(self, rows: int) -> None:
        """Begin a step of so many rows."""
        self._rows, self._ran = rows, [None] * len(self._layers)

    def call(self, index: int, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Return layer `index`'s output for these arguments."""
        leader = self._leaders[index]
        if leader is not None:
            graph = self._ran[leader]
            binding = None if graph is None else self._bound[index].get(graph)
            if graph is not None and binding is not None:
                return binding.call(graph, _tensors(args, kwargs), self._rows)
        return self._observed(index, args, kwargs)

    def _observed(self, index: int, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        current.pop_called()
        result = self._forwards[index](self._layers[index], *args, **kwargs)
        call = current.pop_called()
        graph = self._ran[index] = call.graph if call is not None and isinstance(call.graph, Graph) else None
        if call is not None and graph is not None:
            leader = self._ran.index(graph)
            if leader < index and graph not in self._bound[index]:
                self._learn(index, leader, graph, observe(call, _tensors(args, kwargs), self._rows, result))
        return result

    def _learn(self, index: int, leader: int, graph: Graph, binding: Binding | None) -> None:
        seen = self._seen[index].pop(graph, None)
        if binding is None:
            return
        if seen is not None and binding.confirms(seen):
            self._bound[index][graph], self._leaders[index] = binding, leader
        else:
            self._seen[index][graph] = binding


def _tensors(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
    """Return the tensors among a layer's arguments, and inside tuples and mappings among them, in order."""
    found = list[Tensor]()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(_tensors(value, {}))
        elif isinstance(value, Mapping):
            found.extend(_tensors(tuple(value.values()), {}))
    return found
