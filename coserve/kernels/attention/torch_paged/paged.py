"""Attention over paged KV caches in plain torch: on a CPU, and wherever the Triton kernels do not run.

Letters: T packed rows, H query heads, K key-value heads, G = H / K, D head width (E: of values, if it
differs), B tiles, N tokens of a tile, R = N *
G rows of a tile for one key-value head, L keys that a tile reads; S rows without the padding of R.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.attention.interface import (
    AttentionParams,
    MixedCapacity,
    Pages,
    TokenRun,
    as_cached,
)
from coserve.kernels.attention.padded import PaddedAttention
from coserve.kernels.attention.torch_paged.tiles import KEY_BLOCK, Layout, Tiles, plan_tiles


class PagedAttention:
    """Attention of one generation step: writes the step's keys and values into pages, then reads each sequence's pages.

    Built once a step, used by every layer. On CPU a row's result is bitwise independent of the rest of the batch and of
    how its sequence was cut into steps: GEMMs have at least 16 rows, keys are read in blocks at fixed positions, blocks
    are added in order, and a masked key adds exactly 0.
    """

    reads_pages = True

    def __init__(self, pages: Pages, runs: Sequence[TokenRun]) -> None:
        self._pages, self._runs = pages, tuple(runs)
        self._device = pages.keys[0].device
        self._page_tokens = pages.keys[0].shape[1]
        self._exact = self._device.type == "cpu"
        slots = [
            (run.pages[p // self._page_tokens], p % self._page_tokens)
            for run in runs
            for p in range(run.position, run.position + run.tokens)
        ]
        at = torch.tensor(slots, dtype=torch.long).view(-1, 2).to(self._device)
        self._new_at = at[:, 0], at[:, 1]
        self._plans: dict[Layout, Tiles] = {}

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """See `Attention.attend`. T new tokens over each sequence's whole context."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        for cache, new_KTD in ((keys, k_KTD),) if self._pages.latent else ((keys, k_KTD), (values, v_KTD)):
            cache.index_put_(self._new_at, as_cached(new_KTD.transpose(0, 1), cache.dtype))
        return self.read(layer, q_HTD, params)

    def read(self, layer: int, q_HTD: Tensor, params: AttentionParams) -> Tensor:
        """See `PagedStep`; also for decodes."""
        softcap, sinks = params.softcap, params.sinks
        keys, values, latent = self._pages.keys[layer], self._pages.values[layer], self._pages.latent
        heads, rows, width = q_HTD.shape
        unit = gcd(keys.stride(0), width, values.shape[3])
        layout = Layout(
            heads=heads,
            kv_heads=keys.shape[2],
            window=params.seen,
            key_units=width // unit,
            value_units=values.shape[3] // unit,
            page_units=keys.stride(0) // unit,
        )
        tiles = self._tiles(layout)
        q_rows = q_HTD.transpose(0, 1).reshape(rows * heads, width) * params.scaling
        outputs = []
        for tile in tiles.batches:
            q_BKRD = _rows(q_rows, tile.queries)
            k_BKLD = _keys(keys, tile.keys, unit)
            v_BKLD = k_BKLD[..., : values.shape[3]] if latent else _keys(values, tile.values, unit)
            if self._exact:
                q_BKRD, k_BKLD, v_BKLD = (_widen(x.float()) for x in (q_BKRD, k_BKLD, v_BKLD))
            else:
                k_BKLD, v_BKLD = k_BKLD.to(q_BKRD.dtype), v_BKLD.to(q_BKRD.dtype)
            out = _weigh(q_BKRD, k_BKLD, v_BKLD, tile.hidden, softcap, tile.sinks(sinks), exact=self._exact)
            outputs.append(out[..., : values.shape[3]].flatten(0, 2))
        return torch.cat(outputs).index_select(0, tiles.back).view(rows, heads, -1).to(q_HTD.dtype)

    def _tiles(self, layout: Layout) -> Tiles:
        if layout not in self._plans:
            blank = self._pages.keys[0].shape[0] - 1
            self._plans[layout] = plan_tiles(
                self._runs, layout, self._page_tokens, blank, self._device, exact=self._exact
            )
        return self._plans[layout]


def _rows(x_ND: Tensor, at: Tensor) -> Tensor:
    """Return `x_ND[at]`, copying whole rows at a time; plain indexing does not on CPU."""
    return x_ND.index_select(0, at.flatten()).view(*at.shape, -1)


def _keys(cache: Tensor, at: Tensor, unit: int) -> Tensor:
    """Gather keys or values (B, K, L, D) at the places `at` (B, K, L * units) from a cache (P, page_tokens, K, D).

    The cache and the memory between its pages are seen as rows of `unit` elements.
    """
    pages, _, kv_heads, width = cache.shape
    assert cache.stride()[1:] == (kv_heads * width, width, 1), "expected pages in one piece"
    elements = (pages - 1) * cache.stride(0) + cache[0].numel()
    rows = _rows(cache.as_strided((elements // unit, unit), (unit, 1)), at)
    return rows.view(*at.shape[:2], -1, width)


def _widen(x: Tensor) -> Tensor:
    """Pad with zero columns to a multiple of 16: narrower products are split among threads in ways that change bits."""
    return pad(x, (0, -x.shape[-1] % 16)) if x.shape[-1] % 16 else x


def _weigh(
    q_BKRD: Tensor,
    k_BKLD: Tensor,
    v_BKLD: Tensor,
    hidden_B1SL: Tensor,
    softcap: float | None,
    sinks_1KS1: Tensor | None,
    *,
    exact: bool,
) -> Tensor:
    """`softmax(softcap(q kᵀ)) v` without the hidden keys, for the first S rows: (B, K, S, D). The softmax is in
    fp32."""
    padding = q_BKRD.shape[2] - hidden_B1SL.shape[2]
    scores = torch.matmul(q_BKRD, k_BKLD.transpose(2, 3)).float()
    if padding:
        scores = scores[:, :, :-padding].contiguous()
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(hidden_B1SL, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks_1KS1 is not None:
        top = torch.maximum(top, sinks_1KS1)
    weights = scores.sub_(top).exp_()
    if exact:
        total, out = _blockwise(weights, v_BKLD, padding)
    else:
        total, out = weights.sum(-1, keepdim=True), torch.matmul(weights.to(v_BKLD.dtype), v_BKLD).float()
    if sinks_1KS1 is not None:
        total = total + (sinks_1KS1 - top).exp()
    return out / total


def _blockwise(weights_BKSL: Tensor, v_BKLD: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the sums of weights (B, K, S, 1) and the weighted values (B, K, S, D), added block by block of keys.

    The products run with `padding` additional rows.
    """
    B, K, S, _ = weights_BKSL.shape
    sums = weights_BKSL.view(B, K, S, -1, KEY_BLOCK).sum(-1)
    weights, values = pad(weights_BKSL, (0, 0, 0, padding)).flatten(0, 1), v_BKLD.flatten(0, 1)
    total, out = sums[..., 0].clone(), torch.bmm(weights[..., :KEY_BLOCK], values[:, :KEY_BLOCK])
    for block in range(1, sums.shape[-1]):
        keys = slice(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        total += sums[..., block]
        out += torch.bmm(weights[..., keys], values[:, keys])
    return total[..., None], out.view(B, K, S + padding, -1)[:, :, :S]


class GatheredStaticAttention(PaddedAttention):
    """`StaticPagedAttention` in plain torch, for devices without CUDA graphs."""

    def __init__(self, pages: Pages, *, batch: int, max_tokens: int) -> None:
        super().__init__(PagedAttention(pages, ()), 0)
        self._pages = pages
        self.batch, self.max_tokens = batch, max_tokens
        self.positions = torch.zeros(batch, dtype=torch.int64, device=pages.keys[0].device)

    def load(self, runs: Sequence[TokenRun]) -> None:
        assert len(runs) <= self.batch, f"expected at most {self.batch} sequences, got {len(runs)}"
        assert all(run.tokens == 1 for run in runs), "expected one new token a sequence"
        host = torch.zeros(self.batch, dtype=torch.int64)
        host[: len(runs)] = torch.tensor([run.position for run in runs], dtype=torch.int64)
        self.positions.copy_(host)
        self._inner, self._tokens = PagedAttention(self._pages, runs), len(runs)


class GatheredMixedAttention(PaddedAttention):
    """`MixedAttention` in plain torch, for devices without CUDA graphs."""

    def __init__(self, pages: Pages, capacity: MixedCapacity) -> None:
        super().__init__(PagedAttention(pages, ()), 0)
        self._pages, self.capacity = pages, capacity

    def load(self, runs: Sequence[TokenRun]) -> None:
        assert self.capacity.holds(runs), "expected a step that the capacity holds"
        self._inner, self._tokens = PagedAttention(self._pages, runs), sum(run.tokens for run in runs)
