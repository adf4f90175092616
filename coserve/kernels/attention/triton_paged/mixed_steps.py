"""Attention of mixed steps (decodes and prompt chunks) in fixed device buffers, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams, MixedCapacity, Pages, TokenRun, Window
from coserve.kernels.attention.triton_paged import launch
from coserve.kernels.attention.triton_paged.plan import (
    Placed,
    Table,
    decode_items,
    items_for,
    page_table,
    placed,
    prefill_tiles,
    programs_each,
)
from coserve.kernels.gpu.device import device_info, put


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one step for all layers of one kind (heads, window): grids and addresses are fixed, contents
    change."""

    capacity: MixedCapacity
    heads: int
    kv_heads: int
    window: Window | None
    chunks: launch.Blocks
    decodes: launch.Blocks
    table: Tensor
    """int32 (W + N, 8), device: items of decodes, then of chunks."""
    ended: Tensor
    """int32 (W + N, K), device: counters of both kernels."""

    @property
    def most_items(self) -> int:
        """W: most items of a step's decodes."""
        return items_for(self.capacity.sequences, self.kv_heads, self.multiprocessors)

    @property
    def multiprocessors(self) -> int:
        return device_info(self.table.device).multiprocessors

    def load(self, decodes: Sequence[Placed], chunks: Sequence[Placed]) -> None:
        """Plan a step on the host, and copy the plan in stream order."""
        host = np.zeros(self.table.shape, dtype=np.int32)
        items, tiles = host[: self.most_items], host[self.most_items :]
        items[:, 0], tiles[:, 6] = -1, -1
        if decodes:
            found = self._items(decodes)
            items[: len(found)] = found
        if chunks:
            tokens = launch.tile_tokens(self.heads // self.kv_heads, self.chunks)
            found = prefill_tiles(chunks, tokens, self.window, self.kv_heads, self.multiprocessors)
            tiles[: len(found)] = found
        put(torch.from_numpy(host), self.table)

    def _items(self, decodes: Sequence[Placed]) -> Table:
        """Cut the decodes into items, as for a step with the full number of sequences, since the graph's block sizes
        are chosen for that. Missing sequences are inactive."""
        columns, contexts, rows = (np.zeros(self.capacity.sequences, dtype=np.int64) for _ in range(3))
        columns[: len(decodes)] = [column for column, _, _ in decodes]
        rows[: len(decodes)] = [row for _, row, _ in decodes]
        contexts[: len(decodes)] = [run.position + 1 for _, _, run in decodes]
        items = decode_items(contexts, rows, self.window, self.most_items, self.kv_heads, self.multiprocessors)
        items[:, 0] = np.where(items[:, 5] > 0, columns[items[:, 0]], -1)
        return items


def plan_layers(
    capacity: MixedCapacity, heads: int, kv_heads: int, width: int, window: Window | None, q: Tensor
) -> LayerPlan:
    """Make the plan of layers of one kind, for steps within `capacity`. `q`: a tensor of their dtype and device."""
    group, device = heads // kv_heads, q.device
    multiprocessors = device_info(device).multiprocessors
    chunks = launch.prefill_blocks(width, q.dtype, capacity.tokens * heads, device)
    decodes = launch.decode_blocks(
        width, q.dtype, group, programs_each(capacity.sequences, kv_heads, multiprocessors), device
    )
    tiles = capacity.tokens // launch.tile_tokens(group, chunks) + capacity.chunks
    # Keys of chunks are cut only while there is no more than a wave of items.
    size = items_for(capacity.sequences, kv_heads, multiprocessors) + max(tiles, multiprocessors // kv_heads)
    table = torch.zeros(size, 8, dtype=torch.int32, device=device)
    ended = torch.zeros(size, kv_heads, dtype=torch.int32, device=device)
    # Without early launch: programs of an idle grid do not wait for the preceding kernel. If the grid could end before
    # that kernel, the next one, which waits only for this grid, would start too early.
    return LayerPlan(capacity, heads, kv_heads, window, chunks, replace(decodes, pdl=False), table, ended)


class FusedMixedAttention:
    """`MixedAttention` by the fused kernels; `attend` can be captured, and never waits for the device."""

    reads_pages = True

    def __init__(self, pages: Pages, capacity: MixedCapacity) -> None:
        self.capacity = capacity
        self._pages, self._device = pages, pages.keys[0].device
        longest = -(-capacity.context // pages.keys[0].shape[1])
        self._table = torch.zeros(longest, capacity.sequences, dtype=torch.int32, device=self._device)
        self._plans: dict[tuple[int, int, int, Window | None], LayerPlan] = {}
        self._decodes: list[Placed] = []
        self._chunks: list[Placed] = []

    def load(self, runs: Sequence[TokenRun]) -> None:
        """See `MixedAttention`. One copy for the page table, one for each kind of layer."""
        assert self.capacity.holds(runs), "expected a step that the capacity holds"
        self._decodes, self._chunks = placed(runs)
        if runs:
            table = page_table(runs)
            host = np.zeros((len(table), self.capacity.sequences), dtype=np.int32)
            host[:, : len(runs)] = table
            put(torch.from_numpy(host), self._table[: len(host)])
        for plan in self._plans.values():
            plan.load(self._decodes, self._chunks)

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`. T new tokens over each sequence's whole context, zeros for padding."""
        heads, rows, width = q_HTD.shape
        assert rows == self.capacity.tokens, f"expected {self.capacity.tokens} rows, got {rows}"
        cache = launch.LayerCache(self._pages.keys[layer], self._pages.values[layer], self._table, self._pages.latent)
        values_width = cache.values.shape[3]
        plan = self._of(heads, cache.groups(heads), max(width, values_width), params.seen, q_HTD)
        out_THD = torch.zeros(rows, heads, values_width, dtype=q_HTD.dtype, device=q_HTD.device)
        items, tiles = plan.table[: plan.most_items], plan.table[plan.most_items :]
        # Allocated per call: inside the graph's pool, later kernels reuse the memory of each call.
        wave = max(1, plan.multiprocessors // plan.kv_heads)
        held = launch.prefill_parts(
            wave, heads // plan.kv_heads, plan.kv_heads, values_width, plan.chunks, self._device
        )
        ended = plan.ended[plan.most_items :]
        launch.store(k_KTD, v_KTD, cache, tiles, launch.tile_tokens(heads // plan.kv_heads, plan.chunks))
        launch.prefill(out_THD, q_HTD, cache, tiles, launch.Scratch(*held, ended), params, plan.chunks)
        parts = torch.empty(len(items), heads, values_width, dtype=torch.float32, device=self._device)
        stats = torch.empty(len(items), heads, dtype=torch.float32, device=self._device)
        scratch = launch.Scratch(parts, stats, plan.ended)
        launch.decode(out_THD, q_HTD, k_KTD, v_KTD, cache, items, scratch, params, plan.decodes)
        return out_THD

    def _of(self, heads: int, kv_heads: int, width: int, window: Window | None, q: Tensor) -> LayerPlan:
        """Return the plan of a kind of layer. A new kind is planned and copied at once, so run a warm-up before a
        capture."""
        kind = heads, kv_heads, width, window
        if kind not in self._plans:
            captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not captured, "expected a warm-up ahead of the capture"
            self._plans[kind] = plan_layers(self.capacity, *kind, q)
            self._plans[kind].load(self._decodes, self._chunks)
        return self._plans[kind]
