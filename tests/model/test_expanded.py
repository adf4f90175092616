"""Long prompt chunks over a cache of latents: by keys and values of all heads as by absorbed queries, and as PEFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.core.sampling import SamplingParams
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graphs.mixed import MixedGraph, MixedGraphs
from coserve.generate.execution.slot_lora import slot_lora
from coserve.kernels.attention import expanded
from coserve.kernels.attention.expanded import ExpandedAttention, StepTerms, long_chunks, most_expanded
from coserve.kernels.attention.interface import AttentionParams, KvShape, TokenRun
from coserve.kernels.attention.torch_paged.paged import PagedAttention
from coserve.kernels.attention.triton_paged.step import FusedPagedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.memory import kv
from coserve.memory.kv import KvCache
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.latent import absorbed
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.quantized.modules import quantize_layers
from tests.support.families import tiny_family
from tests.support.generation import adapter, collect, make_generator, prompt, request
from tests.support.live_bytes import LiveBytes
from tests.support.lora_backends import GROUPED, NAIVE, SEGMENTED
from tests.support.lora_reference import alone, save_peft, tokens_of
from tests.support.shelf import Shelf, named

PAGE, LONG = 4, 6
"""Tokens of a page; new tokens of a chunk that is expanded in these tests."""
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
BATCH = (1, -1, 0, 1, -1, 0)
"""The adapter of each sequence: adapter 1 is DoRA, -1 is the base alone."""
STEPS = ((7, 9, 3, 0, 0, 0), (1, 6, 1, 8, 2, 0), (11, 0, 6, 1, 7, 6), (1, 1, 8, 6, 1, 1))
"""New tokens of each sequence in each step: new prompts, continued ones and decodes."""
SEQUENCES = [tokens_of(sum(own), seed) for seed, own in enumerate(zip(*STEPS, strict=True))]

SHORT = SamplingParams(max_tokens=3, temperature=0.0)

Forward = Callable[[Tensor, Tensor, KvCache, list[TokenRun], Segments], Tensor]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, ...]]]:
    """The rows of chunks that were expanded, by layer."""
    found: Counter[tuple[int, ...]] = Counter()
    attend = ExpandedAttention.attend_chunks

    def counted(self: ExpandedAttention, layer: int, *given: Any) -> Tensor:
        out = attend(self, layer, *given)
        found[layer, len(out)] += 1
        return out

    monkeypatch.setattr(ExpandedAttention, "attend_chunks", counted)
    monkeypatch.setattr(expanded, "is_long", lambda run: run.tokens >= LONG)
    return found


def cache(base: Base, *, expands: bool, dtype: torch.dtype = torch.float32) -> KvCache:
    shapes = [shape._replace(expanded=8 * expands) for shape in base.kv_shapes]
    return KvCache(shapes, pages=64, page_tokens=PAGE, dtype=dtype, device=base.device)


def run(base: Base, cached: KvCache, forward: Forward) -> list[Tensor]:
    """Logits (T, V) of each sequence, computed in `STEPS`."""
    pages = [tuple(cached.allocate(-(-len(own) // PAGE)) or ()) for own in SEQUENCES]
    at, found = [0] * len(SEQUENCES), [list[Tensor]() for _ in SEQUENCES]
    for step in STEPS:
        runs = [TokenRun(tokens, at[i], pages[i]) for i, tokens in enumerate(step) if tokens]
        tokens_T = torch.cat([own[at[i] : at[i] + step[i]] for i, own in enumerate(SEQUENCES)])
        positions_T = torch.cat([torch.arange(one.position, one.position + one.tokens) for one in runs])
        segments = Segments((0, *accumulate(step)), BATCH)
        with torch.no_grad():
            parts = forward(tokens_T, positions_T, cached, runs, segments).split(list(step))
        for i, part in enumerate(parts):
            found[i].append(part)
            at[i] += step[i]
    return [torch.cat(parts) for parts in found]


def made(folder: Path, family: str) -> tuple[Base, tuple[LoraWeights, ...], list[Tensor]]:
    """A base, adapters at all linear modules of attention as served, and PEFT's logits (T, V) of each sequence."""
    base, models = wrap_base(tiny_family(family), name=family), {-1: tiny_family(family)}
    targets = [name for name in base.spec.sites if "self_attn" in name]
    for own, dora in enumerate((False, True)):
        settings = {"r": 3 + 2 * own, "target_modules": targets, "use_dora": dora}
        models[own] = save_peft(tiny_family(family), folder / str(own), seed=own, **settings)
    adapters = [load_adapter(folder / str(own), base.spec, dtype=torch.float32) for own in range(2)]
    expected = [alone(models[own], tokens_T) for own, tokens_T in zip(BATCH, SEQUENCES, strict=True)]
    return base, tuple(base.served(one) for one in adapters), expected


def eager(
    base: Base, adapters: tuple[LoraWeights, ...], backend: LoraBackend, tokens_T: Tensor, positions_T: Tensor,
    cached: KvCache, runs: list[TokenRun], segments: Segments,
) -> Tensor:  # fmt: skip
    batch = LoraBatch(segments, adapters, backend)
    attention = cached.attention(runs, StepTerms(segments, partial(base.sites.terms, batch)))
    return base.forward(tokens_T, positions_T, attention, lora=batch, keep=None)


def by_slots(
    fused: FusedBase, slots: AdapterSlots, placed: list[int], tokens_T: Tensor, positions_T: Tensor,
    cached: KvCache, runs: list[TokenRun], segments: Segments,
) -> Tensor:  # fmt: skip
    segments = Segments(segments.bounds, tuple(-1 if own < 0 else placed[own] for own in segments.adapters))
    terms = StepTerms(segments, partial(slot_lora, slots))
    lora = slot_lora(slots, segments)
    return fused.forward(tokens_T, positions_T, cached.attention(runs, terms), lora=lora, keep=None)


def check(base: Base, forward: Forward, expected: list[Tensor], chunks: Counter[tuple[int, ...]]) -> None:
    for got, own in zip(run(base, cache(base, expands=True), forward), expected, strict=True):
        torch.testing.assert_close(got, own, **CLOSE)
    rows = [sum(tokens for tokens in step if tokens >= LONG) for step in STEPS]
    assert chunks == Counter((layer, count) for layer in range(len(base.layers)) for count in rows)


@pytest.mark.parametrize(
    ("family", "backend"), [("deepseek_v3", GROUPED), ("minicpm3", SEGMENTED), ("minicpm3", NAIVE)], ids=str
)
@pytest.mark.slow
def test_rows_of_mixed_steps_equal_pefts(
    family: str, backend: LoraBackend, tmp_path: Path, chunks: Counter[tuple[int, ...]]
) -> None:
    base, adapters, expected = made(tmp_path, family)
    check(base, partial(eager, base, adapters, backend), expected, chunks)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow
def test_rows_of_steps_with_slots_equal_pefts(
    compiled: bool, tmp_path: Path, chunks: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled layers too: one function for steps that expand and for those that do not. The kernels of a GPU attend
    what is not expanded."""
    if not compiled:
        monkeypatch.setattr(kv, "paged_attention", FusedPagedAttention)
    base, adapters, expected = made(tmp_path, "minicpm3")
    fused = FusedBase(base, compiled=compiled, backend=lambda graph, inputs: graph.forward)
    slots = AdapterSlots(fused.groups, 2, base.device, fused.exchanges, base.sites.biases)
    check(base, partial(by_slots, fused, slots, slots.place(named(adapters))), expected, chunks)


@pytest.mark.parametrize(("kind", "dtype"), [("", torch.float8_e4m3fn), ("fp8", torch.float32), ("nf4", torch.float32)])
def test_latents_and_projections_are_expanded_as_they_are_stored(
    kind: str, dtype: torch.dtype, chunks: Counter[tuple[int, ...]]
) -> None:
    model = tiny_family("minicpm3", kv_lora_rank=64, v_head_dim=12)
    if kind:
        quantize_layers(model, kind)
    base = wrap_base(model, name="minicpm3")

    def forward(
        tokens_T: Tensor, positions_T: Tensor, cached: KvCache, runs: list[TokenRun], segments: Segments
    ) -> Tensor:
        return base.forward(tokens_T, positions_T, cached.attention(runs), lora=None, keep=None)

    both = [cache(base, expands=expands, dtype=dtype) for expands in (True, False)]
    got, expected = (run(base, own, forward) for own in both)
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), **CLOSE)
    assert chunks
    for own, other in zip(*(one.views.keys for one in both), strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=0.1, atol=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.3),
        AttentionParams(0.3, window=5),
        AttentionParams(0.3, window=5, chunked=True),
        AttentionParams(0.3, softcap=1.5, sinks=torch.linspace(-1, 2, 4)),
    ],
)
@pytest.mark.parametrize("paged", [PagedAttention, FusedPagedAttention])
def test_layers_with_windows_soft_caps_and_sinks(
    paged: type[PagedAttention | FusedPagedAttention],
    params: AttentionParams,
    chunks: Counter[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv, "paged_attention", paged)
    base = wrap_base(tiny_family("deepseek_v3"), name="deepseek_v3")
    module, g = base.layers[1].self_attn, torch.Generator().manual_seed(3)
    widths = module.qk_nope_head_dim + module.qk_rope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    first, rows = (9, 7, 3), (12, 1, 8)

    def attend(cached: KvCache) -> list[Tensor]:
        pages = [tuple(cached.allocate(6) or ()) for _ in first]
        found = []
        for lengths, before in ((first, (0, 0, 0)), (rows, first)):
            runs = [TokenRun(*both, own) for *both, own in zip(lengths, before, pages, strict=True)]
            q, k, latents = (
                torch.randn(count, sum(lengths), width, generator=g.manual_seed(sum(lengths)))
                for count, width in zip((4, 1, 1), widths, strict=True)
            )
            found.append(absorbed.attend(module, cached.attention(runs), 1, q, k, latents, params))
        return found

    for got, expected in zip(*(attend(cache(base, expands=one)) for one in (True, False)), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert chunks


def test_long_chunks_are_expanded_as_far_as_memory_lasts() -> None:
    latent = KvShape(1, 24, 20, latent=True)
    assert most_expanded([latent, KvShape(0, 0, 0)]) == 0
    most = most_expanded([KvShape(0, 0, 0), latent._replace(expanded=1280)])
    assert most == (1 << 30) // 1280
    runs = [TokenRun(*one, ()) for one in ((1, 900), (LONG, 40), (LONG - 1, 0), (60, 41), (20, 0), (LONG, 34))]
    assert long_chunks(runs, 0) == []
    assert long_chunks(runs, most) == [1, 3, 4, 5]
    assert long_chunks(runs, 46 + 101) == [1, 3]
    assert long_chunks(runs, 46 + 100) == [1, 4, 5], "those behind one that is too long"


@pytest.mark.parametrize(("pages", "told"), [(16, False), (17, True)])
def test_an_operator_is_told_where_long_contexts_are_slow(pages: int, told: bool) -> None:
    shape = KvShape(1, 24, 20, latent=True, expanded=(1 << 30) // 256)
    cached = KvCache([shape], pages=pages, page_tokens=16, dtype=torch.float32, device=torch.device("cpu"))
    assert any("more than 256 tokens of contexts" in note for note in cached.notes) == told


def test_a_base_says_what_a_token_takes() -> None:
    """On a GPU in 16 bits; elsewhere a row's bits must not depend on how its prompt was cut."""
    base = wrap_base(tiny_family("deepseek_v3"), name="deepseek_v3")
    assert [shape.expanded for shape in base.kv_shapes] == [0, 0]


@pytest.mark.slow
def test_executors_expand(chunks: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph; steps of shorter chunks have theirs. Prompts whose log-probabilities are asked for, too."""
    base = wrap_base(tiny_family("minicpm3"), name="minicpm3", eos_token_ids=())
    fused = FusedBase(base, compiled=False)
    shelf = Shelf(named([adapter(base, 1, 3), adapter(base, 2, 5, ("kv_b_proj",))]))
    refs = [*shelf.weights, None]
    scored = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    kinds = [(20, SHORT), (3, SHORT), (17, scored), (13, SHORT)]
    requests = [request(str(i), prompt(length, i), kind, refs[i % 3]) for i, (length, kind) in enumerate(kinds)]
    steps = list[int]()
    holding = MixedGraphs.holding

    def watched(self: MixedGraphs, runs: Sequence[TokenRun], footprint: LoraFootprint) -> MixedGraph | None:
        steps.append(max(one.tokens for one in runs))
        return holding(self, runs, footprint)

    monkeypatch.setattr(MixedGraphs, "holding", watched)
    shapes, found = base.kv_shapes, []
    for numbers in (0, 8):
        base.kv_shapes = [shape._replace(expanded=numbers) for shape in shapes]
        for ahead in (None, fused):
            steps.clear()
            chunks.clear()
            found.append(collect(make_generator(base, shelf, fused=ahead, step_tokens=16), requests))
            assert bool(chunks) == bool(numbers)
            if ahead is not None:
                assert steps and (max(steps) < LONG) == bool(numbers)
    assert all(one == found[0] for one in found[1:])


def test_the_memory_plan_counts_the_longest_contexts() -> None:
    base = wrap_base(tiny_family("minicpm3"), name="minicpm3", eos_token_ids=())
    most, module = 4096, base.layers[0].self_attn
    given = Conditions(GROUPED, recompute=False, max_running=4, page_tokens=16, work=Work(512, 64, 1))
    peaks = []
    with LiveBytes() as meter:
        for one in (0, expanded.EXPANDED_BYTES // most):
            base.kv_shapes = [shape._replace(expanded=one) for shape in base.kv_shapes]
            profiler = MemoryProfiler(base, meter, given)
            peaks.append(profiler.step(600))
    heads = module.num_heads
    width = module.qk_nope_head_dim + module.qk_rope_head_dim
    expected = heads * (module.qk_nope_head_dim + width + 2 * module.v_head_dim) * most
    assert peaks[1] > expected * 4
    assert peaks[1] > peaks[0]
