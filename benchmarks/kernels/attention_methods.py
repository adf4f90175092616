"""Paged attention by ours and by others, as calls that a CUDA graph can capture: what `benchmarks/kernels/attention.py`
times.

Each method gets the same paged cache (pages, page_tokens, K, D) in bfloat16. Methods of missing libraries are left out.
Only ours writes the new keys and values too; gathering is part of the time of those that need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from coserve.kernels.attention.interface import AttentionParams, Pages, TokenRun
from coserve.kernels.attention.torch_paged.paged import PagedAttention
from coserve.kernels.attention.triton_paged.decode_steps import FusedStaticAttention
from coserve.kernels.attention.triton_paged.step import FusedPagedAttention

DEVICE = torch.device("cuda")
PAGE = 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    heads: int = 32
    kv_heads: int = 8
    width: int = 128

    @property
    def bytes_per_token(self) -> int:
        return 2 * 2 * self.kv_heads * self.width

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.width**-0.5)


class Cache:
    """A cache of random bfloat16 for `tokens` tokens, one layer, handed out in random order."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        pages = -(-tokens // PAGE)
        size = (pages + 1, PAGE, shape.kv_heads, shape.width)
        self.shape = shape
        parts = [torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2)]
        self.pages = Pages((parts[0],), (parts[1],))
        self.order = torch.randperm(pages).tolist()
        self._at = 0

    def runs(self, spans: Sequence[tuple[int, int]]) -> list[TokenRun]:
        """Runs of (position, tokens), on pages that were given out longest ago."""
        runs = []
        for position, tokens in spans:
            count = -(-(position + tokens) // PAGE)
            if self._at + count > len(self.order):
                self._at = 0
            runs.append(TokenRun(tokens, position, tuple(self.order[self._at : self._at + count])))
            self._at += count
        return runs

    def qkv(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (H, T, D), k, v (K, T, D), laid out token by token as projections leave them."""
        s = self.shape
        parts = (torch.randn(tokens, h, s.width, device=DEVICE).bfloat16() for h in (s.heads, s.kv_heads, s.kv_heads))
        q, k, v = (x.transpose(0, 1) for x in parts)
        return q, k, v


def index(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def bounds(lengths: Sequence[int]) -> Tensor:
    return index([0, *accumulate(lengths)])


def static(cache: Cache, runs: list[TokenRun]) -> Call:
    attention = FusedStaticAttention(cache.pages, batch=len(runs), max_tokens=max(r.position for r in runs) + 1)
    attention.load(runs)
    q, k, v = cache.qkv(len(runs))
    return lambda: attention.attend(0, q, k, v, cache.shape.params)


def mixed(cache: Cache, runs: list[TokenRun]) -> Call:
    attention = FusedPagedAttention(cache.pages, runs)
    q, k, v = cache.qkv(sum(run.tokens for run in runs))
    return lambda: attention.attend(0, q, k, v, cache.shape.params)


def plain(cache: Cache, runs: list[TokenRun]) -> Call:
    """The fallback for CPU, in torch."""
    attention = PagedAttention(cache.pages, runs)
    q, k, v = cache.qkv(sum(run.tokens for run in runs))
    return lambda: attention.attend(0, q, k, v, cache.shape.params)


def _gathered(cache: Cache, runs: list[TokenRun]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Keys and values of all sequences one after another, (pages * PAGE, K, D)."""
    at = index([page for run in runs for page in run.pages], torch.int64)

    def gather() -> tuple[Tensor, Tensor]:
        k, v = (x[0].index_select(0, at).flatten(0, 1) for x in (cache.pages.keys, cache.pages.values))
        return k, v

    return gather


def sdpa(cache: Cache, runs: list[TokenRun], *, gather: bool = True) -> Call:
    """Decode of sequences of one length that is whole pages; without `gather` as if the cache were not paged."""
    fetch, batch = _gathered(cache, runs), len(runs)
    q = cache.qkv(batch)[0].transpose(0, 1)[:, :, None]
    held = fetch()

    def call() -> Tensor:
        k, v = fetch() if gather else held
        k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def varlen(cache: Cache, runs: list[TokenRun], attend: Callable[..., object] | None = None) -> Call:
    """torch's kernel for packed sequences: on the new tokens alone where nothing is cached, else on gathered pages."""
    q, k, v = (x.transpose(0, 1) for x in cache.qkv(sum(run.tokens for run in runs)))
    lengths = [run.tokens for run in runs]
    cu_q, longest = bounds(lengths), max(lengths)
    attend = attend or _torch_varlen
    if all(run.position == 0 for run in runs):
        return lambda: attend(q, k, v, cu_q, cu_q, longest, longest)
    contexts = [run.position + run.tokens for run in runs]
    assert all(context % PAGE == 0 for context in contexts), "expected whole pages"
    fetch, cu_k, deepest = _gathered(cache, runs), bounds(contexts), max(contexts)
    return lambda: attend(q, *fetch(), cu_q, cu_k, longest, deepest)


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> object:
    return varlen_attn(q, k, v, cu_q, cu_k, most_q, most_k, window_size=(-1, 0))


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"no {name}: {error}", flush=True)
        return None


def fa3_of() -> Callable[[Cache, list[TokenRun]], Call] | None:
    """FlashAttention-3 as the wheel `fa3-fwd` builds it: forward, no paged cache."""
    library = _optional("fa3_fwd_interface")
    if library is None:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> object:
        return library.flash_attn_varlen_func(q, k, v, cu_q, cu_k, most_q, most_k, causal=True)

    return lambda cache, runs: varlen(cache, runs, attend)


def _flashinfer_pages(runs: list[TokenRun]) -> tuple[Tensor, Tensor, Tensor]:
    last = [(run.position + run.tokens - 1) % PAGE + 1 for run in runs]
    return (
        bounds([len(run.pages) for run in runs]).cpu(),
        index([p for run in runs for p in run.pages]),
        index(last).cpu(),
    )


def flashinfer_decode_of(tensor_cores: bool) -> Callable[[Cache, list[TokenRun]], Call] | None:
    library = _optional("flashinfer")
    if library is None:
        return None

    def make(cache: Cache, runs: list[TokenRun]) -> Call:
        memory, s = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE), cache.shape
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            memory, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
        )
        wrapper.plan(
            *_flashinfer_pages(runs),
            s.heads,
            s.kv_heads,
            s.width,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        q = cache.qkv(len(runs))[0].transpose(0, 1)
        return lambda: wrapper.run(q, (cache.pages.keys[0], cache.pages.values[0]))

    return make


def flashinfer_prefill_of(backend: str) -> Callable[[Cache, list[TokenRun]], Call] | None:
    library = _optional("flashinfer")
    if library is None:
        return None

    def make(cache: Cache, runs: list[TokenRun]) -> Call:
        memory, s = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE), cache.shape
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend=backend)
        lengths = [run.tokens for run in runs]
        wrapper.plan(
            bounds(lengths).cpu(),
            *_flashinfer_pages(runs),
            s.heads,
            s.kv_heads,
            s.width,
            PAGE,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        q = cache.qkv(sum(lengths))[0].transpose(0, 1).contiguous()
        return lambda: wrapper.run(q, (cache.pages.keys[0], cache.pages.values[0]))

    return make
