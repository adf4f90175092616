"""Cuts a packed batch for paged attention in torch: tiles of a few new tokens of one sequence, batched by size.

Built on the host once a step for each (heads, window), then shared by all layers of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention.interface import TokenRun, Window
from coserve.kernels.gpu.rounding import CPU_MIN_ROWS, next_power_of_2

KEY_BLOCK = 64
"""Keys of a block. Block b of a sequence always holds the positions from 64 b on."""
TILE_TOKENS = (1, 16, 64)
"""Allowed numbers of tokens in a tile. Longer runs are cut into tiles of the last size."""
MAX_SCORES = 1 << 24
"""Most attention scores in one batch of tiles, unless one tile alone has more."""


@dataclass(frozen=True)
class Layout:
    """Properties of the layers that share one plan."""

    heads: int
    kv_heads: int
    window: Window | None
    key_units: int
    """Rows per key. The cache is viewed as rows of one size that divides keys, values and page strides. Usually 1."""
    value_units: int
    """Rows per value."""
    page_units: int
    """Rows from the start of one page to the next."""


@dataclass(frozen=True)
class TileBatch:
    """B tiles that are computed by one batched product."""

    queries: Tensor
    """int (B, K, R): rows of q seen as (T * H, D). R counts (token, head of the group); padding repeats row 0."""
    keys: Tensor
    """int (B, K, L * key_units): rows of a layer's cache, counted as in `Layout`."""
    values: Tensor
    """int (B, K, L * value_units): rows of the layer's cached values."""
    hidden: Tensor
    """bool (B, 1, S, L): whether a key is hidden from a row. Every row sees at least one. S is R without its
    padding."""

    def sinks(self, sinks_H: Tensor | None) -> Tensor | None:
        """Return the learned sink logit of each row, fp32 (1, K, S, 1)."""
        if sinks_H is None:
            return None
        kv_heads = self.queries.shape[1]
        sinks_KG = sinks_H.float().view(kv_heads, -1)
        return sinks_KG.repeat(1, self.hidden.shape[2] // sinks_KG.shape[1])[None, :, :, None]


@dataclass(frozen=True)
class Tiles:
    batches: tuple[TileBatch, ...]
    back: Tensor
    """int (T * H): for each row and head, its index among all batches' outputs, seen as (sum B * K * S, D)."""


@dataclass(frozen=True)
class _Tile:
    row: int
    """Row of its first token in the packed batch."""
    tokens: int
    position: int
    first_block: int
    blocks: int
    pages: tuple[int, ...]


def _cut(runs: Sequence[TokenRun], window: Window | None) -> dict[tuple[int, int], list[_Tile]]:
    """Cut runs into tiles. Return them by (tokens of the tile, key blocks that it is padded to)."""
    found: dict[tuple[int, int], list[_Tile]] = {}
    row = 0
    for run in runs:
        for start in range(0, run.tokens, TILE_TOKENS[-1]):
            tokens = min(TILE_TOKENS[-1], run.tokens - start)
            position = run.position + start
            first = 0 if window is None else window.first(position) // KEY_BLOCK
            blocks = (position + tokens - 1) // KEY_BLOCK + 1 - first
            size = next(size for size in TILE_TOKENS if size >= tokens)
            padded = next_power_of_2(blocks)
            tile = _Tile(row + start, tokens, position, first, blocks, run.pages)
            found.setdefault((size, padded), []).append(tile)
        row += run.tokens
    return found


def plan_tiles(
    runs: Sequence[TokenRun],
    layout: Layout,
    page_tokens: int,
    blank: int,
    device: torch.device,
    *,
    exact: bool,
) -> Tiles:
    """Build the tiles of `runs`. `blank` is the page that holds zeros.

    `exact` pads each tile's rows to a multiple of `CPU_MIN_ROWS`, so that a row's bits do not depend on its tile.
    """
    group = layout.heads // layout.kv_heads
    back = torch.zeros(sum(run.tokens for run in runs), layout.heads, dtype=torch.long)
    batches: list[TileBatch] = []
    done = 0
    for (size, blocks), tiles in _cut(runs, layout.window).items():
        tile_rows = size * group
        padding = -tile_rows % CPU_MIN_ROWS if exact else 0
        fit = max(1, MAX_SCORES // (layout.kv_heads * (tile_rows + padding) * blocks * KEY_BLOCK))
        for i in range(0, len(tiles), fit):
            some = tiles[i : i + fit]
            batches.append(_batch(some, blocks, tile_rows, padding, layout, page_tokens, blank, device))
            for tile in some:
                # Output row of (tile, kv head k, token n, head g of the group).
                k = torch.arange(layout.kv_heads)[None, :, None] * tile_rows
                n = torch.arange(tile.tokens)[:, None, None] * group
                place = done + k + n + torch.arange(group)[None, None]
                back[tile.row : tile.row + tile.tokens] = place.flatten(1)
                done += layout.kv_heads * tile_rows
    return Tiles(tuple(batches), back.flatten().to(device))


def _batch(
    tiles: Sequence[_Tile],
    blocks: int,
    tile_rows: int,
    padding: int,
    layout: Layout,
    page_tokens: int,
    blank: int,
    device: torch.device,
) -> TileBatch:
    group, length = layout.heads // layout.kv_heads, blocks * KEY_BLOCK
    tokens_B = torch.tensor([tile.tokens for tile in tiles])
    row_B = torch.tensor([tile.row for tile in tiles])
    position_B = torch.tensor([tile.position for tile in tiles])
    start_B = torch.tensor([tile.first_block * KEY_BLOCK for tile in tiles])
    longest = max(len(tile.pages) for tile in tiles)
    table = torch.tensor([tile.pages + (blank,) * (longest - len(tile.pages) + 1) for tile in tiles])

    local_R = torch.arange(tile_rows) // group  # the token of each row of a tile
    real_BR = local_R[None] < tokens_B[:, None]
    kv_K = torch.arange(layout.kv_heads)
    head_KR = kv_K[:, None] * group + torch.arange(tile_rows)[None] % group
    query_BKR = (row_B[:, None, None] + local_R) * layout.heads + head_KR
    query_BKR = pad(torch.where(real_BR[:, None], query_BKR, 0), (0, padding))

    key_BL = start_B[:, None] + torch.arange(length)
    page_BL = table.gather(1, (key_BL // page_tokens).clamp(max=longest))
    within_BKL = (key_BL % page_tokens)[:, None] * layout.kv_heads + kv_K[None, :, None]

    def rows(units: int) -> Tensor:
        at_BKL = page_BL[:, None] * layout.page_units + within_BKL * units
        return (at_BKL[..., None] + torch.arange(units)).flatten(2).to(device)

    keys = rows(layout.key_units)
    values = keys if layout.value_units == layout.key_units else rows(layout.value_units)

    # Padding rows get the position of the tile's first key, so that each sees one key and its softmax is finite.
    at_BR = torch.where(real_BR, position_B[:, None] + local_R, start_B[:, None])
    hidden = key_BL[:, None] > at_BR[:, :, None]
    if layout.window is not None:
        hidden |= key_BL[:, None] < layout.window.first(at_BR)[:, :, None]
    return TileBatch(query_BKR.to(device), keys, values, hidden[:, None].to(device))
