"""Attention inside packed sequences without a cache, for training.

Letters: T packed rows, H query heads, K key-value heads, D head width, E width of values (usually D).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from coserve.kernels.attention.interface import AttentionParams, Window
from coserve.kernels.recurrent.packed import PackedRecurrence


class PackedAttention:
    """Causal attention inside each packed sequence; differentiable, no cache.

    On CUDA in 16 bits, torch's varlen flash kernel computes all sequences in one launch. Soft-capping and sinks fall
    back to a loop over sequences. `bounds` (S + 1) ascends from 0 to the number of rows; sequence s is the rows
    `[bounds[s], bounds[s + 1])`.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        assert bounds[0] == 0, "expected bounds to start at 0"
        assert all(a <= b for a, b in pairwise(bounds)), "expected ascending bounds"
        self._bounds = tuple(bounds)
        self.recurrence = PackedRecurrence(self._bounds)
        self._longest = max((b - a for a, b in pairwise(bounds)), default=0)
        self._on_device: dict[torch.device, Tensor] = {}
        self._chunks: dict[int, PackedAttention] = {}
        self._unused_rng: tuple[Tensor, ...] | None = None
        """The dropout state that torch's kernel expects, although there is no dropout."""

    @property
    def bounds(self) -> tuple[int, ...]:
        return self._bounds

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
        if params.chunked:
            own, params = self._by_chunks(params)
            return own.attend(layer, q_HTD, k_KTD, v_KTD, params)
        scaling, window, softcap, sinks, _ = params
        if one_kernel(q_HTD, v_KTD, params):
            return self._flash(q_HTD, k_KTD, v_KTD, params)[0]
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
                outputs.append(explicit(q, k, v, params))
            elif plain:
                # With a leading batch axis torch takes the fused kernel; without it, the unfused one.
                full = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)
                outputs.append(full[0])
            else:
                mask = causal(end - start, params.seen, q.device)
                windowed = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scaling)
                outputs.append(windowed[0])
        return torch.cat(outputs, 1).transpose(0, 1)

    def attend_keeping(
        self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `attend` without autograd; also return what `gradients` needs of it."""
        if params.chunked:
            own, params = self._by_chunks(params)
            return own.attend_keeping(q_HTD, k_KTD, v_KTD, params)
        if one_kernel(q_HTD, v_KTD, params):
            return self._flash(q_HTD, k_KTD, v_KTD, params)
        with torch.no_grad():
            return self.attend(0, q_HTD, k_KTD, v_KTD, params), None

    def gradients(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        out_THD: Tensor,
        dout_THD: Tensor,
        kept: Tensor | None,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q (H, T, D), k (K, T, D) and v (K, T, E), given that of `attend_keeping`'s output."""
        if params.chunked:
            own, params = self._by_chunks(params)
            return own.gradients(qkv, out_THD, dout_THD, kept, params)
        if kept is None:
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in qkv)
                dq, dk, dv = torch.autograd.grad(self.attend(0, q, k, v, params), (q, k, v), dout_THD)
            return dq, dk, dv
        width, values = qkv[0].shape[2], qkv[2].shape[2]
        q, k, v, out_THD, dout_THD = as_wide(*(x.transpose(0, 1) for x in qkv), out_THD, dout_THD)
        bounds, longest, window = self._bounds_on(q.device), self._longest, params.window
        unused = self._unused_rng
        assert unused is not None, "expected gradients after a forward"
        found = torch.ops.aten._flash_attention_backward(
            dout_THD,
            q,
            k,
            v,
            out_THD,
            kept,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            window is None,
            *unused,
            scale=params.scaling,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
        )
        dq, dk, dv = (x.transpose(0, 1) for x in found)
        return dq[..., :width], dk[..., :width], dv[..., :values]

    def _by_chunks(self, params: AttentionParams) -> tuple[PackedAttention, AttentionParams]:
        """Return an attention that treats each chunk as a sequence of its own, and the parameters without the
        window."""
        chunk = params.window
        assert chunk is not None, "expected the size of chunks"
        plain = params._replace(window=None, chunked=False)
        if self._longest <= chunk:
            return self, plain
        if chunk not in self._chunks:
            ends = [min(at + chunk, b) for a, b in pairwise(self._bounds) for at in range(a, b, chunk)]
            self._chunks[chunk] = PackedAttention((0, *ends))
        return self._chunks[chunk], plain

    def _flash(self, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Compute all sequences with torch's varlen kernel: (T, H, E), and the log-sum-exp of each row."""
        values = v_KTD.shape[2]
        bounds, longest = self._bounds_on(q_HTD.device), self._longest
        q, k, v = as_wide(*(x.transpose(0, 1) for x in (q_HTD, k_KTD, v_KTD)))
        out, sums, *unused, _ = varlen(q, k, v, (bounds, bounds), (longest, longest), params)
        self._unused_rng = tuple(unused)
        return out[..., :values], sums

    def _bounds_on(self, device: torch.device) -> Tensor:
        if device not in self._on_device:
            host = torch.tensor(self._bounds, dtype=torch.int32).pin_memory()
            self._on_device[device] = host.to(device, non_blocking=True)
        return self._on_device[device]


def one_kernel(q_HTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> bool:
    """Whether torch's varlen kernel can compute all sequences at once."""
    return params.softcap is None and params.sinks is None and _varlen_takes(q_HTD, v_KTD)


def _varlen_takes(q_HTD: Tensor, v_KTD: Tensor) -> bool:
    """Whether torch's varlen kernel supports the dtype, device and head width of these tensors."""
    width = max(q_HTD.shape[2], v_KTD.shape[2])
    return q_HTD.is_cuda and q_HTD.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], most: tuple[int, int], params: AttentionParams
) -> tuple[Tensor, ...]:
    """Run torch's varlen flash kernel: q (T, H, D), k and v (N, K, D). `bounds`: cumulative sequence lengths of queries
    and of keys, int32 on the device; `most`: the longest sequence of each. `torch.nn.attention.varlen` does the same,
    but its wrapper costs the host more than the launches."""
    left = -1 if params.window is None else params.window - 1
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *bounds,
        *most,
        0.0,
        left < 0,
        False,
        scale=params.scaling,
        window_size_left=left,
        window_size_right=0,
    )
    return found


def as_wide(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with zeros appended to their last dimension where it is not the largest: torch's kernel takes
    heads of one width."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]


def causal(tokens: int, seen: Window | None, device: torch.device, before: int = 0) -> Tensor:
    """(T, before + T) bool: whether query row t, which `before` keys precede, may see each key."""
    keys = torch.arange(before + tokens, device=device)
    queries = keys[before:, None]
    found = keys[None] <= queries
    return found if seen is None else found & (keys[None] >= seen.first(queries))


def explicit(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Attention of one sequence spelled out, with the softmax in fp32: (H, T, D). k and v may have more rows than q:
    the queries are the sequence's last tokens."""
    tokens, softcap, sinks = q.shape[1], params.softcap, params.sinks
    scores = ((q * params.scaling) @ k.transpose(1, 2)).float()
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~causal(tokens, params.seen, q.device, k.shape[1] - tokens), -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, tokens, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(-1).to(v.dtype) @ v
