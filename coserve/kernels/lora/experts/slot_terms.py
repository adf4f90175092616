"""Experts' LoRA terms of a serving step, read through tables at fixed addresses, for CUDA graphs. Inference only.

T tokens, K experts of each, S = T K rows sorted by expert and slot, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.gpu.device import device_info, put
from coserve.kernels.gpu.launcher import Launcher, options
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.lora.experts import slot_kernel
from coserve.kernels.lora.experts.rows import ExpertRows
from coserve.kernels.lora.types import ALIGNMENT, VECTOR, LoraPair, is_aligned

SHRINK, EXPAND = Launcher(slot_kernel.shrink), Launcher(slot_kernel.expand)
WARPS = 4
HELD = 8192
"""Most numbers of a matrix that a program reads at once."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of the kernels' programs."""

    rows: int
    """Most rows of one pair that a program computes: 8 or a larger power of 2."""
    inputs: int
    """Inputs per step of a program of `shrink`."""
    steps: int | None
    """Steps of a program of `shrink`; None: as many as cover all inputs."""
    stages: int
    """Steps whose inputs are loaded at once."""
    outputs: int
    """Outputs that a program of `expand` computes."""
    early: bool = True
    """Whether `expand` reads B while `shrink` runs, on GPUs that can."""


DECODING = Tiling(8, 128, 8, 5, 256)
"""The fastest of `benchmarks.moe.kernels` for one to three rows of a pair, on an H200."""


@dataclass(frozen=True)
class ExpertTable:
    """The table of one parameter's pairs, by slot."""

    addresses: Tensor
    """int64 (slots, 2): addresses of a_RD and b_OR; 0: none."""
    scalings: Tensor
    """fp32 (slots)."""
    ranks: Tensor
    """int32 (slots)."""


class ExpertSlots:
    """The tables of all experts' parameters, on the device: for each parameter, the pair in each of N slots."""

    def __init__(self, sites: Sequence[str], slots: int, device: torch.device) -> None:
        self._sites = tuple(sites)
        self.ranks = [0] * slots
        """Largest rank in each slot; 0: its adapter changes no experts."""
        self._addresses = torch.zeros(len(sites), slots, 2, dtype=torch.int64, device=device)
        self._scalings = torch.zeros(len(sites), slots, device=device)
        self._ranks = torch.zeros(len(sites), slots, dtype=torch.int32, device=device)
        self.tables = {
            site: ExpertTable(self._addresses[i], self._scalings[i], self._ranks[i]) for i, site in enumerate(sites)
        }
        self._held: dict[int, Mapping[str, LoraPair]] = {}

    def put(self, slot: int, pairs: Mapping[str, LoraPair]) -> None:
        """Point `slot` at an adapter's pairs, and keep them alive. Pairs that are not in the kernels' layout are
        copied."""
        pairs = {site: kernel_layout(pair) for site, pair in pairs.items()}
        own = [pairs.get(site) for site in self._sites]
        addresses = [(0, 0) if pair is None else (pair.a_RD.data_ptr(), pair.b_OR.data_ptr()) for pair in own]
        put(torch.tensor(addresses, dtype=torch.int64), self._addresses[:, slot])
        put(torch.tensor([0.0 if pair is None else pair.scaling for pair in own]), self._scalings[:, slot])
        ranks = [0 if pair is None else pair.rank for pair in own]
        put(torch.tensor(ranks, dtype=torch.int32), self._ranks[:, slot])
        self._held[slot], self.ranks[slot] = pairs, max(ranks)

    def clear(self, slot: int) -> None:
        """Empty `slot`: tokens that still name it get no terms."""
        if self.ranks[slot]:
            self._addresses[:, slot].zero_()
            self._held.pop(slot)
            self.ranks[slot] = 0


def kernel_layout(pair: LoraPair) -> LoraPair:
    """Return the pair with aligned matrices, rows of b_OR at whole vectors."""
    width, a_RD, b_OR = -(-pair.rank // VECTOR) * VECTOR, pair.a_RD, pair.b_OR
    if b_OR.stride(0) != width or b_OR.data_ptr() % ALIGNMENT:
        b_OR = pad(b_OR, (0, width - pair.rank))[:, : pair.rank]  # copies even if there is nothing to pad
    copy = torch.contiguous_format
    return replace(pair, a_RD=a_RD if is_aligned(a_RD) else a_RD.clone(memory_format=copy), b_OR=b_OR)


class SlotExpertLora:
    """Implements `ExpertLora` for steps whose tokens name slots."""

    learned = frozenset[int]()

    def __init__(self, tables: Mapping[str, ExpertTable], slots_T: Tensor, rank: int) -> None:
        """`slots_T`: int32, each token's slot, -1: none; entries beyond the step's tokens are ignored. `rank`: upper
        bound of the adapters' ranks."""
        self._tables, self._slots_T = tables, slots_T
        self._width = max(16, next_power_of_2(rank))

    def changes(self, sites: Collection[str]) -> bool:
        return True

    def sorted_rows(self, chosen_TK: Tensor, experts: int) -> ExpertRows:
        slots = next(iter(self._tables.values())).ranks.shape[0]
        return ExpertRows.by_expert(chosen_TK, experts, self._slots_T, slots)

    def add(self, site: str, y_SO: Tensor, x_SD: Tensor, rows: ExpertRows) -> Tensor:
        """See `ExpertLora`; writes into y."""
        add_terms(y_SO, x_SD, self._slots_T, rows, self._tables[site], self._width)
        return y_SO


def add_terms(
    y_SO: Tensor,
    x_SD: Tensor,
    slots_T: Tensor,
    rows: ExpertRows,
    table: ExpertTable,
    width: int,
    tiling: Tiling = DECODING,
) -> None:
    """Compute `y += scaling (x Aᵀ) Bᵀ` in place. `width`: at least 16 and any rank, a power of 2."""
    (count, inputs), outputs = x_SD.shape, y_SO.shape[1]
    if not count:
        return
    block_r = min(width, HELD // (16 * WARPS))
    block_d = min(tiling.inputs, HELD // block_r)
    block_o = max(16, min(tiling.outputs, HELD // width))
    steps = min(tiling.steps * tiling.inputs // block_d if tiling.steps else inputs, cdiv(inputs, block_d))
    splits = cdiv(inputs, steps * block_d)
    pdl = tiling.early and device_info(x_SD.device).early_launch
    where = slots_T, rows.token_S, rows.expert_S, table.addresses, table.ranks
    h = x_SD.new_empty(splits, count, width, dtype=torch.float32)
    SHRINK(
        (count, splits, width // block_r),
        (x_SD, h, *where),
        (count, rows.experts, inputs, x_SD.stride(0)),
        R=width,
        BLOCK_R=block_r,
        BLOCK_S=tiling.rows,
        BLOCK_D=block_d,
        STEPS=steps,
        PARTS=WARPS,
        STAGES=tiling.stages,
        ALIGN=ALIGNMENT,
        **options(False, WARPS, 1) | {"PDL": pdl},
    )
    EXPAND(
        (count, cdiv(outputs, block_o), 1),
        (h, y_SO, *where, table.scalings),
        (count, rows.experts, outputs, y_SO.stride(0)),
        R=width,
        SPLITS=splits,
        BLOCK_S=tiling.rows,
        BLOCK_O=block_o,
        ALIGN=ALIGNMENT,
        **options(pdl, WARPS, 1),
    )
