"""Chooses the attention backend for generation. No other module makes this choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coserve.kernels.attention.interface import (
    MixedAttention,
    MixedCapacity,
    PagedStep,
    Pages,
    StaticPagedAttention,
    TokenRun,
)
from coserve.kernels.attention.torch_paged.paged import GatheredMixedAttention, GatheredStaticAttention, PagedAttention

FUSED_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn})
"""Dtypes of the KV cache that the Triton kernels support."""


def fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels compute attention. Otherwise, and always on a CPU, plain torch does, which also reads
    slots that were not written: pages must be zeroed before they are used."""
    return device.type == "cuda" and dtype in FUSED_DTYPES


def paged_attention(pages: Pages, runs: Sequence[TokenRun]) -> PagedStep:
    """Return the attention of one packed step: any mix of decodes and prompt chunks."""
    if not fused(pages.keys[0].device, pages.keys[0].dtype):
        return PagedAttention(pages, runs)
    from coserve.kernels.attention.triton_paged.step import FusedPagedAttention  # needs Triton, which not every CPU has

    return FusedPagedAttention(pages, runs)


def static_attention(pages: Pages, *, batch: int, max_tokens: int) -> StaticPagedAttention:
    """Return the attention of decode steps of one batch size, in buffers that a CUDA graph may keep."""
    if not fused(pages.keys[0].device, pages.keys[0].dtype):
        return GatheredStaticAttention(pages, batch=batch, max_tokens=max_tokens)
    from coserve.kernels.attention.triton_paged.decode_steps import FusedStaticAttention  # as above: needs Triton

    return FusedStaticAttention(pages, batch=batch, max_tokens=max_tokens)


def mixed_attention(pages: Pages, capacity: MixedCapacity) -> MixedAttention:
    """Return the attention of mixed steps, in buffers that a CUDA graph may keep."""
    if not fused(pages.keys[0].device, pages.keys[0].dtype):
        return GatheredMixedAttention(pages, capacity)
    from coserve.kernels.attention.triton_paged.mixed_steps import FusedMixedAttention  # as above: needs Triton

    return FusedMixedAttention(pages, capacity)


def attention_notes(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Describe what runs slower than it could on `device`, for an operator."""
    if device.type == "cuda" and not fused(device, dtype):
        return (f"attention: plain torch over gathered pages, as the fused kernels do not take {dtype}",)
    return ()
