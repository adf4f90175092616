"""The KV cache: views of the pool's pages for attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from coserve.core.errors import ConfigError
from coserve.core.gpu_memory import PoolShape
from coserve.kernels.attention.backend import (
    attention_notes,
    fused,
    mixed_attention,
    paged_attention,
    static_attention,
)
from coserve.kernels.attention.expanded import ExpandedAttention, StepTerms, long_chunks, most_expanded
from coserve.kernels.attention.interface import (
    Attention,
    KvShape,
    MixedAttention,
    MixedCapacity,
    Pages,
    StaticPagedAttention,
    TokenRun,
    as_cached,
)
from coserve.kernels.gpu.device import to_device
from coserve.kernels.lora.types import LoraPair
from coserve.kernels.recurrent.interface import StateShape
from coserve.kernels.recurrent.wrappers import MixedWithRecurrence, StaticWithRecurrence, WithRecurrence
from coserve.memory.buffer import PageBuffer, cache_dtype, page_layout
from coserve.memory.state_pool import StatePool, StateSnapshots

CPU_TOKENS = 16384
"""Default size of the pool on a CPU, in tokens."""


BY_TOKENS = "generation: the recurrences of a prompt's layers run token by token, not in chunks"


NOT_EXPANDED = "generation: prompts behind more than {} tokens of contexts in a step are slower: they absorb latents"


class HasKv(Protocol):
    """The attributes of `model.Base` that the cache needs."""

    @property
    def kv_shapes(self) -> list[KvShape]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def states(self) -> Mapping[int, StateShape]: ...


class KvCache:
    """Keys and values of each layer, `(P + 1, page_tokens, K, D)` with that layer's sizes: views of one buffer.

    The last page is never allocated and stays zero: attention reads it where a page table is longer than its sequence.
    """

    def __init__(
        self,
        kv_shapes: Sequence[KvShape],
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
    ) -> None:
        """`states`: the recurrent states of a base that has some."""
        self.states = states
        layout = page_layout(kv_shapes, page_tokens, dtype)
        self.buffer = PageBuffer(pages, layout.page_bytes, device)
        self.pool = self.buffer.pool
        self.page_tokens = page_tokens
        self.snapshots = None if states is None else StateSnapshots(states, self.buffer)
        self.notes = attention_notes(device, dtype) + (() if states is None else (BY_TOKENS,))
        self._clean = not fused(device, dtype)
        rows = self.buffer.bytes.view(dtype)

        sources = [layer if shape.source is None else shape.source for layer, shape in enumerate(kv_shapes)]

        def views(places: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
            """One view per layer, (P + 1, page_tokens, *size), with the whole page as stride between pages. A layer
            that reads another's keys and values has that one's view, and writes what is there."""
            found = []
            for source in sources:
                heads, width = sizes[source]
                first, size = places[source] // dtype.itemsize, page_tokens * heads * width
                found.append(rows[:, first : first + size].view(pages + 1, page_tokens, heads, width))
            return tuple(found)

        keys = views(layout.keys, [(shape.heads, shape.keys) for shape in kv_shapes])
        if latent := any(shape.latent for shape in kv_shapes):
            assert all(shape.latent or not shape.heads for shape in kv_shapes), "expected latents in all layers"
            values = tuple(own[..., : shape.values] for own, shape in zip(keys, kv_shapes, strict=True))
        else:
            values = views(layout.values, [(shape.heads, shape.values) for shape in kv_shapes])
        self.most_expanded = most_expanded(kv_shapes)
        if 0 < self.most_expanded < pages * page_tokens:
            self.notes += (NOT_EXPANDED.format(self.most_expanded),)
        self.views = Pages(keys, values, latent)
        """Keys and values of each layer."""

    @classmethod
    def for_base(
        cls, base: HasKv, tokens: int, page_tokens: int, *, sequences: int = 1, kv_cache_dtype: str = "auto"
    ) -> KvCache:
        """A cache for at least `tokens` tokens, and the recurrent states of `sequences` sequences. `kv_cache_dtype`: as
        the setting; states have the base's type.

        Raises:
            ConfigError: `tokens` is below 1, or see `cache_dtype`.
        """
        if tokens < 1:
            raise ConfigError(f"expected capacity for at least 1 token in the KV pool, got {tokens}", field="kv_tokens")
        pages = -(-tokens // page_tokens)
        states = StatePool(base.states, slots=sequences, dtype=base.dtype, device=base.device) if base.states else None
        dtype = cache_dtype(kv_cache_dtype, base.dtype, base.device)
        return cls(base.kv_shapes, pages=pages, page_tokens=page_tokens, dtype=dtype, device=base.device, states=states)

    @property
    def shape(self) -> PoolShape:
        """Sizes of the pool for planning, without the page that stays zero."""
        return PoolShape(self.pool.total, self.buffer.page_bytes, self.page_tokens)

    @property
    def tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.pool.total * self.page_tokens

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated."""
        return self.pool.free_pages

    @property
    def state_pages(self) -> int:
        """Pages that a snapshot of a sequence's recurrent state takes; 0: the base has none."""
        return 0 if self.snapshots is None else self.snapshots.pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages, or None if fewer are free."""
        pages = self.pool.allocate(n)
        self.clear(pages or ())
        return pages

    def clear(self, pages: Sequence[int]) -> None:
        """Make pages ready to be written.

        The torch backend multiplies slots that are not written yet by 0, which keeps a NaN; so its pages are zeroed.
        """
        if self._clean and pages:
            self.buffer.bytes.index_fill_(0, torch.tensor(pages).to(self.buffer.device), 0)

    def free(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def write_prefix(self, pages: Sequence[int], prefix: Sequence[LoraPair], first: int) -> None:
        """Copy a KV prefix's tokens from `first` on into the pages of a sequence, in stream order. `prefix`: see
        `LoraWeights.prefix`."""
        device, size = self.buffer.device, self.page_tokens
        at = torch.arange(first, prefix[0].a_RD.shape[0], device=device)
        page_T, slot_T = to_device(torch.tensor(pages), device)[at // size], at % size
        for keys, values, pair in zip(self.views.keys, self.views.values, prefix, strict=True):
            k_PW, v_PW = pair.a_RD.to(device, non_blocking=True), pair.b_OR.to(device, non_blocking=True).T
            keys[page_T, slot_T] = as_cached(k_PW[first:].view(-1, *keys.shape[2:]), keys.dtype)
            values[page_T, slot_T] = as_cached(v_PW[first:].reshape(-1, *values.shape[2:]), values.dtype)

    def label(self, page: int, key: bytes) -> None:
        """See `PagePool.label`. All slots of the page must be written."""
        self.pool.label(page, key)

    def unlabel(self, page: int) -> None:
        self.pool.unlabel(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        return self.pool.find(keys)

    def hold(self, pages: Iterable[int]) -> None:
        self.pool.hold(pages)

    def expands(self, runs: Sequence[TokenRun]) -> bool:
        """Whether a step's attention expands latents, which cannot be captured (`attention.expanded`)."""
        return bool(long_chunks(runs, self.most_expanded))

    def attention(self, runs: Sequence[TokenRun], terms: StepTerms | None = None) -> Attention:
        """Attention of one packed step. It writes the step's keys and values into the pages, and comes with the step's
        recurrence if the base has states. `terms`: the step's adapters; None: there are none."""
        attention: Attention
        if long := long_chunks(runs, self.most_expanded):
            attention = ExpandedAttention(self.views, runs, long, paged_attention, terms)
        else:
            attention = paged_attention(self.views, runs)
        return attention if self.states is None else WithRecurrence(attention, self.states.recurrence(runs))

    def static_attention(self, batch: int, max_tokens: int) -> StaticPagedAttention:
        """Attention with static buffers, for a CUDA graph of decode steps: up to `batch` sequences with `max_tokens` of
        context."""
        attention = static_attention(self.views, batch=batch, max_tokens=max_tokens)
        if self.states is None:
            return attention
        return StaticWithRecurrence(
            attention, self.states.static_recurrence(tokens=batch, sequences=batch, decodes=True)
        )

    def mixed_attention(self, capacity: MixedCapacity) -> MixedAttention:
        """Attention with static buffers, for a CUDA graph of mixed steps up to `capacity`."""
        attention = mixed_attention(self.views, capacity)
        if self.states is None:
            return attention
        tokens, sequences = capacity.tokens, capacity.sequences
        recurrence = self.states.static_recurrence(tokens=tokens, sequences=sequences, decodes=False)
        return MixedWithRecurrence(attention, recurrence)
