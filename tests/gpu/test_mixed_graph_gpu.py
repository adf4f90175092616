"""Steps with prompts as captured graphs, on a GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from coserve.core.types import AdapterRef
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import NO_ADAPTERS, LoraFootprint
from coserve.generate.execution.graphs.mixed import MixedGraph, Rows
from coserve.generate.execution.graphs.shared import GraphState, LogitsBuffer, make_graph_pool
from coserve.generate.execution.slot_lora import slot_lora
from coserve.generate.execution.token_slots import TokenSlots
from coserve.generate.generator import Generator
from coserve.kernels.attention.interface import MixedCapacity, TokenRun
from coserve.kernels.lora.segments import Segments
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.memory.kv import KvCache
from coserve.model.fused import FusedBase
from tests.support.executors import graphs
from tests.support.generation import adapter, collect, prompt
from tests.support.gpu_engine import gpu_base, request, texts
from tests.support.lora_backends import SEGMENTED
from tests.support.shelf import Shelf
from tests.support.shelf import named as named_adapters
from tests.support.step_recorder import StepRecorder
from tests.support.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.gpu

LIMIT = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
MIXES = (
    [(0, 90), (30, 1), (0, 1), (17, 40), (5, 1)],
    [(3, 2)],
    [(20 + i, 1) for i in range(8)] + [(700, 20)],
    [(700, 1), (0, 127)],
    [(0, 1), (64, 16), (16, 64)],
)


def test_replays_give_what_packed_steps_give() -> None:
    """One graph for each capacity of adapters over steps of all kinds; everything else in the pages stays."""
    for family, dtype in (("llama", torch.float32), ("llama", torch.bfloat16), ("gemma2", torch.float32)):
        base = gpu_base(tiny_model(family, max_position_embeddings=1024), dtype)
        fused, g = FusedBase(base, compiled=False), torch.Generator().manual_seed(0)
        kv = KvCache.for_base(base, 4096, 16)
        kv.buffer.bytes.view(dtype).copy_(torch.randn(kv.buffer.bytes.view(dtype).shape, generator=g).to(dtype))
        token_slots = TokenSlots(base.device, 64)
        last = token_slots.tokens.copy_(torch.randint(3, VOCAB, (64,), generator=g))
        slots = AdapterSlots(fused.groups, 16, base.device)
        state = GraphState(fused, token_slots, slots, LogitsBuffer(12), make_graph_pool(base.device))
        held = [adapter(base, i, rank) for i, rank in enumerate((4, 16, 9, 1, 3, 16, 2, 8, 5))]
        placed = slots.place(named_adapters(held))
        capacity = MixedCapacity(tokens=192, sequences=12, chunks=6, context=1000)
        graphs = {
            footprint.max_rank: MixedGraph(state, kv.mixed_attention(capacity), footprint)
            for footprint in (NO_ADAPTERS, LoraFootprint(16, slots.all_groups))
        }
        for graph in graphs.values():
            for _ in graph.capture():
                pass
        before = kv.buffer.bytes.clone()
        for number, mix in enumerate((*MIXES, *MIXES)):
            rows, runs, known = step(mix, number, last)
            bounds = [0]
            for _, tokens in mix:
                bounds.append(bounds[-1] + tokens)
            named = [*placed[: len(mix) - 1], -1] if number % 2 else placed[: len(mix)]
            for segments in (None, Segments(tuple(bounds), tuple(named))):
                kv.buffer.bytes.copy_(before)
                lora = None if segments is None else slot_lora(slots, segments)
                tokens_T = torch.tensor(known, device="cuda")
                positions_T, keep = (torch.tensor(x, device="cuda") for x in (rows.positions, rows.keep))
                expected = fused.forward(tokens_T, positions_T, kv.attention(runs), lora=lora, keep=keep)
                pages = kv.buffer.bytes.view(dtype).clone()
                kv.buffer.bytes.copy_(before)
                tokens = last.clone()
                logits, chosen = graphs[0 if segments is None else 16].run(rows, runs, segments)
                close(logits, expected, dtype)
                assert chosen.tolist() == logits.max(-1).indices.tolist()
                assert last[1 : len(mix) + 1].tolist() == chosen.tolist()
                assert last[len(mix) + 1 :].equal(tokens[len(mix) + 1 :])
                close(kv.buffer.bytes.view(dtype), pages, dtype)
                untouched = (before.view(dtype) == pages) & ~(kv.buffer.bytes.view(dtype) == pages)
                assert not untouched.any(), "a row of padding has written"
                last.copy_(tokens)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    got, expected = got.float(), expected.float()
    assert float((got - expected).abs().max()) < LIMIT[dtype] * float(expected.abs().max())


def step(mix: list[tuple[int, int]], seed: int, last: torch.Tensor) -> tuple[Rows, list[TokenRun], list[int]]:
    """The token of every decode is in its sequence's token slot; and the tokens as the device knows them."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(256, generator=g).tolist()
    rows, runs, known = Rows([], [], [], [], list(range(1, len(mix) + 1))), [], list[int]()
    for slot, (position, tokens) in enumerate(mix, 1):
        runs.append(TokenRun(tokens, position, tuple(order.pop() for _ in range(-(-(position + tokens) // 16)))))
        ids = torch.randint(3, VOCAB, (tokens,), generator=g).tolist()
        in_flight = tokens == 1
        rows.tokens.extend([NOT_FINITE] if in_flight else ids)
        rows.slots.extend([slot if in_flight else 0] * tokens)
        rows.positions.extend(range(position, position + tokens))
        rows.keep.append(len(rows.tokens) - 1)
        known.extend([int(last[slot])] if in_flight else ids)
    return rows, runs, known


def test_texts_and_nothing_compiled_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers, prompts in chunks, adapters and none; every step with a prompt is a graph."""
    base = gpu_base(tiny_model("llama"))
    refs = [AdapterRef(f"a{i}", 1) for i in range(4)]
    shelf = Shelf({ref: adapter(base, i, rank) for i, (ref, rank) in enumerate(zip(refs, (4, 1, 16, 9), strict=True))})
    requests = [request(str(n), prompt(n), refs[n % 5] if n % 5 < 4 else None) for n in (3, 17, 40, 1, 5, 23, 34)]
    expected = texts(base, requests, shelf)
    steps, fused = StepRecorder(monkeypatch), FusedBase(base)
    for step_tokens in (256, 19):
        kv = KvCache.for_base(base, 4096, 16)
        executor = graphs(fused, kv, SEGMENTED, prepared=False, max_running=16)
        executor.warm_up()
        gen = Generator(base, shelf.store(), kv, executor, max_running=16, step_tokens=step_tokens)
        found = {id: tokens for id, (tokens, _) in collect(gen, requests).items()}
        assert found == expected
        assert steps.graphs
        assert not steps.others
