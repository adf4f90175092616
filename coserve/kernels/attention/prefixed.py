"""Attention inside packed sequences that all begin with one trained KV prefix, for the training of cartridges.

Letters: T packed rows, S sequences, H query heads, K key-value heads, D head width, P tokens of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention, causal, explicit, one_kernel
from coserve.kernels.lora.types import LoraPair


class PrefixedAttention(PackedAttention):
    """Causal attention inside each packed sequence and over the prefix before it; differentiable in the prefix's keys
    and values. The sequences' positions begin at P.

    On CUDA in 16 bits torch's varlen flash kernel computes all sequences in one launch: it aligns the causal mask to
    the last keys, so a sequence's keys are the prefix and its own. Elsewhere a loop over sequences does.
    """

    def __init__(self, bounds: Sequence[int], prefix: Sequence[LoraPair], frozen: int) -> None:
        """`prefix`: of each layer (`LoraWeights.prefix`), of whose tokens the first `frozen` get no gradient."""
        super().__init__(bounds)
        self._prefix, self._frozen = prefix, frozen
        self._tokens = prefix[0].a_RD.shape[0]

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`."""
        assert q_HTD.shape[1] == self._bounds[-1], f"expected {self._bounds[-1]} rows, got {q_HTD.shape[1]}"
        pair = self._prefix[layer]
        before = [
            torch.cat([own[: self._frozen].detach(), own[self._frozen :]]).view(self._tokens, k_KTD.shape[0], -1)
            for own in (pair.a_RD, pair.b_OR.T)
        ]
        k_KPD, v_KPD = (own.transpose(0, 1) for own in before)
        spans = [(start, end) for start, end in pairwise(self._bounds) if start < end]
        keys, values = (
            [torch.cat([first, own[:, start:end]], 1) for start, end in spans]
            for first, own in ((k_KPD, k_KTD), (v_KPD, v_KTD))
        )
        if one_kernel(q_HTD, v_KTD, params) and not params.chunked:
            return self._flash_prefixed(q_HTD, torch.cat(keys, 1), torch.cat(values, 1), params)
        outputs = [
            self._one(q_HTD[:, start:end], k, v, params) for (start, end), k, v in zip(spans, keys, values, strict=True)
        ]
        return torch.cat(outputs, 1).transpose(0, 1)

    def _one(self, q_HTD: Tensor, k_KND: Tensor, v_KND: Tensor, params: AttentionParams) -> Tensor:
        """The attention of one sequence, whose keys are the prefix's P and its own: (H, T, D)."""
        group = q_HTD.shape[0] // k_KND.shape[0]
        k_HND, v_HND = (own.repeat_interleave(group, 0) for own in (k_KND, v_KND))
        if params.softcap is not None or params.sinks is not None:
            return explicit(q_HTD, k_HND, v_HND, params)
        mask = causal(q_HTD.shape[1], params.seen, q_HTD.device, self._tokens)
        return scaled_dot_product_attention(
            q_HTD[None], k_HND[None], v_HND[None], attn_mask=mask, scale=params.scaling
        )[0]

    def _flash_prefixed(self, q_HTD: Tensor, k_KND: Tensor, v_KND: Tensor, params: AttentionParams) -> Tensor:
        q, k, v = (own.transpose(0, 1) for own in (q_HTD, k_KND, v_KND))
        lengths, window = [end - start for start, end in pairwise(self._bounds) if start < end], params.window
        own, with_prefix = (
            torch.tensor([0, *accumulate(before + each for each in lengths)], dtype=torch.int32).to(q.device)
            for before in (0, self._tokens)
        )
        out, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            own,
            with_prefix,
            max(lengths),
            max(lengths) + self._tokens,
            0.0,
            window is None,
            False,
            scale=params.scaling,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )
        found: Tensor = out
        return found
