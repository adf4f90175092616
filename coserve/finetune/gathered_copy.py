"""Host copy of a whole adapter's state, gathered from the shards that the tensor-parallel ranks train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coserve.finetune.flat_tensors import FlatLayout
from coserve.finetune.host_copy import HostCopy
from coserve.model.parallel.adapter import AdapterPartition

GATHERED = 1 << 24
"""Elements of the whole adapter gathered at once."""


class GatheredCopy(HostCopy):
    """A host copy whose `rows` hold the whole adapter, while the source holds this rank's shard. After a download,
    every rank has the same rows."""

    def __init__(
        self, source: Sequence[Tensor], layout: FlatLayout, whole: FlatLayout, partition: AdapterPartition
    ) -> None:
        """`layout`: of the source's rows, all fp32; `whole`: of the rows in host memory. Both name their tensors
        `<site>.a` and `<site>.b`."""
        super().__init__(source, [whole.block] * len(source), whole.size)
        self._layout, self._whole, self._partition = layout, whole, partition

    @torch.no_grad()
    def _download(self, rows: int) -> None:
        """Gather some sites at a time, on all ranks together; the copies to the host run on the side stream."""
        for blocks, row_N in zip(self.rows[:rows], self._source, strict=False):
            parts, hosts = self._layout.views(row_N), self._whole.block_views(blocks)
            for sites in self._chunks():
                gathered = self._partition.gather({site: (parts[f"{site}.a"], parts[f"{site}.b"]) for site in sites})
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):  # None: no effect
                    for site, both in gathered.items():
                        for part, tensor in zip("ab", both, strict=True):
                            hosts[f"{site}.{part}"].copy_(tensor, non_blocking=True)
                            if self._stream is not None:
                                tensor.record_stream(self._stream)

    @torch.no_grad()
    def _upload(self, rows: int) -> None:
        """Each rank copies its shard of the rows to the device."""
        rank = self._partition.sharding.mesh.rank
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for blocks, row_N in zip(self.rows[:rows], self._source, strict=False):
                parts, hosts = self._layout.views(row_N), self._whole.block_views(blocks)
                for site, partition in self._partition.pairs.items():
                    parts[f"{site}.a"].copy_(partition.a.shard(hosts[f"{site}.a"], rank))
                    parts[f"{site}.b"].copy_(partition.b.shard(hosts[f"{site}.b"], rank))

    def _chunks(self) -> Iterator[list[str]]:
        chunk, size = list[str](), 0
        for site, partition in self._partition.pairs.items():
            chunk.append(site)
            size += sum(own.rows.size * own.columns.size for own in (partition.a, partition.b))
            if size >= GATHERED:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
