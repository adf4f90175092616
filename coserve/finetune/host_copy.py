"""Copies between device tensors and host memory, overlapped with other work of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from coserve.finetune.flat_tensors import FlatLayout
from coserve.model.parallel.adapter import AdapterPartition

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
        self, source: Sequence[Tensor], blocks: Sequence[int], size: int | None = None, *, pinned: bool = True
    ) -> None:
        """`blocks`: block size of each row, in elements. `size`: elements of every row in host memory; None: as in the
        source. `pinned`: whether they are pinned on a GPU."""
        self._source, self._device = source, source[0].device
        on_gpu = self._device.type == "cuda"
        self.rows = [
            host_row(row_N.shape[0] if size is None else size, block, row_N.dtype, pinned=on_gpu and pinned)
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
    """A host copy whose `rows` hold the whole adapter, while the source holds this rank's shard. After a download,
    every rank has the same rows.

    `download` runs while requests wait, so it only gathers and copies. `wait`, on another thread, puts the hundreds of
    shards to their places in `rows`.
    """

    def __init__(
        self, source: Sequence[Tensor], layout: FlatLayout, whole: FlatLayout, partition: AdapterPartition
    ) -> None:
        """`layout`: of the source's rows, all fp32; `whole`: of the rows in host memory. Both name their tensors
        `<site>.a` and `<site>.b`."""
        super().__init__(source, [whole.block] * len(source), whole.size, pinned=False)
        self._whole, self._partition = whole, partition
        self._parts = [_by_site(layout.views(row_N), partition.pairs) for row_N in source]
        self._chunks = list(_chunks(partition, whole.block))
        sizes = [sum(map(partition.gathered, sites)) for sites in self._chunks]
        self._gathered = [
            [host_row(size, size, row_N.dtype, pinned=self._stream is not None)[0] for size in sizes]
            for row_N in source
        ]
        """Gathered values of each chunk of each row, in host memory."""
        self._downloaded = 0
        """Rows of the last download that are not in `rows` yet."""

    def wait(self) -> None:
        super().wait()
        rows, self._downloaded = self._downloaded, 0
        for blocks, chunks in zip(self.rows[:rows], self._gathered, strict=False):
            wholes = _by_site(self._whole.block_views(blocks), self._partition.pairs)
            for sites, gathered in zip(self._chunks, chunks, strict=True):
                self._partition.put(gathered, {site: wholes[site] for site in sites})

    def upload(self, rows: int) -> None:
        super().upload(rows)
        # Memory that nobody writes to takes none: most ranks never read a download.
        self.rows = [[torch.empty_like(block) for block in blocks] for blocks in self.rows]

    @torch.no_grad()
    def _download(self, rows: int) -> None:
        """Gather some sites at a time, on all ranks together; the copies to the host run on the side stream."""
        for parts, chunks in zip(self._parts[:rows], self._gathered, strict=False):
            for sites, host in zip(self._chunks, chunks, strict=True):
                gathered = self._partition.gather({site: parts[site] for site in sites})
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                    gathered.record_stream(self._stream)
                with torch.cuda.stream(self._stream):  # None: no effect
                    host.copy_(gathered, non_blocking=True)
        self._downloaded = rows

    @torch.no_grad()
    def _upload(self, rows: int) -> None:
        """Each rank copies its shard of the rows to the device."""
        rank = self._partition.sharding.mesh.rank
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for blocks, parts in zip(self.rows[:rows], self._parts, strict=False):
                hosts = self._whole.block_views(blocks)
                for site, partition in self._partition.pairs.items():
                    a, b = parts[site]
                    a.copy_(partition.a.shard(hosts[f"{site}.a"], rank))
                    b.copy_(partition.b.shard(hosts[f"{site}.b"], rank))


def _by_site(tensors: Mapping[str, Tensor], sites: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    return {site: (tensors[f"{site}.a"], tensors[f"{site}.b"]) for site in sites}


def _chunks(partition: AdapterPartition, most: int) -> Iterator[list[str]]:
    """Divide the sites into chunks of at most `most` gathered elements each, or of one site."""
    chunk, size = list[str](), 0
    for site in partition.pairs:
        own = partition.gathered(site)
        if chunk and size + own > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(site)
        size += own
    if chunk:
        yield chunk
