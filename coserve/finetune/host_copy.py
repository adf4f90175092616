"""The tensors of an adapter in one flat buffer, so that one kernel or one copy handles all of them; and copies between
such device tensors and host memory, overlapped with other work of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coserve.admission.optimizers import ALIGNED
from coserve.admission.shapes import BLOCK, gather_chunks
from coserve.lora.store.tensor_writer import TensorsOnDemand
from coserve.model.parallel.adapter import AdapterPartition

PARTS = ("a", "b", "m")
"""Ends of the names of a site's tensors: A, B and, with DoRA, the magnitude."""


class FlatLayout:
    """Layout of named tensors in a buffer of `size` elements. Elements between tensors are padding.

    No tensor crosses a multiple of `block`, so that the buffer may also be split into blocks of that size.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], block: int = BLOCK, aligned: int = ALIGNED) -> None:
        """Every tensor starts at a multiple of `aligned` elements, which divides `block`."""
        sizes = {name: -(-shape.numel() // aligned) * aligned for name, shape in shapes.items()}
        self.block = max(block, *sizes.values())
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self.size = 0
        for name, shape in shapes.items():
            if self.size % self.block + sizes[name] > self.block:
                self.size += -self.size % self.block
            self._places[name] = self.size, shape
            self.size += sizes[name]

    def start(self, name: str) -> int:
        """Index of the tensor's first element."""
        return self._places[name][0]

    def views(self, flat_N: Tensor, per: int = 1) -> dict[str, Tensor]:
        """Return the tensors by name, as contiguous views of `flat_N` (`size` elements). `per`: see `block_views`."""
        return self.block_views(list(torch.split(flat_N, self.block // per)), per)

    def block_views(self, blocks: Sequence[Tensor], per: int = 1) -> dict[str, Tensor]:
        """Like `views`, for a buffer split into blocks of `block` elements; the last one may be shorter.

        `per`: the buffer holds one element for this many of the layout's; `aligned` is a multiple of it. The views are
        1-D then."""
        found = {}
        for name, (start, shape) in self._places.items():
            number, at = divmod(start, self.block)
            first, last = at // per, -(-(at + shape.numel()) // per)
            found[name] = blocks[number][first:last].view(shape if per == 1 else (-1,))
        return found


REST = 0.002
"""Pause in seconds between two allocations of pinned memory: each blocks other threads' CUDA calls while it runs."""


def host_row(size: int, block: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Allocate host memory for a row of `size` elements, in blocks of `block` elements; the last one may be shorter."""
    found = []
    for start in range(0, size, block):
        found.append(torch.empty(min(block, size - start), dtype=dtype, pin_memory=pinned))
        if pinned:
            time.sleep(REST)
    return found


class HostCopy:
    """Host memory for K rows (1-D tensors of any dtype), in blocks. On a GPU it is pinned, and a side stream copies.

    Other threads' transfers and allocations wait for one block at most. Construct it on a worker thread and reuse it:
    allocating pinned memory is slow.
    """

    def __init__(
        self, source: Sequence[Tensor], blocks: Sequence[int], rows: Sequence[Sequence[Tensor]] | None = None
    ) -> None:
        """`blocks`: block size of each row, in elements. `rows`: host memory to copy to; None: allocated here."""
        self._source, self._device = source, source[0].device
        on_gpu = self._device.type == "cuda"
        self.rows = rows or [
            host_row(row_N.shape[0], block, row_N.dtype, pinned=on_gpu)
            for row_N, block in zip(source, blocks, strict=True)
        ]
        """Blocks of each row, in order; the last of a row may be shorter."""
        self._blocks = blocks
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copying = False

    def download(self, rows: int) -> None:
        """Begin to copy the first `rows` rows to the host, in their state after the work queued on the current stream.

        `wait` must have returned for the previous download.
        """
        self._download(rows)
        if self._stream is not None and self._copied is not None:
            self._copied.record(self._stream)
            self._copying = True

    def protect(self) -> None:
        """Make the current stream (not the caller) wait for the download. Call it before the rows change."""
        if self._copying and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copying = False

    def wait(self) -> None:
        """Wait for the copy that `download` began; on any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, rows: int) -> None:
        """Copy the first `rows` rows to the device and wait for it; call it on a worker thread."""
        self._upload(rows)
        if self._stream is not None:
            self._stream.synchronize()

    def _download(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: host.copy_(device, non_blocking=True))

    def _upload(self, rows: int) -> None:
        self._transfer(rows, lambda host, device: device.copy_(host, non_blocking=True))

    @torch.no_grad()
    def _transfer(self, rows: int, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Call `copy` for each block and the matching slice of the source, on the side stream, after the work queued on
        the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # None: no effect
            for hosts, row_N, block in zip(self.rows[:rows], self._source, self._blocks, strict=False):
                for host, device in zip(hosts, torch.split(row_N, block), strict=True):
                    copy(host, device)


class GatheredCopy(HostCopy):
    """A host copy of an adapter that is sharded over ranks. Rank 0's `rows` are the gathered state, a block for each
    chunk of sites, as `AdapterPartition.gather` returns it. Those of other ranks are their own shards.

    `download` runs while requests wait, so it only gathers and copies. Whole matrices are made when they are read, on
    another thread: no rank holds more than a chunk of them.
    """

    def __init__(
        self, source: Sequence[Tensor], layout: FlatLayout, sites: Sequence[str], partition: AdapterPartition
    ) -> None:
        """`layout`: of the source's rows, all fp32, which names their tensors as `<site>.a` (see `PARTS`)."""
        self._partition, self._rank = partition, partition.sharding.mesh.rank
        self._parts = [_by_site(layout.views(row_N), sites) for row_N in source]
        sizes = {site: partition.gathered(site) for site in sites}
        self._chunks = gather_chunks(sizes)
        self._chunk_of = {site: number for number, chunk in enumerate(self._chunks) for site in chunk}
        rows, on_gpu = None, source[0].is_cuda
        if self._rank == 0:
            elements = [sum(sizes[site] for site in chunk) for chunk in self._chunks]
            rows = [[host_row(n, n, row_N.dtype, pinned=on_gpu)[0] for n in elements] for row_N in source]
        super().__init__(source, [layout.block] * len(source), rows)
        self._layout = layout

    def tensors(self, kinds: Sequence[str]) -> TensorsOnDemand:
        """The first rows' whole tensors, named as `<kind>/<site>.a` (see `PARTS`); `kinds`: names of the rows.

        Valid after `wait`, until the next download. Ranks but the first know only their own shards; the rest is 0.
        """
        like, places = dict[str, Tensor](), dict[str, tuple[int, str, int]]()
        for row, kind in enumerate(kinds):
            for site in self._chunk_of:
                for i, own in enumerate(self._empty(site, "meta")):
                    name = f"{kind}/{site}.{PARTS[i]}"
                    like[name], places[name] = own, (row, site, i)
        read = self._gathered_reader() if self._rank == 0 else self._own_reader()
        return TensorsOnDemand(like, lambda name: read(*places[name]))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], kinds: Sequence[str], *, shards: bool = False) -> None:
        """Copy this rank's shards of the first rows' matrices, named as by `tensors`, to the device and wait for it;
        call it on a worker thread. The matrices are whole ones, of which the shards alone are read, or the `shards`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for kind, parts in zip(kinds, self._parts, strict=False):
                for site, pair in parts.items():
                    for name, own, part in zip(PARTS, self._partition.matrices(site), pair, strict=False):
                        whole = tensors[f"{kind}/{site}.{name}"]
                        if not shards:
                            whole = own.shard(whole.view(own.rows.size, own.columns.size), self._rank)
                        part.copy_(whole.view_as(part))
        if self._stream is not None:
            self._stream.synchronize()

    def _gathered_reader(self) -> Callable[[int, str, int], Tensor]:
        """Return a function that returns a tensor (an index of `PARTS`) of a row. It keeps one chunk: names in a file's
        order mostly follow each other in one."""
        kept, wholes = (-1, -1), dict[str, tuple[Tensor, ...]]()

        def read(row: int, site: str, matrix: int) -> Tensor:
            nonlocal kept, wholes
            if kept != (row, number := self._chunk_of[site]):
                wholes = {}  # frees the last chunk before this one is made
                found = {each: self._empty(each) for each in self._chunks[number]}
                self._partition.put(self.rows[row][number], found)
                kept, wholes = (row, number), found
            return wholes[site][matrix]

        return read

    def _own_reader(self) -> Callable[[int, str, int], Tensor]:
        rows = [_by_site(self._layout.block_views(blocks), self._chunk_of) for blocks in self.rows]

        def read(row: int, site: str, matrix: int) -> Tensor:
            own, whole = self._partition.matrices(site)[matrix], self._empty(site)[matrix].zero_()
            part = rows[row][site][matrix].view(own.shape)
            own.put(part, whole.view(own.rows.size, own.columns.size), self._rank)
            return whole

        return read

    def _empty(self, site: str, device: str = "cpu") -> tuple[Tensor, ...]:
        a, b, *magnitude = self._partition.matrices(site)
        matrices = [torch.empty(own.rows.size, own.columns.size, device=device) for own in (a, b)]
        return *matrices, *(torch.empty(own.rows.size, device=device) for own in magnitude)

    @torch.no_grad()
    def _download(self, rows: int) -> None:
        """Gather some sites at a time, on all ranks together; the copies to the host run on the side stream."""
        for parts, hosts in zip(self._parts[:rows], self.rows, strict=False):
            for number, sites in enumerate(self._chunks):
                gathered = self._partition.gather({site: parts[site] for site in sites})
                if self._rank:
                    continue
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                    gathered.record_stream(self._stream)
                with torch.cuda.stream(self._stream):  # None: no effect
                    hosts[number].copy_(gathered, non_blocking=True)
        if self._rank:
            super()._download(rows)


def _by_site(tensors: Mapping[str, Tensor], sites: Iterable[str]) -> dict[str, tuple[Tensor, ...]]:
    return {site: tuple(tensors[name] for part in PARTS if (name := f"{site}.{part}") in tensors) for site in sites}
