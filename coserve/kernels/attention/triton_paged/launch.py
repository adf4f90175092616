"""Launches of the fused attention kernels: grids and block sizes, tuned by `benchmarks/kernels/attention.py --tune`."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.triton_paged import decode_kernel, prefill_kernel
from coserve.kernels.attention.triton_paged.plan import programs_each
from coserve.kernels.gpu.device import H200, device_info, interpreted
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import next_power_of_2

LOG2E = log2(e)
JOINED = 8
"""Partial results (of items) that the joining program loads at once."""
WIDE = 256
"""Width of heads above which blocks are smaller: latents, of some 576 numbers."""
LATENT_HEADS = 32
"""Most query heads of a program over latents: a row's 512 sums in fp32 take 16 registers of each of 32 threads."""
FULL_WAVES = 2
"""Waves of programs from which on a prefill uses larger blocks."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel: rows (prefill only), keys per step, warps, pipeline stages. Times:
    `attention_tune.json`."""

    rows: int
    keys: int
    warps: int
    stages: int
    pdl: bool = True
    """Whether the kernel may start before the preceding one has ended, where the device supports it."""


def _large_shared(device: torch.device) -> bool:
    """Whether a program may use as much shared memory as on an H200, where the block sizes were measured."""
    return device_info(device).shared_bytes >= H200.shared_bytes


def decode_blocks(width: int, dtype: torch.dtype, group: int, each: int, device: torch.device) -> Blocks:
    """Choose the blocks of a decode step.

    `each`: programs that must fit on a multiprocessor (`plan.programs_each`); the fewer, the larger their steps.
    """
    if width > WIDE:
        if dtype == torch.float32 or not _large_shared(device):
            return Blocks(16, 16, 4, 1)
        return Blocks(16, 32, 8 if group > 16 else 4, 2)
    if dtype == torch.float32:
        return Blocks(16, 32, 4, 2)
    if not _large_shared(device):
        return Blocks(16, 32, 2, 3)
    if group > 16:
        return Blocks(16, 32, 4, 3) if width > 128 else Blocks(16, 64, 4, 3)
    if width > 128:
        return Blocks(16, 32, 2, 4)
    if width <= 64:
        return Blocks(16, 64, 2, 3)
    return {
        1: Blocks(16, 128, 4, 3),
        2: Blocks(16, 64, 4, 4),
        3: Blocks(16, 64, 4, 3),
        4: Blocks(16, 32, 2, 4),
    }[each]


def decode_blocks_for(q_HTD: Tensor, cache: LayerCache, sequences: int) -> Blocks:
    """Choose the blocks of a decode step whose items were cut for so many sequences."""
    heads, _, width = q_HTD.shape
    kv_heads, width = cache.groups(heads), max(width, cache.values.shape[3])
    each = programs_each(sequences, kv_heads, device_info(q_HTD.device).multiprocessors)
    return decode_blocks(width, q_HTD.dtype, heads // kv_heads, each, q_HTD.device)


def prefill_blocks(width: int, dtype: torch.dtype, rows: int, device: torch.device) -> Blocks:
    """Choose the blocks of a prefill. `rows`: total over all tiles and key-value heads. Few rows are cut finer, so that
    more programs share the work."""
    if width > WIDE:
        if dtype == torch.float32 or not _large_shared(device):
            return Blocks(16, 16, 4, 1)
        return Blocks(64, 32, 8, 2)
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 2)
    if not _large_shared(device):
        return Blocks(64, 32, 4, 2)
    many = rows >= FULL_WAVES * device_info(device).multiprocessors * 128
    if width > 128:
        return Blocks(128, 64, 8, 2) if many else Blocks(64, 64, 4, 3)
    if width <= 64:
        return Blocks(128, 64, 8, 3) if many else Blocks(64, 64, 4, 3)
    return Blocks(256, 64, 8, 3) if many else Blocks(128, 128, 8, 3)


def _score_units(params: AttentionParams) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`, for exponentials in base 2."""
    assert params.scaling > 0, "expected a scaling above 0"
    if params.softcap is None:
        return params.scaling * LOG2E, 0.0
    return 2 * params.scaling / params.softcap * LOG2E, params.softcap * LOG2E


@dataclass(frozen=True)
class LayerCache:
    """A layer's cache: keys (pages, page_tokens, K, D), values (pages, page_tokens, K, E), and the page table (longest,
    columns) int32.

    A page is contiguous. Other memory, such as pages of other layers, may lie between two pages.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    latent: bool = False
    """Whether values are the first E numbers of the keys (`KvShape.latent`)."""

    def groups(self, heads: int) -> int:
        """Return K for `heads` query heads: the key-value heads, or as many groups as keep a program's heads few."""
        if not self.latent:
            return self.keys.shape[2]
        return next(groups for groups in range(1, heads + 1) if heads % groups == 0 and heads // groups <= LATENT_HEADS)

    @property
    def key_block(self) -> int:
        """Columns of a block that holds the part of a key that is not its value."""
        return _block(self.keys.shape[3] - (self.values.shape[3] if self.latent else 0))

    def page_stride(self) -> int:
        """Elements from one page to the next."""
        for x in (self.keys,) if self.latent else (self.keys, self.values):
            _, _, kv_heads, width = x.shape
            assert x.stride()[1:] == (kv_heads * width, width, 1), "expected pages in one piece"
        assert self.keys.stride(0) == self.values.stride(0), "expected keys and values laid out alike"
        return self.keys.stride(0)


@dataclass(frozen=True)
class Scratch:
    """Scratch memory for joining items: for decode, parts (W, H, E) and stats (W, H) in fp32, counters (columns, K)
    int32.

    Counters are 0 between calls.
    """

    parts: Tensor
    stats: Tensor
    counters: Tensor


def decode_scratch(items: int, heads: int, width: int, columns: int, kv_heads: int, device: torch.device) -> Scratch:
    return Scratch(
        torch.empty(items, heads, width, dtype=torch.float32, device=device),
        torch.empty(items, heads, dtype=torch.float32, device=device),
        torch.zeros(columns, kv_heads, dtype=torch.int32, device=device),
    )


def _block(width: int) -> int:
    """Return the columns of a block that holds heads of this width."""
    return max(next_power_of_2(width), 16)


def _unit(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with stride 1 in their last dimension, copied where necessary."""
    return [x if x.stride(2) == 1 else x.contiguous() for x in tensors]


def decode(
    out_THD: Tensor,
    q_HTD: Tensor,
    k_KTD: Tensor,
    v_KTD: Tensor,
    cache: LayerCache,
    items: Tensor,
    scratch: Scratch,
    params: AttentionParams,
    blocks: Blocks,
) -> None:
    """Write the items' new keys and values into their pages, and their rows of attention into `out_THD`."""
    heads, _, width = q_HTD.shape
    page_tokens, values, kv_heads = cache.keys.shape[1], cache.values.shape[3], cache.groups(heads)
    group = heads // kv_heads
    q, k, v = _unit(q_HTD, k_KTD, v_KTD)
    pdl = blocks.pdl and device_info(q.device).early_launch
    groups = next_power_of_2(group)
    launch(
        decode_kernel.decode,
        (kv_heads, items.shape[0]),
        q,
        k,
        v,
        out_THD,
        cache.keys,
        cache.values,
        cache.table,
        items,
        scratch.counters,
        scratch.parts,
        scratch.stats,
        q if params.sinks is None else params.sinks,
        *_score_units(params),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.table.stride(0),
        cache.page_stride(),
        K=kv_heads,
        G=group,
        D=width,
        E=values,
        PAGE=page_tokens,
        LATENT=cache.latent,
        SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None,
        BLOCK_M=max(16, groups),
        BLOCK_D=cache.key_block,
        BLOCK_E=_block(values),
        BLOCK_N=blocks.keys,
        BLOCK_G=groups,
        UNROLL=JOINED,
        PDL=pdl,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **({} if interpreted() else {"launch_pdl": pdl}),
    )


def tile_tokens(group: int, blocks: Blocks) -> int:
    """Return the tokens of a prefill tile with `blocks.rows` rows; at least 1, even if the group alone has more
    rows."""
    return max(1, blocks.rows // group)


def _tile_rows(group: int, blocks: Blocks) -> int:
    return max(next_power_of_2(tile_tokens(group, blocks) * group), 16)


def prefill_scratch(items: int, group: int, kv_heads: int, width: int, blocks: Blocks, device: torch.device) -> Scratch:
    """Allocate the scratch of a prefill whose tiles are cut into items: parts (items, K, rows, E) and stats (items, K,
    rows) in fp32, and counters."""
    counters = torch.zeros(items, kv_heads, dtype=torch.int32, device=device)
    return Scratch(*prefill_parts(items, group, kv_heads, width, blocks, device), counters)


def prefill_parts(
    items: int, group: int, kv_heads: int, width: int, blocks: Blocks, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Allocate the parts and stats of `prefill_scratch`."""
    size = items, kv_heads, _tile_rows(group, blocks)
    parts = torch.empty(*size, width, dtype=torch.float32, device=device)
    return parts, torch.empty(size, dtype=torch.float32, device=device)


def store(k_KTD: Tensor, v_KTD: Tensor, cache: LayerCache, tiles: Tensor, tokens: int) -> None:
    """Write the tiles' new keys and values into their pages. `tokens`: `tile_tokens`."""
    k, v = _unit(k_KTD, v_KTD)
    launch(
        prefill_kernel.store,
        (k.shape[0], tiles.shape[0]),
        k,
        v,
        cache.keys,
        cache.values,
        cache.table,
        tiles,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.table.stride(0),
        cache.page_stride(),
        k.shape[0],
        D=k.shape[2],
        E=cache.values.shape[3],
        PAGE=cache.keys.shape[1],
        LATENT=cache.latent,
        BLOCK_T=next_power_of_2(tokens),
        BLOCK_D=cache.key_block,
        BLOCK_E=_block(cache.values.shape[3]),
        num_warps=8 if tokens > 64 else 4,
    )


def prefill(
    out_THD: Tensor,
    q_HTD: Tensor,
    cache: LayerCache,
    tiles: Tensor,
    scratch: Scratch | None,
    params: AttentionParams,
    blocks: Blocks,
) -> None:
    """Write the tiles' rows of attention into `out_THD`; the new keys and values are in their pages (`store`).

    A tile has at most `tile_tokens` tokens. `scratch`: from `prefill_scratch`, or None if each tile is one item.
    """
    heads, _, width = q_HTD.shape
    page_tokens, values, kv_heads = cache.keys.shape[1], cache.values.shape[3], cache.groups(heads)
    group = heads // kv_heads
    (q,) = _unit(q_HTD)
    launch(
        prefill_kernel.prefill,
        (kv_heads, tiles.shape[0]),
        q,
        out_THD,
        cache.keys,
        cache.values,
        cache.table,
        tiles,
        *((q, q, q) if scratch is None else (scratch.parts, scratch.stats, scratch.counters)),
        q if params.sinks is None else params.sinks,
        *_score_units(params),
        params.window or 0,
        q.stride(0),
        q.stride(1),
        cache.table.stride(0),
        cache.page_stride(),
        K=kv_heads,
        G=group,
        D=width,
        E=values,
        PAGE=page_tokens,
        LATENT=cache.latent,
        WINDOW=params.window is not None,
        CHUNKED=params.chunked,
        SOFTCAP=params.softcap is not None,
        SINKS=params.sinks is not None,
        SPLIT=scratch is not None,
        BLOCK_M=_tile_rows(group, blocks),
        BLOCK_D=cache.key_block,
        BLOCK_E=_block(values),
        BLOCK_N=blocks.keys,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
