"""Attention inside packed sequences, without a cache: what training runs.

Letters: T packed rows, H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coserve.kernels.attention.interface import AttentionParams


class PackedAttention:
    """Causal attention inside each packed sequence; differentiable, no cache.

    On CUDA in 16 bits one kernel of torch's does all sequences; soft-capping and sinks go sequence by sequence.

    `bounds` (S + 1) ascends from 0 to the number of rows; sequence s is the rows `[bounds[s], bounds[s + 1])`.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        assert bounds[0] == 0, "expected bounds to start at 0"
        assert all(a <= b for a, b in pairwise(bounds)), "expected ascending bounds"
        self._bounds = tuple(bounds)
        self._longest = max((b - a for a, b in pairwise(bounds)), default=0)
        self._on_device: dict[torch.device, Tensor] = {}

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`."""
        scaling, window, softcap, sinks = params
        assert q_HTD.shape[1] == self._bounds[-1], f"expected {self._bounds[-1]} rows, got {q_HTD.shape[1]}"
        if softcap is None and sinks is None and _varlen_takes(q_HTD):
            return self._varlen(q_HTD, k_KTD, v_KTD, scaling, window)
        group = q_HTD.shape[0] // k_KTD.shape[0]
        k_HTD, v_HTD = k_KTD, v_KTD
        if group > 1:
            k_HTD, v_HTD = k_KTD.repeat_interleave(group, 0), v_KTD.repeat_interleave(group, 0)
        outputs = []
        for start, end in pairwise(self._bounds):
            if start == end:
                continue
            q, k, v = q_HTD[:, start:end], k_HTD[:, start:end], v_HTD[:, start:end]
            plain = window is None or window >= end - start
            if softcap is not None or sinks is not None:
                outputs.append(_explicit(q, k, v, scaling, window, softcap, sinks))
            elif plain:
                # A leading batch axis: without it torch takes the unfused way.
                full = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)
                outputs.append(full[0])
            else:
                mask = _causal(end - start, window, q.device)
                windowed = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)
                outputs.append(windowed[0])
        return torch.cat(outputs, 1).transpose(0, 1)

    def _varlen(self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None) -> Tensor:
        """All sequences in one call of torch's own kernel: (T, H, D)."""
        device = q_HTD.device
        if device not in self._on_device:
            host = torch.tensor(self._bounds, dtype=torch.int32).pin_memory()
            self._on_device[device] = host.to(device, non_blocking=True)
        bounds, longest = self._on_device[device], self._longest
        q, k, v = (x.transpose(0, 1) for x in (q_HTD, k_KTD, v_KTD))
        # What `torch.nn.attention.varlen` calls; the op around it takes the host longer than the launches do.
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, window is None, False,
            scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
        return out


def _varlen_takes(q_HTD: Tensor) -> bool:
    """Whether torch's kernel for packed sequences takes such queries."""
    width = q_HTD.shape[2]
    return q_HTD.is_cuda and q_HTD.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def _causal(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T): whether row t sees key j."""
    at = torch.arange(tokens, device=device)
    seen = at[None] <= at[:, None]
    return seen if window is None else seen & (at[None] > at[:, None] - window)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One sequence, the softmax in fp32: (H, T, D)."""
    scores = ((q * scaling) @ k.transpose(1, 2)).float()
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~_causal(q.shape[1], window, q.device), -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(-1).to(v.dtype) @ v
