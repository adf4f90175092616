"""Attention inside packed sequences that all begin with one KV prefix, for the training of cartridges and of encoders.

Letters: T packed rows, S sequences, H query heads, K key-value heads, D head width, P tokens of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention, causal, explicit, one_kernel, varlen
from coserve.kernels.lora.types import LoraPair


class AfterPrefix(PackedAttention):
    """Causal attention inside each packed sequence and over one prefix before it; differentiable in its keys and
    values. The sequences' positions begin at P.

    On CUDA in 16 bits torch's varlen flash kernel computes all sequences in one launch: it aligns the causal mask to
    the last keys, so a sequence's keys are the prefix and its own. Elsewhere it loops over the sequences.
    """

    def __init__(self, bounds: Sequence[int], tokens: int) -> None:
        """`tokens`: P, the length of the prefix."""
        super().__init__(bounds)
        self._tokens = tokens

    def after(
        self, k_KPD: Tensor, v_KPD: Tensor, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams
    ) -> Tensor:
        """Return what `attend` returns, with the prefix's keys and values before each sequence's own."""
        assert q_HTD.shape[1] == self._bounds[-1], f"expected {self._bounds[-1]} rows, got {q_HTD.shape[1]}"
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
        """Return the attention of one sequence over the prefix's P keys and its own: (H, T, D)."""
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
        lengths = [end - start for start, end in pairwise(self._bounds) if start < end]
        own, with_prefix = (
            torch.tensor([0, *accumulate(before + each for each in lengths)], dtype=torch.int32).to(q.device)
            for before in (0, self._tokens)
        )
        longest = max(lengths)
        return varlen(q, k, v, (own, with_prefix), (longest, longest + self._tokens), params)[0]


class PrefixedAttention(AfterPrefix):
    """Attention after a trained prefix."""

    def __init__(self, bounds: Sequence[int], prefix: Sequence[LoraPair], frozen: int) -> None:
        """`prefix`: the prefix's keys and values of each layer (`LoraWeights.prefix`). Its first `frozen` tokens get no
        gradient."""
        super().__init__(bounds, prefix[0].a_RD.shape[0])
        self._prefix, self._frozen = prefix, frozen

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        pair = self._prefix[layer]
        k_KPD, v_KPD = (
            torch.cat([own[: self._frozen].detach(), own[self._frozen :]])
            .view(self._tokens, k_KTD.shape[0], -1)
            .transpose(0, 1)
            for own in (pair.a_RD, pair.b_OR.T)
        )
        return self.after(k_KPD, v_KPD, q_HTD, k_KTD, v_KTD, params)


class EncodedAttention(PackedAttention):
    """Attention of an encoder and its decoder in one forward pass. The first `encoded` sequences are read by the
    encoder, each alone; each ends with `memory` memory tokens. The others are decoded: each attends to itself and, as
    its prefix, to the memory tokens of all encoded sequences, in their order."""

    def __init__(self, bounds: Sequence[int], encoded: int, memory: int) -> None:
        super().__init__(bounds)
        self._end = end = bounds[encoded]
        self._memory = [at for stop in bounds[1 : encoded + 1] for at in range(stop - memory, stop)]
        self._reading = PackedAttention(bounds[: encoded + 1])
        self._decoding = AfterPrefix([bound - end for bound in bounds[encoded:]], len(self._memory))

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        first, rest = slice(None, self._end), slice(self._end, None)
        read = self._reading.attend(layer, q_HTD[:, first], k_KTD[:, first], v_KTD[:, first], params)
        k_KPD, v_KPD = (own[:, self._memory] for own in (k_KTD, v_KTD))
        decoded = self._decoding.after(k_KPD, v_KPD, q_HTD[:, rest], k_KTD[:, rest], v_KTD[:, rest], params)
        return torch.cat([read, decoded])
