"""Recurrences in plain torch, in fp32: token by token, and differentiable in chunks.

Letters: see `interface`; B sequences, L tokens of each, N chunks, Z tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from coserve.kernels.recurrent.interface import RecurrenceParams

CHUNK = 64
"""Tokens of a chunk, within which everything is products of matrices."""


def tapped(
    rows_NC: Tensor, taps_TW: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """Return `activation(sum over w of rows[taps[:, w]] * weight[:, w] + bias)`: (T, C). Tap by tap, so that a token's
    bits do not depend on the others."""
    assert activation in ("silu", None), f"expected silu or nothing behind the convolution, got {activation}"
    total = torch.zeros((), dtype=torch.float32, device=rows_NC.device)
    for tap in range(weight_CW.shape[1]):
        total = total + rows_NC.index_select(0, taps_TW[:, tap]).float() * weight_CW[:, tap].float()
    if bias_C is not None:
        total = total + bias_C.float()
    return (silu(total) if activation == "silu" else total).to(rows_NC.dtype)


def prepared(q: Tensor, k: Tensor, heads: int, params: RecurrenceParams) -> tuple[Tensor, Tensor]:
    """Return queries and keys (..., G, K) in fp32 for every head, normalised and scaled: (..., H, K)."""
    q, k = q.float(), k.float()
    if params.normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * params.scale
    if q.shape[-2] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[-2], -2) for x in (q, k))
    return q, k


def one_token(
    state_BHKV: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, decay: Tensor, beta_BH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance each sequence's state by a token, all in fp32: the outputs (B, H, V) and the new states.

    No matrix product: a sequence's bits do not depend on the batch.
    """
    kept = state_BHKV * (decay.exp()[..., None] if decay.dim() == 3 else decay.exp()[..., None, None])
    if beta_BH is not None:
        v_BHV = (v_BHV - (kept * k_BHK[..., None]).sum(-2)) * beta_BH[..., None]
    new = kept + k_BHK[..., None] * v_BHV[..., None, :]
    return (new * q_BHK[..., None]).sum(-2), new


def in_chunks(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, decay_BLH: Tensor, beta_BLH: Tensor | None, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute L tokens of each sequence from given states: the outputs (B, L, H, V) and the last states, all in fp32.

    Within a chunk the delta rule is a triangular system (the WY representation of Yang et al., NeurIPS '24).
    """
    length = q_BLHK.shape[1]

    def chunks(x: Tensor) -> Tensor:
        """(B, L, H, ...) -> (B, H, N, Z, ...)."""
        whole = pad(x, (*(0, 0) * (x.dim() - 2), 0, -length % CHUNK)).transpose(1, 2)
        return whole.reshape(*whole.shape[:2], -1, CHUNK, *whole.shape[3:])

    q, k, v = chunks(q_BLHK), chunks(k_BLHK), chunks(v_BLHV)
    total = chunks(decay_BLH).cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    weights = (q @ k.mT) * between
    known: Tensor | None = None
    if beta_BLH is not None:
        beta = chunks(beta_BLH)[..., None]
        system = (k * beta) @ k.mT * between
        both = torch.cat((v * beta, k * beta * total[..., None].exp()), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        v, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    q, k = q * total[..., None].exp(), k * (total[..., -1:] - total)[..., None].exp()
    left = total[..., -1].exp()[..., None, None]
    outputs, state = list[Tensor](), state_BHKV
    for n in range(q.shape[2]):
        new = v[:, :, n] if known is None else v[:, :, n] - known[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + weights[:, :, n] @ new)
        state = state * left[:, :, n] + k[:, :, n].mT @ new
    return torch.cat(outputs, 2).transpose(1, 2)[:, :length], state


def by_tokens(
    q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, decay: Tensor, beta_BLH: Tensor | None, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `in_chunks` token by token, also for a decay of each key's element."""
    outputs, state = list[Tensor](), state_BHKV
    for t in range(q_BLHK.shape[1]):
        beta = None if beta_BLH is None else beta_BLH[:, t]
        out, state = one_token(state, q_BLHK[:, t], k_BLHK[:, t], v_BLHV[:, t], decay[:, t], beta)
        outputs.append(out)
    return torch.stack(outputs, 1), state
