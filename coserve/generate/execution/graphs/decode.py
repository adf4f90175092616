"""One step as one CUDA graph: a launch, whatever the model's number of kernels. Here what steps share, and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from coserve.generate.execution.slots import AdapterSlots, Room, Scope, SlotLora, StaticLora, decode_rooms
from coserve.generate.sampling.draws import likeliest
from coserve.kernels.attention.interface import Run, StaticPagedAttention
from coserve.kernels.gpu.capture import captured
from coserve.kernels.lora.segments import Segments
from coserve.model.fused import FusedBase

Size = TypeVar("Size", bound=Hashable)
Graph = TypeVar("Graph")

WARM_UPS = 2
"""Runs ahead of the capture: kernels are compiled, buffers made."""


@dataclass(frozen=True)
class Place:
    """Where graphs are captured of which no two run at once."""

    memory: tuple[int, int]
    """A pool that they share."""
    stream: torch.cuda.Stream
    """One for all of them: cuBLAS keeps 32 MiB for each stream that it has seen."""


def make_place(device: torch.device) -> Place | None:
    """None on CPU, where nothing is captured."""
    if device.type != "cuda":
        return None
    return Place(torch.cuda.graph_pool_handle(), torch.cuda.Stream())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Captured:
    """One graph, and where its results lie."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    chosen: Tensor


class Captures:
    """A step over fixed buffers, captured once for each room that its adapters may take.

    On CPU nothing is captured: `replay` runs the step.
    """

    def __init__(self, step: Callable[[SlotLora | None], tuple[Tensor, Tensor]], lora: StaticLora | None) -> None:
        """`step`: launches the step with these terms and gives its logits and likeliest tokens."""
        self._step, self._lora = step, lora
        self._captured: dict[Room | None, Captured] = {}

    def capture(self, place: Place) -> None:
        rooms: tuple[Room | None, ...] = (None,) if self._lora is None else self._lora.rooms
        place.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(place.stream):
            for _ in range(WARM_UPS):
                self._step(self._terms(rooms[0]))
        torch.cuda.current_stream().wait_stream(place.stream)
        for room in rooms:
            graph, lora = torch.cuda.CUDAGraph(), self._terms(room)
            with captured(graph, place.memory, place.stream):
                results = self._step(lora)
            self._captured[room] = Captured(graph, *results)

    def replay(self, room: Room | None) -> tuple[Tensor, Tensor]:
        """Logits and likeliest tokens, both the next replay's afterwards."""
        captured = self._captured.get(room)
        if captured is None:
            return self._step(self._terms(room))
        captured.graph.replay()
        return captured.logits, captured.chosen

    def _terms(self, room: Room | None) -> SlotLora | None:
        return None if self._lora is None or room is None else self._lora.within(room)


class Results:
    """Where graphs leave their logits: one place for all of them, as one's are read before the next one runs.

    Kept by each graph they would take GBs: tens of MB for some hundred sequences, times the graphs.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._held: Tensor | None = None

    def keep(self, logits_BV: Tensor) -> Tensor:
        """A copy. The first time takes the memory: not within a capture."""
        rows, vocab = logits_BV.shape
        if self._held is None:
            self._held = logits_BV.new_empty(self._sequences, vocab)
        return self._held[:rows].copy_(logits_BV)


class Inputs:
    """Columns of int64 in one buffer on the device, which `load` fills with one copy."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = tuple(sizes)
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._loaded: list[list[int]] | None = None
        self.columns = torch.split(self._buffer, list(sizes))
        """What a graph reads."""

    def load(self, *columns: Sequence[int]) -> None:
        """Zeros behind each column's values. In stream order; the last copy has ended."""
        wanted = [list(column) for column in columns]
        if wanted == self._loaded:
            return
        self._host.zero_()
        for to, column in zip(torch.split(self._host, list(self._sizes)), wanted, strict=True):
            to[: len(column)] = torch.tensor(column, dtype=torch.int64)
        self._buffer.copy_(self._host, non_blocking=True)
        self._loaded = wanted


class Copies:
    """The copies of one graph's inputs, from host memory that is written again for its next step."""

    def __init__(self, device: torch.device) -> None:
        self._ended = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """For those of the step before: long done when the next one is made."""
        if self._ended is not None:
            self._ended.synchronize()

    def under_way(self) -> None:
        """All of this step's are in the stream."""
        if self._ended is not None:
            self._ended.record()


def serving(graphs: Mapping[tuple[Size, Scope], Graph], size: Size, scope: Scope) -> Graph | None:
    """Of the graphs of that size, the one that serves steps of this scope with the least beyond it."""
    found = graphs.get((size, scope))
    if found is not None or not scope.width:
        return found
    wider = [other for own, other in graphs if own == size and other.covers(scope)]
    least = min(wider, key=lambda other: (other.width, len(other.groups)), default=None)
    return None if least is None else graphs[size, least]


def tokens_of(given_T: Tensor, last: Tensor, lanes_T: Tensor) -> Tensor:
    """A step's input: what the host knows, and where that is negative what is in the lane."""
    return torch.where(given_T < 0, last.index_select(0, lanes_T), given_T)


class DecodeGraph:
    """Steps of up to B sequences, one token each. `load` says which; `replay` runs what was captured.

    With adapters there is a graph for each of several ways to cut a step (`StaticLora.rooms`), all over the same buffers.
    """

    logits: Tensor
    """(B, V), of the last replay of any graph."""
    chosen: Tensor
    """int64 (B), device: the likeliest tokens, `NOT_FINITE` for none; they are in their lanes already."""

    def __init__(
        self,
        fused: FusedBase,
        attention: StaticPagedAttention,
        last: Tensor,
        slots: AdapterSlots,
        scope: Scope,
        results: Results,
        place: Place | None,
    ) -> None:
        """`last`: every lane's newest token. `scope`: of the steps to serve. `results`: of all graphs that share `place`,
        which is None on CPU."""
        batch, device = attention.batch, last.device
        self._fused, self._attention, self._last, self._results = fused, attention, last, results
        self._lora = StaticLora(slots, batch, scope, decode_rooms(batch), decode=True) if scope.width else None
        self._inputs, self._copies = Inputs((batch, batch), device), Copies(device)
        self._room: Room | None = None
        self._captures = Captures(self._step, self._lora)
        self._attention.load(())
        if place is not None:
            self._captures.capture(place)

    def load(self, runs: Sequence[Run], lanes: Sequence[int], tokens: Sequence[int], segments: Segments | None) -> None:
        """The next step: the sequences' runs, lanes, and newest tokens (negative: the one in the lane)."""
        self._copies.wait()
        self._attention.load(runs)
        self._inputs.load(lanes, tokens)
        if self._lora is not None and segments is not None:
            self._room = self._lora.load(segments)
        assert self._lora is None or self._room is not None, "expected the adapters of the first step"
        self._copies.under_way()

    def replay(self) -> None:
        self.logits, self.chosen = self._captures.replay(self._room)

    def _step(self, lora: SlotLora | None) -> tuple[Tensor, Tensor]:
        lanes, given = self._inputs.columns
        tokens, positions = tokens_of(given, self._last, lanes), self._attention.positions
        logits = self._fused.forward(tokens, positions, self._attention, lora=lora, keep=None)
        chosen = likeliest(logits)
        self._last.index_copy_(0, lanes, chosen.clamp_min(0))
        return self._results.keep(logits), chosen
