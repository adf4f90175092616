"""Attention of decode steps in fixed device buffers, for CUDA graphs: addresses never change, `load` sets the
contents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams, Pages, TokenRun, Window
from coserve.kernels.attention.triton_paged import launch
from coserve.kernels.attention.triton_paged.plan import Table, decode_items, items_for
from coserve.kernels.gpu.device import device_info, put

KINDS = 4
"""Most kinds of layers (key-value heads, window) in one base: full attention, and windows of different lengths."""


class FusedStaticAttention:
    """`StaticPagedAttention` by the decode kernel; `attend` can be captured, and never waits for the device."""

    reads_pages = True

    def __init__(self, pages: Pages, *, batch: int, max_tokens: int) -> None:
        """`max_tokens`: longest context, the new token included."""
        device, page_tokens = pages.keys[0].device, pages.keys[0].shape[1]
        self.batch, self.max_tokens = batch, max_tokens
        self._pages, self._device = pages, device
        # One buffer, so that one copy fills positions, items of each kind of layer and page table. A column of the
        # table is a sequence. A step uses a prefix of the buffer.
        self._multiprocessors = device_info(device).multiprocessors
        self._most = max(self._most_items(keys.shape[2]) for keys in pages.keys if keys.shape[2])
        self._longest = -(-max_tokens // page_tokens)
        self._items_at = 2 * batch
        self._table_at = self._items_at + KINDS * self._most * 8
        size = self._table_at + self._longest * batch
        self._host = np.zeros(size, dtype=np.int32)
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = self._device_buffer[: self._items_at].view(torch.int64)
        self._table = self._device_buffer[self._table_at :].view(self._longest, batch)
        self._held: list[tuple[int, ...]] = [()] * batch
        self._kinds: list[tuple[int, Window | None]] = []
        self._scratch: dict[tuple[int, int, int], launch.Scratch] = {}
        self._contexts = np.zeros(batch, dtype=np.int64)

    def load(self, runs: Sequence[TokenRun]) -> None:
        """See `StaticPagedAttention`. Cheapest if sequences keep their rows: then only their new pages are written."""
        assert len(runs) <= self.batch, f"expected at most {self.batch} sequences, got {len(runs)}"
        assert all(run.tokens == 1 for run in runs), "expected one new token a sequence"
        positions = self._host[: self._items_at].view(np.int64)
        positions[:] = 0
        positions[: len(runs)] = [run.position for run in runs]
        assert not runs or positions.max() < self.max_tokens, "expected contexts within max_tokens"
        self._contexts[:] = 0
        self._contexts[: len(runs)] = positions[: len(runs)] + 1
        for kind in range(len(self._kinds)):
            self._plan(kind)
        self._hold(runs)
        used = max((len(held) for held in self._held), default=0)
        self._upload(self._table_at + used * self.batch)

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`. T = `batch` new tokens over each sequence's whole context."""
        heads, rows, _ = q_HTD.shape
        assert rows == self.batch, f"expected {self.batch} rows, got {rows}"
        cache = launch.LayerCache(self._pages.keys[layer], self._pages.values[layer], self._table, self._pages.latent)
        kv_heads, width = cache.groups(heads), cache.values.shape[3]
        items, scratch = self._items(kv_heads, params.seen), self._scratch_of(heads, width, kv_heads)
        out_THD = torch.empty(rows, heads, width, dtype=q_HTD.dtype, device=q_HTD.device)
        blocks = launch.decode_blocks_for(q_HTD, cache, self.batch)
        launch.decode(out_THD, q_HTD, k_KTD, v_KTD, cache, items, scratch, params, blocks)
        return out_THD

    def _hold(self, runs: Sequence[TokenRun]) -> None:
        """Update the host's page table: whole columns for new sequences, only new pages for the others."""
        table = self._host[self._table_at :].view().reshape(self._longest, self.batch)
        for row in range(self.batch):
            held, pages = self._held[row], runs[row].pages if row < len(runs) else ()
            if held is pages or held == pages:
                continue
            known = len(held) if pages[: len(held)] == held else 0
            table[known : len(pages), row] = pages[known:]
            self._held[row] = pages

    def _items_slice(self, kind: int) -> slice:
        at = self._items_at + kind * self._most * 8
        return slice(at, at + self._most * 8)

    def _plan(self, kind: int) -> None:
        """Cut the sequences into items for one kind of layer, on the host."""
        kv_heads, window = self._kinds[kind]
        rows = np.arange(self.batch, dtype=np.int64)
        items: Table = decode_items(
            self._contexts, rows, window, self._most_items(kv_heads), kv_heads, self._multiprocessors
        )
        to = self._host[self._items_slice(kind)].reshape(self._most, 8)
        to[: len(items)] = items
        to[len(items) :, 0] = -1

    def _items(self, kv_heads: int, window: Window | None) -> Tensor:
        """Return the items of a kind of layer: (W, 8), W fixed.

        A new kind is planned and copied at once, so run a warm-up before a capture.
        """
        kind = kv_heads, window
        if kind not in self._kinds:
            assert len(self._kinds) < KINDS, f"expected at most {KINDS} kinds of layers"
            captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not captured, "expected a warm-up ahead of the capture"
            self._kinds.append(kind)
            self._plan(len(self._kinds) - 1)
            self._upload(self._table_at)
        at = self._items_slice(self._kinds.index(kind))
        return self._device_buffer[at].view(self._most, 8)[: self._most_items(kv_heads)]

    def _upload(self, size: int) -> None:
        put(torch.from_numpy(self._host[:size]), self._device_buffer[:size])

    def _scratch_of(self, heads: int, width: int, kv_heads: int) -> launch.Scratch:
        kind = heads, width, kv_heads
        if kind not in self._scratch:
            self._scratch[kind] = launch.decode_scratch(self._most, heads, width, self.batch, kv_heads, self._device)
        return self._scratch[kind]

    def _most_items(self, kv_heads: int) -> int:
        return items_for(self.batch, kv_heads, self._multiprocessors)
