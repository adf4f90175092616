"""The graphs of one kind of steps: their captures, those that could not be captured, and the choice of the graph that
runs a step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from coserve.core.errors import EngineFault
from coserve.generate.execution.footprint import LoraFootprint
from coserve.model.base import Base
from coserve.model.faults import contained, out_of_memory

log = logging.getLogger(__name__)


class Capturable(Protocol):
    """A graph that is captured in pieces: other steps may run between them."""

    def capture(self) -> Iterator[None]: ...


Size = TypeVar("Size", bound=Hashable)
Graph = TypeVar("Graph", bound=Capturable)
AnyGraph = TypeVar("AnyGraph")


class LeftOut:
    """Keys of graphs whose capture failed: it is not tried again, and their steps run without a graph."""

    def __init__(self, device: torch.device, *, tolerated: bool = True) -> None:
        """`tolerated`: False with tensor parallelism, where all ranks must have the same graphs."""
        self._device, self._tolerated = device, tolerated
        self._keys: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @contextmanager
    def capturing(self, key: Hashable) -> Iterator[None]:
        """Context of a capture. If it raises, the graph is left out and the error is swallowed, provided that this is
        tolerated and the device still works."""
        try:
            with contained(self._device):
                yield
        except EngineFault:
            raise
        except Exception as error:
            if not self._tolerated:
                raise
            self._keys.add(key)
            # The end of a capture that failed may raise an error of its own.
            short = out_of_memory(error) or (error.__context__ is not None and out_of_memory(error.__context__))
            why = "there is no memory for it" if short else "its capture failed"
            text = "the CUDA graph of %s is left out, as %s: such steps run without it"
            log.warning(text, key, why, exc_info=None if short else error)


class GraphSet(ABC, Generic[Size, Graph]):
    """A base's graphs of one kind of steps, by size and LoRA footprint."""

    def __init__(self, base: Base, sizes: Sequence[Size]) -> None:
        """`sizes`: smallest first."""
        self._sizes = tuple(sizes)
        self._graphs: dict[tuple[Size, LoraFootprint], Graph] = {}
        self.left_out = LeftOut(base.device, tolerated=base.sharding is None)

    @abstractmethod
    def _make(self, size: Size, footprint: LoraFootprint) -> Graph:
        """Make a graph that is not captured."""

    @property
    def captured(self) -> tuple[tuple[Size, LoraFootprint], ...]:
        """Size and footprint of each graph, in order of capture."""
        return tuple(self._graphs)

    def missing(self, footprint: LoraFootprint) -> int:
        """Number of graphs of this footprint still to be captured."""
        return sum(self._is_missing(size, footprint) for size in self._sizes)

    def any(self, footprint: LoraFootprint) -> bool:
        """Whether a graph of this footprint was captured, or its capture failed."""
        return self.missing(footprint) < len(self._sizes)

    def prepare(self, footprint: LoraFootprint, *, covered: bool = True) -> Iterator[None] | None:
        """Return the capture, in pieces, of the next missing graph; None if none is missing. `covered`: also one whose
        steps another graph serves, by computing more LoRA terms than they need."""
        missing = (size for size in self._order() if self._is_missing(size, footprint))
        size = next((size for size in missing if covered or self._covering((size,), footprint) is None), None)
        return None if size is None else self._capture(size, footprint)

    def _order(self) -> Iterable[Size]:
        """Return the sizes in the order of their captures: the largest first, as all others fit its memory."""
        return reversed(self._sizes)

    def _covering(self, sizes: Iterable[Size], footprint: LoraFootprint) -> Graph | None:
        """Return the graph of the first of these sizes that has one; None: none has."""
        found = (covering_graph(self._graphs, size, footprint) for size in sizes)
        return next((graph for graph in found if graph is not None), None)

    def _is_missing(self, size: Size, footprint: LoraFootprint) -> bool:
        return (size, footprint) not in self._graphs and (size, footprint) not in self.left_out

    def _capture(self, size: Size, footprint: LoraFootprint) -> Iterator[None]:
        with self.left_out.capturing((size, footprint)):
            graph = self._make(size, footprint)
            yield from graph.capture()
            self._graphs[size, footprint] = graph


def covering_graph(
    graphs: Mapping[tuple[Size, LoraFootprint], AnyGraph], size: Size, footprint: LoraFootprint
) -> AnyGraph | None:
    """Return the graph of `size` that covers the footprint with the least extra work; None if there is none."""
    found = graphs.get((size, footprint))
    if found is not None or not footprint.max_rank:
        return found
    wider = [other for own, other in graphs if own == size and other.covers(footprint)]
    least = min(
        wider, key=lambda one: (one.max_rank, len(one.groups), one.local + one.sharded + one.scaled), default=None
    )
    return None if least is None else graphs[size, least]
