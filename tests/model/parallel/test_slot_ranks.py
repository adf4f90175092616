"""Adapters in slots on ranks, fully sharded ones and others: the logits of one process, one collective a group of
sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import TileCapacity
from coserve.generate.execution.slot_lora import StaticSlotLora, slot_lora
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice
from coserve.model.lora import LoraBatch
from coserve.model.parallel.mesh import GroupMesh, Mesh
from tests.support import sharded
from tests.support.examples import in_turns
from tests.support.lora_backends import GROUPED
from tests.support.ranks import OneShotMesh, Ranks
from tests.support.sharded import KINDS, Kind, load, whole_adapter
from tests.support.shelf import named

ADAPTERS = (*KINDS, Kind(48), Kind(8, uneven=("v_proj", "down_proj"), dora=True))
"""Parts of the one of rank 48 are whole vectors on two ranks, and more than one block of ranks; those of the first are
neither. The last one is fully sharded at some sites."""
BOUNDS = (0, 5, 6, 9)
BATCHES = {"fully sharded": (0, -1, 4), "local": (1, -1, 3), "mixed": (4, 3, 1), "dora": (5, -1, 4)}
CASES = (
    ("fully sharded", "static decode"),
    ("local", "static decode"),
    *(("mixed", path) for path in ("decode", "static decode", "static prefill")),
    ("dora", "static decode"),
)


ONE_SHOT = in_turns({"gathered": False, "zero-padded sums": True}, ("gathered",), days=2)
ONE_ROW = (0, 2, 4)
"""Adapters; the second one is local."""


class Found(NamedTuple):
    logits: Tensor
    calls: dict[str, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sharded.save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=1)  # the interpreter is slow


def _lora(slots: AdapterSlots, segments: Segments, path: str) -> PreparedLora:
    if path == "decode":
        return slot_lora(slots, segments)
    tiles = TileCapacity(8 if path == "static decode" else 64, len(segments.adapters))
    footprint = slots.footprint(segments)
    wider = LoraFootprint(
        footprint.max_rank + 16, slots.all_groups, footprint.local, footprint.sharded, footprint.scaled
    )
    static = StaticSlotLora(slots, segments.tokens, wider, [tiles])
    return static.within(static.load(segments))


def _placed(base: Base) -> tuple[FusedBase, AdapterSlots, list[int]]:
    fused = FusedBase(base, compiled=False)
    slots = AdapterSlots(fused.groups, len(ADAPTERS), base.device, fused.exchanges, base.sites.biases)
    held = [base.served(whole_adapter(base.spec, kind)) for kind in ADAPTERS]
    for weights in held:
        base.complete_scales(weights)
    return fused, slots, slots.place(named(held))


def _logits(
    mesh: Mesh, folder: str, strategy: str, one_shot: bool, cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Found]:
    if one_shot:
        assert isinstance(mesh, GroupMesh)
        mesh = OneShotMesh(mesh.group)
    fused, slots, placed = _placed(load(folder, mesh, strategy))
    found = dict[tuple[str, str], Found]()
    for name, path in cases:
        segments = Segments(BOUNDS, tuple(-1 if own < 0 else placed[own] for own in BATCHES[name]))
        lora = _lora(slots, segments, path)
        mesh.traffic.clear()
        logits = fused.forward(*_tokens(BOUNDS[-1]), PackedAttention(BOUNDS), lora=lora, keep=None)
        found[name, path] = Found(logits, dict(mesh.traffic.calls))
    return found


def _one_row(mesh: Mesh, folder: str, one_shot: bool) -> dict[int, Found]:
    """Of one row with each of the adapters, through the GEMV."""
    if one_shot:
        assert isinstance(mesh, GroupMesh)
        mesh = OneShotMesh(mesh.group)
    fused, slots, placed = _placed(load(folder, mesh, "slora"))
    kinds = [(own.weight.shape[1], own.weight.shape[0]) for own in fused.stacked]
    fused.gemms = GemmChoice(gemv=dict.fromkeys(kinds, (2, 4)))
    found = dict[int, Found]()
    for adapter in ONE_ROW:
        lora = _lora(slots, Segments((0, 1), (placed[adapter],)), "static decode")
        mesh.traffic.clear()
        logits = fused.forward(*_tokens(1), PackedAttention((0, 1)), lora=lora, keep=None)
        found[adapter] = Found(logits, dict(mesh.traffic.calls))
    return found


def _tokens(count: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(BOUNDS).diff()
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return torch.arange(count) + 3, positions[:count]


def _expected(folder: str, bounds: tuple[int, ...], batch: tuple[int, ...]) -> Tensor:
    base = load(folder)
    adapters = tuple(base.served(whole_adapter(base.spec, kind)) for kind in ADAPTERS)
    lora = LoraBatch(Segments(bounds, batch), adapters, GROUPED)
    with torch.no_grad():
        return base.forward(*_tokens(bounds[-1]), PackedAttention(bounds), lora=lora, keep=None)


@pytest.mark.slow
@pytest.mark.parametrize("one_shot", ONE_SHOT)
def test_steps_by_slots_have_the_logits_of_one_process(ranks: Ranks, folder: str, one_shot: bool) -> None:
    """Every group of sites that share an input has one collective more, if a fully sharded adapter is in the batch."""
    expected = {name: _expected(folder, BOUNDS, batch) for name, batch in BATCHES.items()}
    for found in ranks.run(_logits, folder, "slora", one_shot, CASES):
        for (name, _), (logits, calls) in found.items():
            torch.testing.assert_close(logits, expected[name], rtol=1e-4, atol=1e-4)
            assert calls == _calls(name != "local", one_shot)


def test_replicated_adapters_send_nothing(ranks: Ranks, folder: str) -> None:
    expected = _expected(folder, BOUNDS, BATCHES["mixed"])
    scaled = _expected(folder, BOUNDS, BATCHES["dora"])
    for found in ranks.run(_logits, folder, "nfs", False, [("mixed", "static decode"), ("dora", "static decode")]):
        for (name, _), (logits, calls) in found.items():
            torch.testing.assert_close(logits, scaled if name == "dora" else expected, rtol=1e-4, atol=1e-4)
            assert calls == _calls(False, False)


@pytest.mark.parametrize("one_shot", ONE_SHOT)
def test_one_row_by_the_gemv(ranks: Ranks, folder: str, one_shot: bool) -> None:
    """The shrink, the collective and the expand come after the GEMV."""
    expected = {adapter: _expected(folder, (0, 1), (adapter,)) for adapter in ONE_ROW}
    for found in ranks.run(_one_row, folder, one_shot):
        for adapter, (logits, calls) in found.items():
            torch.testing.assert_close(logits, expected[adapter], rtol=1e-4, atol=1e-4)
            assert calls == _calls(adapter != ONE_ROW[1], one_shot)


def _calls(fully_sharded: bool, one_shot: bool) -> dict[str, int]:
    """Of a layer, and of the logits. Groups: q, k, v; o; gate, up; down."""
    if not fully_sharded:
        return {"all_reduce": 2, "all_gather": 1}
    return {"all_reduce": 6, "all_gather": 1} if one_shot else {"all_reduce": 4, "all_gather": 3}
