"""Launches of the sampling kernels: grids and block sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.gpu.device import interpreted
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.sampling.constants import COLUMNS
from coserve.kernels.sampling.draw_kernels import peak, settle, sift, top, weigh
from coserve.kernels.sampling.logit_kernels import mask, penalise
from coserve.kernels.sampling.threshold_kernel import threshold


@dataclass(frozen=True)
class Blocks:
    """Block sizes of the sampling kernels."""

    chunk: int = 512
    """Tokens per program of the kernels that split a row among programs."""
    peak_chunk: int = 1024
    """Tokens per program of `peak`."""
    row_block: int = 4096
    """Tokens per step of `threshold`, which loops over a whole row several times."""
    row_warps: int = 32


BLOCKS = Blocks()


def likeliest(logits_BV: Tensor, blocks: Blocks = BLOCKS) -> Tensor:
    """See `generate.sampling.draws.likeliest`. Rows of the logits may have gaps."""
    rows, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1, "expected the logits of a row side by side"
    chunks, tokens = cdiv(vocab, blocks.peak_chunk), torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if rows:
        peaks = torch.empty(rows, chunks, dtype=torch.int64, device=logits_BV.device)
        peak[(rows, chunks)](logits_BV, logits_BV.stride(0), peaks, vocab, CHUNK=blocks.peak_chunk, num_warps=4)
        top[(rows,)](peaks, tokens, chunks, CHUNKS=next_power_of_2(chunks), num_warps=4)
    return tokens


def draw(
    logits_BV: Tensor, likeliest_B: Tensor, columns_BK: Tensor, *, filters: bool, blocks: Blocks = BLOCKS
) -> Tensor:
    """See `generate.sampling.draws.draw`. Rows of the logits may have gaps."""
    rows, vocab = logits_BV.shape
    assert columns_BK.shape == (rows, COLUMNS), f"expected {COLUMNS} columns, got {tuple(columns_BK.shape)}"
    assert logits_BV.stride(1) == 1, "expected the logits of a row side by side"
    device, chunks = logits_BV.device, cdiv(vocab, blocks.chunk)
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    masses = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    counts = torch.empty(rows, chunks + 2, dtype=torch.int32, device=device)
    ties, bounds = counts.flatten()[: rows * chunks], counts.flatten()[rows * chunks :]
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    padded = next_power_of_2(chunks)
    common = (likeliest_B, columns_BK, weights, masses)
    weigh[(rows, chunks)](
        logits_BV, logits_BV.stride(0), likeliest_B, columns_BK, weights, masses, vocab, CHUNK=blocks.chunk, num_warps=4
    )
    if filters:
        threshold[(rows,)](
            *common, bounds, vocab, chunks, CHUNKS=padded, BLOCK=blocks.row_block, STAGES=1, num_warps=blocks.row_warps
        )
        sift[(rows, chunks)](*common, ties, bounds, vocab, CHUNK=blocks.chunk, num_warps=4)
    settle[(rows,)](
        *common, ties, bounds, tokens, vocab, chunks, FILTERS=filters, CHUNK=blocks.chunk, CHUNKS=padded, num_warps=8
    )
    return tokens


def penalise_(
    logits_BV: Tensor, rows_P: Tensor, counts_NV: Tensor, slots_P: Tensor, penalties_PK: Tensor, blocks: Blocks = BLOCKS
) -> None:
    """See `generate.sampling.draws.penalise_`. In place on rows `rows_P` of fp32 logits, with rows `slots_P` of
    `counts_NV`."""
    assert logits_BV.is_contiguous() and counts_NV.is_contiguous(), "expected whole rows"
    vocab = logits_BV.shape[1]
    grid = (len(rows_P), cdiv(vocab, blocks.chunk))
    exact = {} if interpreted() else {"enable_fp_fusion": False}  # bitwise equal to PyTorch's operations
    penalise[grid](logits_BV, rows_P, counts_NV, slots_P, penalties_PK, vocab, CHUNK=blocks.chunk, num_warps=4, **exact)


def mask_(logits_BV: Tensor, rows_M: Tensor, bits_MW: Tensor, blocks: Blocks = BLOCKS) -> None:
    """See `generate.sampling.draws.mask_`. In place on rows `rows_M` of fp32 logits."""
    assert logits_BV.is_contiguous() and bits_MW.is_contiguous(), "expected whole rows"
    vocab, words = logits_BV.shape[1], bits_MW.shape[1]
    grid = (len(rows_M), cdiv(vocab, blocks.peak_chunk))
    mask[grid](logits_BV, rows_M, bits_MW, vocab, words, CHUNK=blocks.peak_chunk, num_warps=4)
