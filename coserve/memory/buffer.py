"""The page pool's memory: one tensor of pages. A page holds the KV of some tokens in all layers, or a piece of an
adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coserve.kernels.attention.interface import KvShape
from coserve.kernels.gpu.device import to_device
from coserve.kernels.quantized.fp8 import refuse_unusable
from coserve.memory.pages import PagePool, Span

ALIGNMENT = 128
"""Bytes: a cache line of the GPU. Each layer's keys and values, and each matrix of an adapter, start at a multiple."""


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PageLayout:
    """Offsets in bytes of each layer's keys and values in a page."""

    page_bytes: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


def page_layout(kv_shapes: Sequence[KvShape], page_tokens: int, dtype: torch.dtype) -> PageLayout:
    """The layout of pages of `page_tokens` tokens for layers of these shapes, which may differ."""
    at, keys, values = 0, list[int](), list[int]()
    for shape in kv_shapes:
        for offsets, width in ((keys, shape.keys), (values, 0 if shape.latent else shape.values)):
            offsets.append(at)
            at += aligned(page_tokens * shape.heads * width * dtype.itemsize)
    return PageLayout(at, tuple(keys), tuple(values))


def cache_dtype(setting: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of cached keys and values of a base of `dtype`. `setting`: as `--kv-cache-dtype`.

    Raises:
        ConfigError: fp8 on a GPU that does not support it.
    """
    if setting == "auto":
        return dtype
    refuse_unusable(device, "kv_cache_dtype")
    return torch.float8_e4m3fn


class PageBuffer:
    """The memory of P pages, plus one that is never allocated and stays zero; `pool` keeps track of which are in use.

    All writes but those to quiet spans are on the current stream, as are the launches of steps. So a page may be reused
    while an earlier step still reads its old content.
    """

    def __init__(self, pages: int, page_bytes: int, device: torch.device) -> None:
        assert page_bytes % ALIGNMENT == 0, f"expected pages of whole lines, got {page_bytes} bytes"
        self.pool = PagePool(pages)
        self.page_bytes = page_bytes
        self.bytes = torch.zeros(pages + 1, page_bytes, dtype=torch.uint8, device=device)
        """(P + 1, page_bytes)."""
        self._words = self.bytes.view(torch.int64)
        """`bytes` in the largest numbers that all indexing kernels copy: (P + 1, page_bytes / 8)."""
        self._copied = False
        """Whether the last step copied pages."""
        self._busy: NDArray[np.bool_] | None = None
        """(P): pages that the step in flight may use; None: unknown, as no step was launched, pages have moved since
        then, or the step before it copied some."""

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def pages_for(self, size: int) -> int:
        """Number of consecutive pages that hold `size` bytes."""
        return -(-size // self.page_bytes)

    def allocate_span(
        self, pages: int, evicted: Callable[[], None] = lambda: None
    ) -> tuple[Span, dict[int, int]] | None:
        """Allocate as `PagePool.allocate_span` does, and copy the contents of pages that move."""
        allocated = self.pool.allocate_span(pages, evicted)
        if allocated is not None:
            self.move(allocated[1])
        return allocated

    def move(self, moved: Mapping[int, int]) -> None:
        """Copy pages to others. `moved`: old page -> new page."""
        if moved:
            self._busy = None
            places = to_device(torch.tensor([list(moved), list(moved.values())]), self.device)
            self._words.index_copy_(0, places[1], self._words.index_select(0, places[0]))

    def write(self, pages: Sequence[int], given: Tensor) -> None:
        """Copy `given` (N, page_bytes) uint8 into N pages, in stream order."""
        places = to_device(torch.tensor(pages), self.device)
        self._words.index_copy_(0, places, given.view(torch.int64))

    def read(self, pages: Sequence[int], to: Tensor) -> None:
        """Copy N pages into `to` (N, page_bytes) uint8, in stream order."""
        places = to_device(torch.tensor(pages), self.device)
        torch.index_select(self._words, 0, places, out=to.view(torch.int64))

    def step_begins(self) -> None:
        """Call it before each launch of a step, when all steps before the one in flight have ended."""
        self._busy = None if self._copied else self.pool.in_use()
        self._copied = False

    def step_copies(self) -> None:
        """Call it when the step being launched copies pages that may be free before the next launch."""
        self._copied = True

    def is_quiet(self, span: Span) -> bool:
        """Whether no work on the device uses the span's pages: the step in flight does not, and no pages have moved
        since its launch."""
        return self._busy is not None and not self._busy[span.first : span.first + span.pages].any()

    def of(self, span: Span) -> Tensor:
        """The span's memory: (N) uint8."""
        return self.bytes[span.first : span.first + span.pages].view(-1)
