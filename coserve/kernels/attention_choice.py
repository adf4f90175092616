"""The one place that chooses how generation attends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coserve.kernels.attention import PagedAttention, Pages
from coserve.kernels.attention_static import StaticPagedAttention
from coserve.kernels.tiles import Run


def paged_attention(pages: Pages, runs: Sequence[Run]) -> PagedAttention:
    """Attention of one packed step of any mix: decodes and chunks of prompts."""
    return PagedAttention(pages, runs)


def static_attention(pages: Pages, *, batch: int, max_tokens: int) -> StaticPagedAttention:
    """Attention of decode steps of one batch size, in buffers that a CUDA graph may keep."""
    return StaticPagedAttention(pages, batch=batch, max_tokens=max_tokens)


def attention_notes(device: torch.device) -> tuple[str, ...]:
    """What runs slower than it could on `device`, in words for an operator."""
    if device.type == "cuda":
        return ("attention: plain torch over gathered pages, slower than a fused paged kernel",)
    return ()
