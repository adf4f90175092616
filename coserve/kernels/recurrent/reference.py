"""Recurrences in plain torch, in fp32: token by token, and differentiable in chunks.

Letters: see `interface`; B sequences, L tokens of each, N chunks, Z tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from coserve.kernels.recurrent.interface import RecurrenceInputs, RecurrenceParams

CHUNK = 64
"""Tokens of a chunk, within which everything is products of matrices."""


def tapped(
    rows_NC: Tensor, taps_TW: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """Return `activation(sum over w of rows[taps[:, w]] * weight[:, w] + bias)`: (T, C)."""
    inputs = (rows_NC.index_select(0, taps_TW[:, tap]) for tap in range(weight_CW.shape[1]))
    return _weighted(inputs, weight_CW, bias_C, activation).to(rows_NC.dtype)


def convolved(
    x_TC: Tensor, offsets_T: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """Compute `tapped` for packed rows whose sequences begin in the batch: (T, C), with the same bits. `offsets_T`:
    each row's index in its own sequence. Uses shifts and masks instead of indices, so that a compiler fuses forward and
    backward. Works in fp32, so that the backward adds up the taps' gradients in fp32."""
    tokens, all_TC = x_TC.shape[0], x_TC.float()

    def before(rows: int) -> Tensor:
        return pad(all_TC, (0, 0, rows, 0))[:tokens].masked_fill((offsets_T < rows)[:, None], 0) if rows else all_TC

    inputs = (before(rows) for rows in reversed(range(weight_CW.shape[1])))
    return _weighted(inputs, weight_CW, bias_C, activation).to(x_TC.dtype)


def _weighted(inputs: Iterable[Tensor], weight_CW: Tensor, bias_C: Tensor | None, activation: str | None) -> Tensor:
    """Return `activation(sum over w of inputs[w] * weight[:, w] + bias)` in fp32: (T, C). Tap by tap, so that a token's
    bits do not depend on the others."""
    assert activation in ("silu", None), f"expected silu or nothing behind the convolution, got {activation}"
    total = torch.zeros((), dtype=torch.float32, device=weight_CW.device)
    for tap, x_TC in enumerate(inputs):
        total = total + x_TC.float() * weight_CW[:, tap].float()
    if bias_C is not None:
        total = total + bias_C.float()
    return silu(total) if activation == "silu" else total


def normalized(given: RecurrenceInputs) -> RecurrenceInputs:
    """Apply `params`: return the inputs with queries and keys normalised, queries scaled, and default `params`. Dtypes
    stay."""
    if given.params == RecurrenceParams():
        return given
    q, k = given.q.float(), given.k.float()
    if given.params.normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * given.params.scale
    return given._replace(q=q.to(given.q.dtype), k=k.to(given.k.dtype), params=RecurrenceParams())


def prepared(given: RecurrenceInputs) -> RecurrenceInputs:
    """Return the inputs in fp32, queries and keys for every head, normalised and scaled: (T, H, K)."""
    q, k, v, decay, beta, _ = normalized(given.rows(Tensor.float))
    heads = v.shape[1]
    if q.shape[1] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    return RecurrenceInputs(q, k, v, decay, beta)


def one_token(prepared: RecurrenceInputs, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Advance each sequence's state by a token: the outputs (B, H, V) and the new states. All tensors are (B, ...).

    No matrix product: a sequence's bits do not depend on the batch.
    """
    q_BHK, k_BHK, v_BHV, decay, beta_BH, _ = prepared
    kept = state_BHKV * (decay.exp()[..., None] if decay.dim() == 3 else decay.exp()[..., None, None])
    if beta_BH is not None:
        v_BHV = (v_BHV - (kept * k_BHK[..., None]).sum(-2)) * beta_BH[..., None]
    new = kept + k_BHK[..., None] * v_BHV[..., None, :]
    return (new * q_BHK[..., None]).sum(-2), new


def in_chunks(prepared: RecurrenceInputs, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute L tokens of each sequence from given states: the outputs (B, L, H, V) and the last states, all in fp32.
    All tensors are (B, L, ...).

    Within a chunk the delta rule is a triangular system (the WY representation of Yang et al., NeurIPS '24).
    """
    q_BLHK, k_BLHK, v_BLHV, decay_BLH, beta_BLH, _ = prepared
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


def by_tokens(prepared: RecurrenceInputs, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `in_chunks` token by token. Also supports a decay per element of a key, (B, L, H, K)."""
    outputs, state = list[Tensor](), state_BHKV
    for t in range(prepared.q.shape[1]):
        out, state = one_token(prepared.rows(partial(torch.select, dim=1, index=t)), state)
        outputs.append(out)
    return torch.stack(outputs, 1), state
