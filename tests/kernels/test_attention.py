"""Packed and paged attention against an obvious loop, and paged attention against itself, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.engine.threads import EXACT_THREADS
from coserve.kernels.attention.backend import attention_notes, paged_attention
from coserve.kernels.attention.interface import AttentionParams, Pages, TokenRun, as_cached
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.attention.torch_paged.paged import PagedAttention
from coserve.kernels.attention.torch_paged.tiles import KEY_BLOCK
from tests.support.attention_cases import spread
from tests.support.examples import by_day, examples


@dataclass(frozen=True)
class Kind:
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float = 0.4
    apart: int = 0
    """Elements of other things between a layer's pages."""
    values: int = 0
    """Width of a value; 0: that of a key."""
    chunked: bool = False
    latent: bool = False
    """Whether a value is the beginning of its key."""

    def sink_logits(self) -> Tensor | None:
        return torch.linspace(-1, 2, self.heads) if self.sinks else None

    def inputs(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(tokens, self.heads, self.width, generator=g).transpose(0, 1)
        k = torch.randn(tokens, self.kv_heads, self.width, generator=g).transpose(0, 1)
        v = torch.randn(tokens, self.kv_heads, self.values or self.width, generator=g).transpose(0, 1)
        return q, k, k[..., : self.values] if self.latent else v


KINDS = {
    "plain": Kind(),
    "one_head_each": Kind(kv_heads=4),
    "wide_groups": Kind(heads=6, kv_heads=1, width=20),
    "window": Kind(window=5),
    "long_window": Kind(window=70),
    "softcap": Kind(softcap=1.5),
    "sinks": Kind(sinks=True),
    "all": Kind(window=9, softcap=1.5, sinks=True),
    "chunks": Kind(window=7, chunked=True),
    "narrow_values": Kind(kv_heads=4, width=12, values=8),
    "wide_values": Kind(values=20, window=9, sinks=True),
    "latents": Kind(kv_heads=1, width=20, values=12, latent=True),
    "latents_and_all": Kind(kv_heads=1, width=20, values=12, latent=True, window=9, softcap=1.5, sinks=True),
    "pages_apart": Kind(apart=40),
    "pages_apart_by_half_keys": Kind(width=12, apart=6),
}


def reference(kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, in fp64, head by head: (T, H, D)."""
    q, k, v = q.double(), k.double(), v.double()
    sinks, heads = kind.sink_logits(), []
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (behind >= 0) if kind.window is None else (behind >= 0) & (behind < kind.window)
    if kind.chunked and kind.window is not None:
        at = torch.arange(q.shape[1])
        seen = (behind >= 0) & (at[:, None] // kind.window == at // kind.window)
    for h in range(kind.heads):
        kv = h // (kind.heads // kind.kv_heads)
        scores = q[h] @ k[kv].T * kind.scaling
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        weights = scores.exp() * seen
        total = weights.sum(1) + (0 if sinks is None else sinks[h].double().exp())
        heads.append(weights @ v[kv] / total[:, None])
    return torch.stack(heads, 1)


def call(attention: PackedAttention | PagedAttention, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    params = AttentionParams(kind.scaling, kind.window, kind.softcap, kind.sink_logits(), kind.chunked)
    return attention.attend(0, q, k, v, params)


class Cache:
    """Pages handed out in an order that is nobody's sequence order."""

    def __init__(self, kind: Kind, *, page_tokens: int = 16, pages: int = 64, dtype: torch.dtype = torch.float32):
        widths = kind.width, kind.values or kind.width
        caches = [torch.zeros(pages + 1, page_tokens, kind.kv_heads, width, dtype=dtype) for width in widths]
        apart = [kind.apart + page_tokens * kind.kv_heads * (max(widths) - width) for width in widths]
        keys, values = (spread(x, a) for x, a in zip(caches, apart, strict=True))
        self.pages = Pages((keys,), (keys[..., : kind.values] if kind.latent else values,), kind.latent)
        self.page_tokens = page_tokens
        self.free = list(torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist())

    def take(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // self.page_tokens)))


def in_chunks(
    kind: Kind,
    length: int,
    cuts: Sequence[int],
    *,
    page_tokens: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One sequence alone, computed in the chunks between `cuts`: (T, H, D). `dtype`: the cache's."""
    cache = Cache(kind, page_tokens=page_tokens, dtype=dtype)
    pages = cache.take(length)
    q, k, v = kind.inputs(length, seed)
    outputs = []
    for start, end in pairwise([0, *cuts, length]):
        if start < end:
            part = [x[:, start:end] for x in (q, k, v)]
            run = TokenRun(end - start, start, pages[: -(-end // page_tokens)])
            outputs.append(call(paged_attention(cache.pages, [run]), kind, *part))
    return torch.cat(outputs)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where a test says nothing else: threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 12], [5, 0, 2]])
def test_packed_equals_the_reference(kind: Kind, lengths: list[int]) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    q, k, v = kind.inputs(bounds[-1])
    got = call(PackedAttention(bounds), kind, q, k, v)
    for start, end in pairwise(bounds):
        expected = reference(kind, q[:, start:end], k[:, start:end], v[:, start:end])
        torch.testing.assert_close(got[start:end].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "window", "all", "wide_values"])
def test_gradients_of_packed(name: str) -> None:
    kind = KINDS[name]
    inputs = [x.double().requires_grad_() for x in kind.inputs(9)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(PackedAttention([0, 4, 9]), kind, q, k, v)

    def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [slice(0, 4), slice(4, 9)]
        return torch.cat([reference(kind, q[:, at], k[:, at], v[:, at]) for at in parts])

    weights = torch.randn(
        9, kind.heads, kind.values or kind.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    got = torch.autograd.grad((ours(*inputs) * weights).sum(), inputs)
    expected = torch.autograd.grad((slow(*inputs) * weights).sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("page_tokens", [1, 16, 24])
def test_paged_equals_the_reference(kind: Kind, page_tokens: int) -> None:
    """Two sequences in steps that mix prefill chunks and single tokens."""
    cache = Cache(kind, page_tokens=page_tokens, pages=140)
    lengths = (100, 23)
    pages = [cache.take(length) for length in lengths]
    inputs = [kind.inputs(length, seed) for seed, length in enumerate(lengths)]
    got: list[list[Tensor]] = [[], []]
    for steps in ([(0, 0, 70)], [(0, 70, 71), (1, 0, 20)], [(1, 20, 21), (0, 71, 100)], [(1, 21, 23)]):
        runs = [TokenRun(end - start, start, pages[s]) for s, start, end in steps]
        packed = [torch.cat([inputs[s][i][:, start:end] for s, start, end in steps], 1) for i in range(3)]
        out = call(paged_attention(cache.pages, runs), kind, *packed)
        row = 0
        for s, start, end in steps:
            got[s].append(out[row : row + end - start])
            row += end - start
    for s in range(2):
        torch.testing.assert_close(torch.cat(got[s]).double(), reference(kind, *inputs[s]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [EXACT_THREADS], indirect=True)
@pytest.mark.parametrize("name", ["plain", "wide_groups", "all"])
def test_threads_do_not_change_a_bit(name: str, threads: int) -> None:
    """As many as an engine takes unless it is told otherwise. With three, an AMD processor (Zen 3) changes some."""
    kind, length = KINDS[name], KEY_BLOCK + 13
    whole = in_chunks(kind, length, [])
    for cuts in ([1], [64], [16, 17, 40]):
        assert torch.equal(in_chunks(kind, length, cuts), whole), cuts


@pytest.mark.parametrize("kind", by_day(KINDS, "plain", "all", "pages_apart"))
def test_chunks_do_not_change_a_bit(kind: Kind) -> None:
    length = 2 * KEY_BLOCK + 13
    whole = in_chunks(kind, length, [])
    for cuts in ([1], [64], [16, 17, 40, 99], list(range(1, length)), list(range(110, length))):
        assert torch.equal(in_chunks(kind, length, cuts), whole), cuts
    assert torch.equal(in_chunks(kind, length, [33], page_tokens=5), whole)


@pytest.mark.parametrize("kind", by_day(KINDS, "plain", "all", "pages_apart"))
def test_a_cache_in_fp8_rounds_keys_and_values_alone(kind: Kind) -> None:
    """In chunks of any size, what a token sees is rounded, its own key and value, too."""
    length = KEY_BLOCK + 13
    whole = in_chunks(kind, length, [], dtype=torch.float8_e4m3fn)
    assert torch.equal(in_chunks(kind, length, [1, 40, 41], dtype=torch.float8_e4m3fn), whole)
    q, k, v = kind.inputs(length)
    k, v = (as_cached(x, torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
    torch.testing.assert_close(whole.double(), reference(kind, q, k, v), atol=1e-5, rtol=1e-5)


@settings(max_examples=examples(25), deadline=None)
@given(
    name=st.sampled_from(sorted(KINDS)),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_neighbours_do_not_change_a_bit(name: str, lengths: list[int], seed: int) -> None:
    """Random sequences in random steps, each against itself alone and whole."""
    kind, chance = KINDS[name], random.Random(seed)
    cache = Cache(kind)
    pages = [cache.take(length) for length in lengths]
    inputs = [kind.inputs(length, seed) for seed, length in enumerate(lengths)]
    done = [0] * len(lengths)
    got: list[list[Tensor]] = [[] for _ in lengths]
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        runs, parts, who = [], [], []
        for s, length in enumerate(lengths):
            n = min(chance.choice([0, 1, 5, 30, 90]), length - done[s])
            if n:
                runs.append(TokenRun(n, done[s], pages[s]))
                parts.append([x[:, done[s] : done[s] + n] for x in inputs[s]])
                who.append((s, n))
        if not runs:
            continue
        out = call(paged_attention(cache.pages, runs), kind, *(torch.cat(x, 1) for x in zip(*parts, strict=True)))
        for (s, n), rows in zip(who, out.split([n for _, n in who]), strict=True):
            got[s].append(rows)
            done[s] += n
    for s, length in enumerate(lengths):
        assert torch.equal(torch.cat(got[s]), in_chunks(kind, length, [], seed=s))


def test_a_sequence_of_nan_stays_alone() -> None:
    kind = Kind()
    cache = Cache(kind)
    runs = [TokenRun(20, 0, cache.take(20)), TokenRun(3, 0, cache.take(3))]
    q, k, v = kind.inputs(20)
    bad = [torch.full_like(x[:, :3], torch.nan) for x in (q, k, v)]
    packed = (torch.cat(pair, 1) for pair in zip((q, k, v), bad, strict=True))
    out = call(paged_attention(cache.pages, runs), kind, *packed)
    assert torch.equal(out[:20], in_chunks(kind, 20, []))
    assert out[20:].isnan().all()


def test_bfloat16_is_computed_in_fp32_on_cpu() -> None:
    kind = Kind()
    cache = Cache(kind, dtype=torch.bfloat16)
    q, k, v = (x.bfloat16() for x in kind.inputs(30))
    out = call(paged_attention(cache.pages, [TokenRun(30, 0, cache.take(30))]), kind, q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference(kind, q, k, v), atol=1e-2, rtol=1e-2)


def test_slow_paths_are_noted() -> None:
    assert attention_notes(torch.device("cpu"), torch.float32) == ()
    assert attention_notes(torch.device("cuda"), torch.bfloat16) == ()
    assert "plain torch" in attention_notes(torch.device("cuda"), torch.float64)[0]


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "values"), [(64, 64), (80, 80), (128, 128), (192, 128), (64, 128)])
@pytest.mark.parametrize(
    ("window", "chunked"), [(None, False), (9, False), (50, True)], ids=["full", "window", "chunks"]
)
def test_packed_on_cuda_with_gradients(width: int, values: int, window: int | None, chunked: bool) -> None:
    """One kernel for all sequences, bfloat16, against the same in fp32 on CPU."""
    kind = Kind(heads=8, width=width, values=values, window=window, scaling=width**-0.5, chunked=chunked)
    bounds = [0, 70, 70, 71, 203]
    host = [x.bfloat16().float().requires_grad_() for x in kind.inputs(203)]
    device = [x.detach().cuda().bfloat16().requires_grad_() for x in host]
    expected, got = (call(PackedAttention(bounds), kind, *x) for x in (host, device))
    torch.testing.assert_close(got.float().cpu(), expected, atol=2e-2, rtol=2e-2)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), host)
    found = torch.autograd.grad((got.float() * weights.cuda()).sum(), device)
    for a, b in zip(found, wanted, strict=True):
        assert float((a.float().cpu() - b).norm() / b.norm()) < 1e-2
