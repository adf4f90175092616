"""The KV cache: what attention sees of the pool's pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from coserve.errors import ConfigError
from coserve.kernels.attention.backend import (
    attention_notes,
    mixed_attention,
    paged_attention,
    reads_only_written_slots,
    static_attention,
)
from coserve.kernels.attention.interface import (
    Attention,
    MixedAttention,
    MixedCapacity,
    Pages,
    StaticPagedAttention,
    TokenRun,
)
from coserve.memory.buffer import PageBuffer, page_layout

CPU_TOKENS = 16384
"""Tokens that the pool holds on CPU unless told otherwise."""


class HasKv(Protocol):
    """What the cache must know of the base."""

    @property
    def kv_shapes(self) -> list[tuple[int, int]]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


class KvCache:
    """Keys and values of each layer, `(P + 1, page_tokens, K, D)` with K and D that layer's own: views of one buffer.

    The last page belongs to nobody and stays zero: attention reads it where a table is longer than its sequence.
    """

    def __init__(
        self,
        kv_shapes: Sequence[tuple[int, int]],
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layout = page_layout(kv_shapes, page_tokens, dtype)
        self.buffer = PageBuffer(pages, layout.page_bytes, device)
        self.pool = self.buffer.pool
        self.page_tokens = page_tokens
        self.notes = attention_notes(device, dtype)
        self._clean = not reads_only_written_slots(device, dtype)
        rows = self.buffer.bytes.view(dtype)

        def views(places: Sequence[int]) -> tuple[torch.Tensor, ...]:
            """(P + 1, page_tokens, K, D) of each layer; from page to page the stride is that of the whole page."""
            found = []
            for place, (heads, width) in zip(places, kv_shapes, strict=True):
                first, size = place // dtype.itemsize, page_tokens * heads * width
                found.append(rows[:, first : first + size].view(pages + 1, page_tokens, heads, width))
            return tuple(found)

        self._pages = Pages(views(layout.keys), views(layout.values))

    @classmethod
    def for_base(cls, base: HasKv, tokens: int, page_tokens: int) -> KvCache:
        """A cache for at least `tokens` tokens.

        Raises:
            ConfigError: no capacity for one page.
        """
        if tokens < 1:
            raise ConfigError(f"expected capacity for at least 1 token in the KV pool, got {tokens}", field="kv_tokens")
        pages = -(-tokens // page_tokens)
        return cls(base.kv_shapes, pages=pages, page_tokens=page_tokens, dtype=base.dtype, device=base.device)

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.pool.total * self.page_tokens

    @property
    def free_pages(self) -> int:
        """Pages that can be taken."""
        return self.pool.free_pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages, or None when fewer are free. Nothing that an earlier holder left in them can be seen.

        Plain torch weighs slots that are not written yet by exactly 0; a NaN would survive that, so it gets zeros.
        """
        pages = self.pool.allocate(n)
        if pages and self._clean:
            self.buffer.bytes.index_fill_(0, torch.tensor(pages).to(self.buffer.device), 0)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def label(self, page: int, key: bytes) -> None:
        """Let `find` hand out a held page whose slots are all written."""
        self.pool.label(page, key)

    def unlabel(self, page: int) -> None:
        """`find` no longer hands out this page, which is held."""
        self.pool.unlabel(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys that are known, held once more."""
        return self.pool.find(keys)

    def attention(self, runs: Sequence[TokenRun]) -> Attention:
        """Attention of one packed step, which writes the step's keys and values into the pages."""
        return paged_attention(self._pages, runs)

    def static_attention(self, batch: int, max_tokens: int) -> StaticPagedAttention:
        """Attention of decode steps of up to `batch` sequences and `max_tokens` of context, for a CUDA graph to keep."""
        return static_attention(self._pages, batch=batch, max_tokens=max_tokens)

    def mixed_attention(self, capacity: MixedCapacity) -> MixedAttention:
        """Attention of steps of any mix that the capacity holds, for a CUDA graph to keep."""
        return mixed_attention(self._pages, capacity)
