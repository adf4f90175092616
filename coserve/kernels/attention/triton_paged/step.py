"""Attention of one packed generation step by the fused kernels: any mix of decodes and prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams, Pages, TokenRun, Window
from coserve.kernels.attention.triton_paged import launch
from coserve.kernels.attention.triton_paged.plan import (
    Table,
    decode_items,
    items_for,
    page_table,
    placed,
    prefill_tiles,
)
from coserve.kernels.gpu.device import device_info


def upload(host: Table, device: torch.device) -> Tensor:
    """Copy to `device` in stream order, without waiting for it."""
    tensor = torch.from_numpy(host)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()


class FusedPagedAttention:
    """Attention of one generation step by the fused kernels. Built once a step, as `PagedAttention` is.

    It writes the step's keys and values into pages and reads each sequence's pages. Runs of one token use the decode
    kernel, longer ones the prefill kernel. The host plans at the first layer of each kind (heads, window) and copies
    the plan without waiting for the device.
    """

    reads_pages = True

    def __init__(self, pages: Pages, runs: Sequence[TokenRun]) -> None:
        self._pages = pages
        self._device = pages.keys[0].device
        self._multiprocessors = device_info(self._device).multiprocessors
        self._rows = sum(run.tokens for run in runs)
        self._decodes, self._chunks = placed(runs)
        self._chunk_tokens = sum(run.tokens for _, _, run in self._chunks)
        self._table = upload(page_table(runs), self._device)
        self._items: dict[tuple[int, Window | None], Tensor] = {}
        self._tiles: dict[tuple[launch.Blocks, int, int, int, Window | None], tuple[Tensor, launch.Scratch | None]] = {}
        self._scratch: dict[tuple[int, int, int], launch.Scratch] = {}

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`. T new tokens over each sequence's whole context."""
        return self._computed(layer, q_HTD, (k_KTD, v_KTD), params)

    def read(self, layer: int, q_HTD: Tensor, params: AttentionParams) -> Tensor:
        """See `PagedStep`."""
        assert not self._decodes, "expected prompt chunks"
        return self._computed(layer, q_HTD, None, params)

    def _computed(
        self, layer: int, q_HTD: Tensor, new: tuple[Tensor, Tensor] | None, params: AttentionParams
    ) -> Tensor:
        """`new`: keys and values to write first."""
        heads, rows, _ = q_HTD.shape
        assert rows == self._rows, f"expected {self._rows} rows, got {rows}"
        cache = launch.LayerCache(self._pages.keys[layer], self._pages.values[layer], self._table, self._pages.latent)
        kv_heads, width = cache.groups(heads), cache.values.shape[3]
        out_THD = torch.empty(rows, heads, width, dtype=q_HTD.dtype, device=q_HTD.device)
        if self._chunks:
            work = self._chunk_tokens * heads
            blocks = launch.prefill_blocks(max(q_HTD.shape[2], width), q_HTD.dtype, work, self._device)
            tiles, scratch = self._tiles_of(blocks, heads, kv_heads, width, params.seen)
            if new is not None:
                launch.store(*new, cache, tiles, launch.tile_tokens(heads // kv_heads, blocks))
            launch.prefill(out_THD, q_HTD, cache, tiles, scratch, params, blocks)
        if self._decodes and new is not None:
            items, scratch = self._items_of(kv_heads, params.seen), self._scratch_of(heads, width, kv_heads)
            blocks = launch.decode_blocks_for(q_HTD, cache, len(self._decodes))
            launch.decode(out_THD, q_HTD, *new, cache, items, scratch, params, blocks)
        return out_THD

    def _items_of(self, kv_heads: int, window: Window | None) -> Tensor:
        kind = kv_heads, window
        if kind not in self._items:
            contexts = np.array([run.position + 1 for _, _, run in self._decodes], dtype=np.int64)
            rows = np.array([row for _, row, _ in self._decodes], dtype=np.int64)
            items = decode_items(contexts, rows, window, self._most_items(kv_heads), kv_heads, self._multiprocessors)
            columns = np.array([column for column, _, _ in self._decodes], dtype=np.int32)
            items[:, 0] = columns[items[:, 0]]
            self._items[kind] = upload(items, self._device)
        return self._items[kind]

    def _tiles_of(
        self, blocks: launch.Blocks, heads: int, kv_heads: int, width: int, window: Window | None
    ) -> tuple[Tensor, launch.Scratch | None]:
        kind = blocks, heads, kv_heads, width, window
        if kind not in self._tiles:
            group = heads // kv_heads
            tiles = prefill_tiles(
                self._chunks, launch.tile_tokens(group, blocks), window, kv_heads, self._multiprocessors
            )
            scratch = None
            if (tiles[:, 7] > 1).any():
                scratch = launch.prefill_scratch(len(tiles), group, kv_heads, width, blocks, self._device)
            self._tiles[kind] = upload(tiles, self._device), scratch
        return self._tiles[kind]

    def _scratch_of(self, heads: int, width: int, kv_heads: int) -> launch.Scratch:
        kind = heads, width, kv_heads
        if kind not in self._scratch:
            items = self._most_items(kv_heads)
            self._scratch[kind] = launch.decode_scratch(
                items, heads, width, self._table.shape[1], kv_heads, self._device
            )
        return self._scratch[kind]

    def _most_items(self, kv_heads: int) -> int:
        return items_for(len(self._decodes), kv_heads, self._multiprocessors)
