"""The pool's memory: one tensor of pages, each of which holds tokens of all layers, or a piece of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.memory.pages import PagePool, Span

ALIGNMENT = 128
"""Bytes; what is read as one piece begins at a multiple of it (a line of the GPU's cache)."""


def aligned(size: int) -> int:
    """`size` bytes, rounded up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PageLayout:
    """Where in a page the keys and values of its tokens lie, layer by layer. Bytes."""

    page_bytes: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


def page_layout(kv_shapes: Sequence[tuple[int, int]], page_tokens: int, dtype: torch.dtype) -> PageLayout:
    """The layout of pages of `page_tokens` tokens for layers of `(kv_heads, head_dim)`, which may differ."""
    at, keys, values = 0, list[int](), list[int]()
    for heads, width in kv_shapes:
        for places in (keys, values):
            places.append(at)
            at += aligned(page_tokens * heads * width * dtype.itemsize)
    return PageLayout(at, tuple(keys), tuple(values))


class PageBuffer:
    """P pages and one more, which belongs to nobody and stays zero, in one piece; and who holds them (`pool`).

    All writes go through the current stream, the one that steps are launched on. So a page may be taken and written
    while a step that was launched before still reads what it held: the write waits its turn.
    """

    def __init__(self, pages: int, page_bytes: int, device: torch.device) -> None:
        assert page_bytes % ALIGNMENT == 0, f"expected pages of whole lines, got {page_bytes} bytes"
        self.pool = PagePool(pages)
        self.page_bytes = page_bytes
        self.bytes = torch.zeros(pages + 1, page_bytes, dtype=torch.uint8, device=device)
        """(P + 1, page_bytes)."""

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def pages_for(self, size: int) -> int:
        """Pages that `size` bytes in one piece take."""
        return -(-size // self.page_bytes)

    def allocate_span(
        self, pages: int, evicted: Callable[[], None] = lambda: None
    ) -> tuple[Span, dict[int, int]] | None:
        """As `PagePool.allocate_span`; the contents of moved pages are at their new places."""
        taken = self.pool.allocate_span(pages, evicted)
        if taken is not None and taken[1]:
            moved = torch.tensor([list(taken[1]), list(taken[1].values())]).to(self.device)
            self.bytes.index_copy_(0, moved[1], self.bytes.index_select(0, moved[0]))
        return taken

    def of(self, span: Span) -> Tensor:
        """The span's bytes: uint8 (N)."""
        return self.bytes[span.first : span.first + span.pages].view(-1)
