"""State shared by all graphs of one base (the model, the slots, a memory pool, a logits buffer), and each graph's
inputs: fixed buffers on the device, filled by one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.token_slots import TokenSlots
from coserve.kernels.gpu.capture import GENERATION_PRIORITY
from coserve.kernels.gpu.device import of_a_part
from coserve.kernels.lora.experts.interface import RecordedTerms
from coserve.model.fused import FusedBase


@dataclass(frozen=True)
class GraphPool:
    """Memory pool and stream shared by graphs that never overlap."""

    memory: tuple[int, int]
    stream: torch.cuda.Stream
    """One stream for all captures: cuBLAS keeps 32 MiB for each stream it has seen."""


def make_graph_pool(device: torch.device) -> GraphPool | None:
    """Create the pool; None on CPU, where nothing is captured."""
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    # A graph inherits the multiprocessors and the priority of its capture stream.
    own = of_a_part(current) or current.priority < 0
    stream = current if own else torch.cuda.Stream(priority=GENERATION_PRIORITY)  # type: ignore[no-untyped-call]
    return GraphPool(torch.cuda.graph_pool_handle(), stream)


class LogitsBuffer:
    """Logits of the last step, shared by all graphs, because they are read before the next graph runs.

    A buffer for each graph would take GBs: tens of MB for some hundred sequences, times the number of graphs.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._logits_BV: Tensor | None = None

    def keep(self, logits_BV: Tensor) -> Tensor:
        """Copy the logits into the buffer. The first call allocates it, so it must not be within a capture."""
        rows, vocab = logits_BV.shape
        if self._logits_BV is None:
            self._logits_BV = logits_BV.new_empty(self._sequences, vocab)
        return self._logits_BV[:rows].copy_(logits_BV)


@dataclass(frozen=True)
class GraphState:
    """Objects shared by the graphs of one base, besides their own inputs."""

    fused: FusedBase
    token_slots: TokenSlots
    adapter_slots: AdapterSlots
    logits: LogitsBuffer
    pool: GraphPool | None
    """None on CPU."""
    remote: RecordedTerms | None = None
    """Terms that LoRA servers compute; None: there are no servers."""


class InputBuffer:
    """int64 columns in one buffer on the device; `load` fills them with one copy."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_columns = [column.numpy() for column in torch.split(self._host, list(sizes))]
        """Views of the host's buffer: numpy converts lists faster than torch."""
        self._loaded: list[list[int]] | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.columns = torch.split(self._buffer, list(sizes))
        """Views of the device buffer, one per column, read by the graph."""

    def load(self, *columns: Sequence[int]) -> None:
        """Copy the columns to the device, in stream order, padded with zeros. The caller ensures that the previous copy
        has ended."""
        wanted = [list(column) for column in columns]
        if wanted == self._loaded:
            return
        self._host.zero_()
        for to, column in zip(self._host_columns, wanted, strict=True):
            to[: len(column)] = column
        self._buffer.copy_(self._host, non_blocking=True)
        self._loaded = wanted

    def wait(self) -> None:
        """Wait for the previous step's copies, which have normally ended long before."""
        if self._copied is not None:
            self._copied.synchronize()

    def record(self) -> None:
        """Record that all copies of this step are in the stream."""
        if self._copied is not None:
            self._copied.record()
