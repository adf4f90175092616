"""Block sizes of the segmented kernels, a function of shapes alone, tuned by `benchmarks/kernels/tune`.

The same batch always gets the same launches, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from torch import Tensor

from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.lora.segmented.adapter_table import RANK_BLOCK

PROGRAMS = 2
"""Fewest programs per multiprocessor that a prefill or training kernel should have."""
LOOPED_MAX_RANK = 128
"""Largest LoRA rank whose h stays in registers while B streams past. Beyond it, each output block loops over the
ranks."""
MAX_SITES = 3
"""Most sites of one launch: q, k and v."""


@dataclass(frozen=True)
class DecodeBlocks:
    """Block sizes of the decode kernels."""

    k: int = 1024
    steps: int = 1
    overlapped_k: int = 512
    """`k` if the shrink overlaps the preceding GEMM: smaller and more steps, whose loads are all in flight at once."""
    parts: int = 4
    """Chunks of a step's k, each with its own sum."""
    shrink_warps: int = 4
    overlapped_warps: int = 2
    """Fewer warps, because the GEMM needs the registers and the shared memory."""
    o: int = 256
    r: int = RANK_BLOCK
    """Ranks per step of the expand."""
    expand_warps: int = 4
    pdl: bool = True


@dataclass(frozen=True)
class PrefillBlocks:
    """Block sizes of the prefill and training kernels."""

    k: int = 128
    """Inputs of x per step; half as many for LoRA ranks above 32."""
    shrink_stages: int = 6
    """Pipeline stages; a third more for LoRA ranks of 33 to 64, which leave enough shared memory."""
    shrink_programs: int = 1
    """Programs per multiprocessor."""
    shrink_r: int = 128
    o: int = 64
    expand_warps: int = 4
    run_blocks: int = 8
    run_stages: int = 3
    """Pipeline stages; one more for LoRA ranks above 64."""
    single_r: int = 64
    single_stages: int = 2
    back_warps: int = 8
    back_stages: int = 4
    d: int = 128
    d_warps: int = 4
    outer_n: int = 128
    outer_warps: int = 4
    outer_stages: int = 3
    """Pipeline stages; two more for LoRA ranks up to 32, which leave enough shared memory."""
    pdl: bool = True
    split_length: int = 512
    """Fewest inputs per program when a sum is split among several. Sums shorter than four times this are not split,
    since adding the partial sums costs about 2 µs."""
    expand_programs: int = 384
    """Programs that the prefill expand should have before each computes several output blocks."""
    wide_blocks: int = 6144
    """From this many output blocks on, over all tiles, LoRA ranks up to 64 use blocks twice as wide, with twice the
    warps."""


MANY_SHRINKS = 512
"""From this many programs on, each program of the decode shrink takes two steps of k, so that fewer have to be
started."""
LONE_RANK, LONE_INPUTS = 64, 4096
"""A single tile with a larger rank and at least this many inputs also takes two steps of k per program. Then the
expand, which waits for all splits, sums half as many."""
FEW_EXPANDS = 512
"""Up to this many programs of 128 outputs, the decode expand uses smaller blocks, and so more programs, with more ranks
each, since the time goes into waiting for loads. Beyond, programs hide each other's latency."""
AHEAD = 3
"""Steps of the decode shrink whose loads are in flight at once if it overlaps the preceding GEMM."""
PREFILL_BLOCKS = PrefillBlocks()


@lru_cache(4096)
def decode_blocks(inputs: int, outputs: tuple[int, ...], tiles: int, items: int, rows: int, R: int) -> DecodeBlocks:
    """Choose the decode block sizes for `tiles` tiles of `rows` rows each, at sites of these inputs and outputs."""
    start = DecodeBlocks()
    lone = tiles == 1 and R > LONE_RANK and inputs >= LONE_INPUTS
    steps = 2 if lone or items * len(outputs) * cdiv(inputs, start.k) > MANY_SHRINKS else 1
    programs = tiles * sum(cdiv(width, 128) for width in outputs)
    if R <= RANK_BLOCK:
        o = 64 if programs <= FEW_EXPANDS else 128 if programs <= 2 * FEW_EXPANDS else 256
        return replace(start, steps=steps, o=o)
    if programs <= FEW_EXPANDS:
        return replace(start, steps=steps, o=64, r=rank_block(R), expand_warps=2 if rows <= 8 else 4)
    return replace(start, steps=steps, r=rank_block(R, 32))


def decode_splits(inputs: int, blocks: DecodeBlocks) -> int:
    """Number of splits of D `inputs` in the decode shrink."""
    return cdiv(inputs, blocks.k * blocks.steps)


def shrink_steps(blocks: DecodeBlocks, *, overlapped: bool) -> dict[str, int | bool]:
    """Return the block sizes and steps of the decode shrink's loop over its inputs."""
    k, steps = blocks.k, blocks.steps
    if overlapped:
        k, steps = blocks.overlapped_k, blocks.k * blocks.steps // blocks.overlapped_k
    return {
        "BLOCK_K": k,
        "STEPS": steps,
        "PARTS": blocks.parts,
        "STAGES": min(steps, AHEAD) + 1,
        "OVERLAPPED": overlapped,
    }


@cache
def rank_block(R: int, most: int = 64) -> int:
    """Number of LoRA ranks that one program works on together."""
    return min(most, max(RANK_BLOCK, next_power_of_2(R)))


def splits_of(programs: int, length: int, block: int, wanted: int, shortest: int) -> tuple[int, int]:
    """Split a sum over `length` to fill the GPU with enough work per program. Return (splits, blocks per split).

    `shortest`: see `PrefillBlocks.split_length`.
    """
    blocks = cdiv(length, block)
    most = length // shortest if length >= 4 * shortest else 1
    splits = max(1, min(wanted // max(programs, 1), most))
    steps = cdiv(blocks, splits)
    return cdiv(blocks, steps), steps


def narrow(k: int, block_r: int, like: Tensor) -> int:
    """Reduce the block of k so that it fits in shared memory for wide ranks or elements."""
    return max(16, k // (2 if block_r > 32 else 1) // (2 if like.element_size() == 4 else 1))


def run_length(tiles: int, output_blocks: int, R: int, blocks: PrefillBlocks) -> int:
    """Output blocks per program of the prefill expand: a power of two; 1 if programs are few or ranks too large."""
    if R > LOOPED_MAX_RANK:
        return 1
    many = max(1, tiles * output_blocks // blocks.expand_programs)
    return min(blocks.run_blocks, 1 << (many.bit_length() - 1))


def rows_aligned(ys: Sequence[Tensor]) -> bool:
    """Whether every row of every output can be read and written 16 bytes at a time."""
    return all(y.stride(0) % 8 == 0 and y.shape[1] % 8 == 0 and y.data_ptr() % 16 == 0 for y in ys)
