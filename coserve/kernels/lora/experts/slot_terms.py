"""Experts' LoRA terms of a serving step, by tables at addresses that a captured graph may keep. Inference only.

T tokens, K experts of each, S = T K rows sorted by expert and slot, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.gpu.rounding import cdiv
from coserve.kernels.lora.experts import slot_kernel
from coserve.kernels.lora.experts.rows import ExpertRows
from coserve.kernels.lora.types import VECTOR, LoraPair

BLOCK_S, BLOCK_O = 16, 256
"""Rows of a program, and outputs of one that expands."""
BLOCK_D = 256
"""Inputs that a program of `shrink` multiplies at once."""


@dataclass(frozen=True)
class ExpertTable:
    """One parameter's columns."""

    addresses: Tensor
    """int64 (slots, 2): addresses of a_RD and b_OR; 0: none."""
    scalings: Tensor
    """fp32 (slots)."""
    ranks: Tensor
    """int32 (slots)."""


class ExpertSlots:
    """The table of all experts' parameters by N slots, on the device."""

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
        """Point `slot` at an adapter's pairs, and keep them alive. Those not of the store's layout are copied."""
        pairs = {site: _kernel_layout(pair) for site, pair in pairs.items()}
        own = [pairs.get(site) for site in self._sites]
        addresses = [(0, 0) if pair is None else (pair.a_RD.data_ptr(), pair.b_OR.data_ptr()) for pair in own]
        _send(torch.tensor(addresses, dtype=torch.int64), self._addresses[:, slot])
        _send(torch.tensor([0.0 if pair is None else pair.scaling for pair in own]), self._scalings[:, slot])
        ranks = [0 if pair is None else pair.rank for pair in own]
        _send(torch.tensor(ranks, dtype=torch.int32), self._ranks[:, slot])
        self._held[slot], self.ranks[slot] = pairs, max(ranks)

    def clear(self, slot: int) -> None:
        """Empty `slot`: tokens that still name it get no terms."""
        if self.ranks[slot]:
            self._addresses[:, slot].zero_()
            self._held.pop(slot)
            self.ranks[slot] = 0


def _kernel_layout(pair: LoraPair) -> LoraPair:
    """Return the pair with rows of b_OR at whole vectors."""
    width, b_OR = -(-pair.rank // VECTOR) * VECTOR, pair.b_OR
    if b_OR.stride(0) == width:
        return pair
    return replace(pair, b_OR=pad(b_OR, (0, width - pair.rank))[:, : pair.rank])


def _send(host: Tensor, to: Tensor) -> None:
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


class SlotExpertLora:
    """Implements `ExpertLora` for steps whose tokens name slots."""

    learned = frozenset[int]()

    def __init__(self, tables: Mapping[str, ExpertTable], slots_T: Tensor, rank: int) -> None:
        """`slots_T`: int32, each token's slot, -1: none; more tokens than a step has are ignored. `rank`: at least that
        of any adapter."""
        self._tables, self._slots_T = tables, slots_T
        self._width = max(16, 1 << (rank - 1).bit_length())

    def changes(self, sites: Collection[str]) -> bool:
        return True

    def sorted_rows(self, chosen_TK: Tensor, experts: int) -> ExpertRows:
        slots = next(iter(self._tables.values())).ranks.shape[0]
        key_TK = torch.add(self._slots_T[: len(chosen_TK), None], chosen_TK, alpha=slots + 1)
        return ExpertRows.of(chosen_TK, torch.argsort(key_TK.reshape(-1)), experts)

    def add(self, site: str, y_SO: Tensor, x_SD: Tensor, rows: ExpertRows) -> Tensor:
        """See `ExpertLora`; writes into y."""
        table = self._tables[site]
        count, inputs = x_SD.shape
        h_SR = x_SD.new_empty(count, self._width, dtype=torch.float32)
        where = self._slots_T, rows.token_S, rows.expert_S, table.addresses, table.ranks
        slot_kernel.shrink[(count,)](
            x_SD,
            h_SR,
            *where,
            table.scalings,
            count,
            rows.experts,
            inputs,
            x_SD.stride(0),
            BLOCK_S=BLOCK_S,
            BLOCK_D=BLOCK_D,
            R=self._width,
            num_warps=4,
        )
        slot_kernel.expand[(count, cdiv(y_SO.shape[1], BLOCK_O))](
            h_SR,
            y_SO,
            *where,
            count,
            rows.experts,
            y_SO.shape[1],
            y_SO.stride(0),
            BLOCK_S=BLOCK_S,
            BLOCK_O=BLOCK_O,
            R=self._width,
            num_warps=4,
        )
        return y_SO
