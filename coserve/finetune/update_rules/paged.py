"""Moments in host memory that are paged through the device in pieces while an update reads and writes them.

bitsandbytes' paged optimizers use managed memory, which torch's allocator does not count and which moves page by page
when a kernel touches it. Here all bytes are counted, and piece k + 1 is loaded and piece k - 1 stored while piece k is
updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from coserve.admission.optimizers import BUFFERS, COPIES, PIECE, StateKind
from coserve.finetune.host_copy import host_row

Rows = Sequence[Sequence[Tensor]]
"""Blocks of each kind's row in host memory."""


class PagedMoments:
    """Paged moments of a flat buffer of weights. On a GPU the host memory is pinned, and two side streams copy; on a
    CPU a piece is copied when it is needed.

    After `hold`, an update reads the held copy and writes another, so that a checkpoint needs no copy of its own.
    """

    def __init__(
        self,
        kinds: Sequence[StateKind],
        size: int,
        block: int,
        device: torch.device,
        starts: Sequence[int] = (0,),
        piece: int = PIECE,
    ) -> None:
        """Construct it on a worker thread: allocating pinned memory is slow. `size`: number of weights; no tensor
        crosses a multiple of `block`. `starts`: weights at which a piece must begin; `piece`: most weights of a piece.
        Both are multiples of each kind's `per`.

        On a GPU, call the constructor and all methods but `wait` with the same current stream."""
        self._kinds, self._block, self._device = kinds, block, device
        bounds = sorted({*range(0, size, block), *starts, size})
        self.spans = [
            (at, min(at + piece, last)) for first, last in pairwise(bounds) for at in range(first, last, piece)
        ]
        """First and last weight of each piece."""
        self._copies: list[Rows] = [
            [host_row(size // kind.per, block // kind.per, _dtype(kind), pinned=self._on_gpu) for kind in kinds]
            for _ in range(COPIES)
        ]
        self._current = 0
        """Index of the copy that the last update wrote."""
        self._held = False
        """Whether a snapshot still reads the current copy."""
        largest = min(piece, size)
        self._buffers = [
            [torch.zeros(largest // kind.per, dtype=_dtype(kind), device=device) for kind in kinds]
            for _ in range(BUFFERS)
        ]
        self._streams: _Streams | None = _Streams(device, self._buffers) if self._on_gpu else None
        self.clear()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def rows(self) -> Rows:
        """The moments in host memory, valid once `wait` has returned."""
        return self._copies[self._current]

    def spare(self) -> Rows:
        """Return the copy that is not current, to be written by the host; `exchange` then makes it current. No snapshot
        may still read it."""
        self.hold()
        self.wait()
        return self._copies[1 - self._current]

    def moments(self, number: int) -> list[Tensor]:
        """Device buffers of piece `number`. They hold its moments while `pieces` is suspended at that piece."""
        first, last = self.spans[number]
        buffers = self._buffers[number % BUFFERS]
        return [buffer_N[: (last - first) // kind.per] for kind, buffer_N in zip(self._kinds, buffers, strict=True)]

    def pieces(self) -> Iterator[int]:
        """Yield the numbers of all pieces, each once its moments may be used on the current stream; that work must be
        launched before the next piece is requested. Run it to its end."""
        source = self.rows
        target = self._copies[1 - self._current] if self._held else source
        self._load(0, source)
        for number in range(len(self.spans)):
            if number + 1 < len(self.spans):
                self._load(number + 1, source)
            if self._streams is not None:
                self._streams.use(number % BUFFERS)
            yield number
            if self._streams is not None:
                self._streams.used(number % BUFFERS)
            self._store(number, target)
        if self._held:
            self.exchange()

    def hold(self) -> None:
        """Keep `rows` unchanged by the next update."""
        self._held = True
        if self._streams is not None:
            self._streams.mark()

    def wait(self) -> None:
        """Wait until `rows` hold the moments as of the last `hold`; on any thread."""
        if self._streams is not None:
            self._streams.wait()

    def exchange(self) -> None:
        """Make the copy that `spare` returned the current one."""
        self._current, self._held = 1 - self._current, False

    def clear(self) -> None:
        """Reset the moments to zero. Call it on a worker thread."""
        self.hold()
        self.wait()
        self._held = False
        fill(self.rows, self._kinds)

    def _load(self, number: int, source: Rows) -> None:
        with torch.cuda.stream(None if self._streams is None else self._streams.begin_load(number % BUFFERS)):
            for own, host in zip(self.moments(number), self._on_host(number, source), strict=True):
                own.copy_(host, non_blocking=True)
        if self._streams is not None:
            self._streams.end_load(number % BUFFERS)

    def _store(self, number: int, target: Rows) -> None:
        with torch.cuda.stream(None if self._streams is None else self._streams.begin_store(number % BUFFERS)):
            for own, host in zip(self.moments(number), self._on_host(number, target), strict=True):
                host.copy_(own, non_blocking=True)
        if self._streams is not None:
            self._streams.end_store(number % BUFFERS)

    def _on_host(self, number: int, rows: Rows) -> list[Tensor]:
        first, last = self.spans[number]
        block, at = divmod(first, self._block)
        return [
            blocks[block][at // kind.per : (at + last - first) // kind.per]
            for kind, blocks in zip(self._kinds, rows, strict=True)
        ]


def fill(rows: Rows, kinds: Sequence[StateKind]) -> None:
    """Fill with each kind's zero, including padding between tensors, which shares quantization scales with them."""
    for kind, blocks in zip(kinds, rows, strict=False):
        for block in blocks:
            block.fill_(kind.zero)


def _dtype(kind: StateKind) -> torch.dtype:
    return torch.float32 if kind.itemsize == 4 else torch.uint8


class _Streams:
    """Streams and events that order each buffer's load, update and store. A buffer serves the same pieces in every
    update, so this also orders the copies of a piece in host memory."""

    def __init__(self, device: torch.device, buffers: Rows) -> None:
        self._device = device
        self._incoming, self._outgoing = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._incoming.wait_stream(torch.cuda.current_stream(device))  # after the buffers were filled
        self._come, self._updated, self._gone = (
            [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._marked = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        for buffer in buffers:
            for tensor in buffer:  # if a job fails, its memory may be freed during a copy
                tensor.record_stream(self._incoming)
                tensor.record_stream(self._outgoing)

    def begin_load(self, buffer: int) -> torch.cuda.Stream:
        self._incoming.wait_event(self._gone[buffer])
        return self._incoming

    def end_load(self, buffer: int) -> None:
        self._come[buffer].record(self._incoming)

    def use(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._come[buffer])

    def used(self, buffer: int) -> None:
        self._updated[buffer].record(torch.cuda.current_stream(self._device))

    def begin_store(self, buffer: int) -> torch.cuda.Stream:
        self._outgoing.wait_event(self._updated[buffer])
        return self._outgoing

    def end_store(self, buffer: int) -> None:
        self._gone[buffer].record(self._outgoing)

    def mark(self) -> None:
        """Mark the stores launched so far as those that `wait` waits for."""
        self._marked.record(self._outgoing)

    def wait(self) -> None:
        """Wait for all stores launched before the last `mark`."""
        self._marked.synchronize()
