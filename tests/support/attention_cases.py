"""Steps of paged attention and their result in fp32, slow and obvious."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.kernels.attention.interface import AttentionParams, Pages, TokenRun


@dataclass(frozen=True)
class Kind:
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    page_tokens: int = 16
    apart: int = 0
    """Elements of other things between a layer's pages."""
    values: int = 0
    """Width of a value; 0: that of a key."""
    chunked: bool = False
    latent: bool = False
    """Whether a value is the beginning of its key."""

    @property
    def value_width(self) -> int:
        return self.values or self.width

    def params(self, device: torch.device) -> AttentionParams:
        sinks = torch.linspace(-2, 3, self.heads, device=device) if self.sinks else None
        return AttentionParams(self.width**-0.5, self.window, self.softcap, sinks, self.chunked)


class Case:
    """Sequences whose earlier positions are in the cache, amid NaN; and the keys and values of all of each, in fp32."""

    def __init__(
        self,
        kind: Kind,
        runs: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        cache: torch.dtype | None = None,
    ):
        """`runs`: (position of its first new token, new tokens) of each sequence. `cache`: its dtype, if another; keys
        and values are numbers that it holds as they are."""
        self.kind, self.dtype, self.device = kind, dtype, torch.device(device)
        g = torch.Generator().manual_seed(seed)
        used = [-(-(position + tokens) // kind.page_tokens) for position, tokens in runs]
        order = torch.randperm(sum(used) + 3, generator=g).tolist()
        shape, widths = (len(order) + 1, kind.page_tokens, kind.kv_heads), (kind.width, kind.value_width)
        stored = cache or dtype
        keys, values = (torch.full((*shape, width), float("nan"), dtype=stored) for width in widths)
        self.runs, self.sequences, new = [], [], []
        for (position, tokens), pages in zip(runs, used, strict=True):
            held = tuple(order.pop() for _ in range(pages))
            total = position + tokens
            q = torch.randn(tokens, kind.heads, kind.width, generator=g).to(dtype)
            k, v = (torch.randn(total, kind.kv_heads, width, generator=g).to(stored).to(dtype) for width in widths)
            v = k[..., : kind.values] if kind.latent else v
            slots = self._slots(held, position)
            keys[slots], values[slots] = k[:position].to(stored), v[:position].to(stored)
            self.runs.append(TokenRun(tokens, position, held))
            self.sequences.append((q.float(), k.float(), v.float()))
            new.append((q, k[position:], v[position:]))
        # Keys and values have the same stride from page to page, as in one buffer.
        apart = [kind.apart + kind.page_tokens * kind.kv_heads * (max(widths) - width) for width in widths]
        caches = [spread(x.to(device), a) for x, a in zip((keys, values), apart, strict=True)]
        own_values = caches[0][..., : kind.values] if kind.latent else caches[1]
        self.pages = Pages((caches[0],), (own_values,), kind.latent)
        packed = (torch.cat(parts).transpose(0, 1).to(device) for parts in zip(*new, strict=True))
        self.q_HTD, self.k_KTD, self.v_KTD = packed

    def _slots(self, pages: Sequence[int], positions: int) -> tuple[Tensor, Tensor]:
        """Page, and place in it, of a sequence's first positions."""
        at = torch.arange(positions)
        return torch.tensor(pages, dtype=torch.long)[at // self.kind.page_tokens], at % self.kind.page_tokens

    def expected(self) -> Tensor:
        """(T, H, D) fp32."""
        params, outputs = self.kind.params(torch.device("cpu")), []
        for run, (q, k, v) in zip(self.runs, self.sequences, strict=True):
            outputs.extend(self._row(q[i], k, v, run.position + i, params.sinks) for i in range(run.tokens))
        return torch.stack(outputs)

    def _row(self, q_HD: Tensor, k: Tensor, v: Tensor, at: int, sinks_H: Tensor | None) -> Tensor:
        first = 0 if self.kind.window is None else max(0, at - self.kind.window + 1)
        if self.kind.chunked and self.kind.window is not None:
            first = at // self.kind.window * self.kind.window
        group = self.kind.heads // self.kind.kv_heads
        k_HND, v_HND = (x[first : at + 1].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores_HN = (k_HND @ q_HD[:, :, None])[..., 0] * self.kind.width**-0.5
        if self.kind.softcap is not None:
            scores_HN = self.kind.softcap * torch.tanh(scores_HN / self.kind.softcap)
        if sinks_H is not None:
            scores_HN = torch.cat([scores_HN, sinks_H[:, None]], 1)
        return (scores_HN.softmax(-1)[:, None, : k_HND.shape[1]] @ v_HND)[:, 0]

    def put_into(self, pages: Pages) -> None:
        """`pages`, which are at least as many, hold what is in the case's own, and NaN elsewhere."""
        for to, own in _stored(pages, self.pages):
            _whole(to).fill_(float("nan"))
            to[: len(own)] = own

    def check_written(self, pages: Pages | None = None) -> None:
        """Each position of each sequence is in its slot, and nothing else has changed, between pages neither. `pages`:
        where the case was put;
        None: its own."""
        pages = pages or self.pages
        keys, values = (x[0].float().cpu() for x in (pages.keys, pages.values))
        for run, (_, k, v) in zip(self.runs, self.sequences, strict=True):
            slots = self._slots(run.pages, len(k))
            assert torch.equal(keys[slots], k)
            assert torch.equal(values[slots], v)
        slots = sum(len(k) for _, k, _ in self.sequences) * self.kind.kv_heads
        for x, _ in _stored(pages, pages):
            assert int(_whole(x).float().isfinite().sum()) == slots * x.shape[3]


def _stored(*both: Pages) -> list[tuple[Tensor, ...]]:
    """The keys of two caches, and the values that are stored besides."""
    kinds = [tuple(pages.keys[0] for pages in both), tuple(pages.values[0] for pages in both)]
    return kinds[:1] if both[0].latent else kinds


def _whole(cache: Tensor) -> Tensor:
    """All that its storage holds, what lies between pages included."""
    return cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize,), (1,), 0)


def spread(cache: Tensor, apart: int) -> Tensor:
    """A copy of `cache` (P, ...) in a larger buffer of NaN, with `apart` elements between two pages."""
    size = cache[0].numel()
    buffer = torch.full((len(cache), size + apart), float("nan"), dtype=cache.dtype, device=cache.device)
    strides = size + apart, *cache.stride()[1:]
    view = buffer.as_strided(cache.shape, strides, apart)  # begins behind something, as a layer that is not the first
    return view.copy_(cache)


def worst(got: Tensor, expected: Tensor) -> float:
    """Relative error of the worst row; NaN never passes a comparison with it."""
    got, expected = got.float().cpu(), expected.float().cpu()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)).max())


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
KINDS = {
    "group_of_4": Kind(8, 2, 64),
    "one_head_each": Kind(2, 2, 80),
    "one_for_all": Kind(8, 1, 96),
    "group_of_3": Kind(6, 2, 16, page_tokens=1),
    "wide": Kind(4, 2, 256),
    "window_within_a_page": Kind(4, 2, 32, window=5),
    "width_of_llama": Kind(8, 2, 128),
    "window": Kind(8, 2, 128, window=70, page_tokens=24),
    "softcap": Kind(4, 2, 32, softcap=1.5),
    "sinks": Kind(4, 2, 32, sinks=True),
    "all": Kind(8, 2, 64, window=40, softcap=2.0, sinks=True, page_tokens=5),
    "chunks": Kind(8, 2, 64, window=48, chunked=True, page_tokens=24),
    "narrow_values": Kind(4, 4, 192, values=128),
    "wide_values": Kind(4, 2, 24, values=40, window=40, sinks=True, page_tokens=5),
    "latents": Kind(66, 1, 24, values=20, latent=True, page_tokens=5),
    "latents_and_all": Kind(6, 1, 24, window=40, softcap=2.0, sinks=True, values=20, latent=True, page_tokens=5),
    "latents_of_deepseek": Kind(16, 1, 576, values=512, latent=True),
    "pages_apart": Kind(4, 2, 80, apart=1536),
    "pages_apart_unaligned": Kind(4, 2, 32, window=40, page_tokens=5, apart=3),
}
DECODES = [(0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (3, 1), (150, 1)]
"""The longest are cut into items, and joined."""
CHUNKS = [(0, 1), (0, 17), (40, 1), (16, 3), (100, 30), (0, 70)]
FAR = [(1500, 20), (520, 3), (600, 40)]
"""Chunks whose keys are cut into items, and joined; item bounds lie among the last one's own tokens, too."""


def on_gpu(cases: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The cases in bfloat16, which Triton's interpreter computes wrongly."""
    return [
        pytest.param((*case, torch.bfloat16), id=f"{name}-on a GPU in bfloat16", marks=pytest.mark.gpu)
        for name, case in cases.items()
    ]
