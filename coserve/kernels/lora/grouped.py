"""`grouped`: the base runs batched, and each site loops over its adapters, like PEFT. The default on CPU, and a
baseline. `naive`: one forward of the base per adapter, the paper's first baseline (ETS §4.3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from coserve.kernels.gpu.rounding import CPU_MIN_ROWS
from coserve.kernels.lora.interface import Adapters, LoraBackend, SitewiseLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup


class GroupedBackend(LoraBackend):
    """A backend that loops over adapters at each site, on top of the batched base."""

    name = "grouped"

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> GroupedLora:
        return GroupedLora(segments, adapters)


class GroupedLora(SitewiseLora):
    """Terms computed adapter by adapter. On CPU a row's result does not depend on the batch's other rows."""

    def __init__(self, segments: Segments, adapters: Adapters) -> None:
        super().__init__(segments, adapters)
        self._rows: dict[int, Tensor] = {}
        """For each adapter, the int64 indices of its rows."""

    def add_site(self, site: str, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        at: list[Tensor] = []
        deltas: list[Tensor] = []
        pairs = self.pairs(site)
        for adapter, runs in self.segments.runs.items():
            pair = pairs[adapter]
            if pair is None:
                continue
            rows = self._rows_of(adapter, x_TD.device)
            x_ND = x_TD[runs[0][0] : runs[0][1]] if len(runs) == 1 else x_TD.index_select(0, rows)
            at.append(rows)
            deltas.append(pair_terms(x_ND, pair))
        if not deltas:
            return y_TO
        rows_N, delta_NO = (at[0], deltas[0]) if len(at) == 1 else (torch.cat(at), torch.cat(deltas))
        if torch.is_grad_enabled() and (y_TO.requires_grad or delta_NO.requires_grad):
            return y_TO.index_add(0, rows_N, delta_NO)
        return y_TO.index_add_(0, rows_N, delta_NO)

    def _rows_of(self, adapter: int, device: torch.device) -> Tensor:
        if adapter not in self._rows:
            runs = self.segments.runs[adapter]
            self._rows[adapter] = torch.tensor([row for start, end in runs for row in range(start, end)], device=device)
        return self._rows[adapter]


def pair_terms(x_ND: Tensor, pair: LoraPair) -> Tensor:
    """Return a pair's terms: (N, O). On CPU a row's bits do not depend on the others."""
    h_NR = _product(_padded(x_ND), pair.a_RD, pair.a_blocks) * pair.scaling
    return _product(h_NR, pair.b_OR, pair.b_blocks)[: len(x_ND)]


def rowwise_linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `x Wᵀ`: (N, O). On CPU a row's bits do not depend on the others."""
    return _linear(_padded(x_NI), weight_OI)[: len(x_NI)]


def _padded(x_NI: Tensor) -> Tensor:
    few = CPU_MIN_ROWS - x_NI.shape[0]
    return pad(x_NI, (0, 0, 0, few)) if x_NI.device.type == "cpu" and few > 0 else x_NI


def _product(x_NI: Tensor, packed: Tensor, blocks: int) -> Tensor:
    """Return `x Wᵀ` (N, O) for a packed block-diagonal W, block by block without zeros."""
    if blocks == 1:
        return _linear(x_NI, packed)
    own = zip(x_NI.chunk(blocks, 1), packed.chunk(blocks), strict=True)
    return torch.cat([_linear(part, block) for part, block in own], 1)


def _linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Compute `linear`. On CPU, matrix-vector products (LoRA rank 1) use a routine whose bits vary with the number of
    rows, so a column of zeros is added."""
    outputs, inputs = weight_OI.shape
    if x_NI.device.type == "cpu" and 1 in (outputs, inputs):
        x_NI, weight_OI = pad(x_NI, (0, int(inputs == 1))), pad(weight_OI, (0, int(inputs == 1), 0, int(outputs == 1)))
        return linear(x_NI, weight_OI)[:, :outputs]
    return linear(x_NI, weight_OI)


class PerAdapterBackend(GroupedBackend):
    """`grouped` over batches with one adapter each."""

    name = "naive"
    one_adapter_a_step = True
