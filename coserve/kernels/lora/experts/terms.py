"""LoRA terms of experts: for each row, the pair of its token's adapter and of its expert.

The rows of a call are sorted by adapter and expert, and each adapter's pairs are multiplied in one grouped product: the
cost follows the (adapter, expert) pairs that rows chose. S rows, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora.experts.interface import ExpertLora
from coserve.kernels.lora.experts.rows import ExpertRows, ends_of, grouped
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair


@dataclass(frozen=True)
class _Cut:
    """The rows of a call by adapter."""

    order: Tensor | None
    """Rows by adapter and expert, those without an adapter last; None: all rows are of one adapter."""
    ends: Tensor
    """Index one past each expert's last row, counted from the adapter's first row: int32 (adapters, E)."""


class GroupedExpertLora:
    """Implements `ExpertLora` in plain torch, differentiably."""

    def __init__(self, segments: Segments, adapters: Sequence[Mapping[str, LoraPair]], device: torch.device) -> None:
        self._segments, self._adapters = segments, adapters
        self._tokens = {index: sum(end - start for start, end in runs) for index, runs in segments.runs.items()}
        self._present = sorted(self._tokens)
        place = {index: at for at, index in enumerate(self._present)}
        adapter_T = [
            place.get(adapter, len(place))
            for adapter, start, end in zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False)
            for _ in range(start, end)
        ]
        alone = len(place) == 1 and place.keys() == set(segments.adapters)
        self._adapter_T = None if alone else torch.tensor(adapter_T, device=device)
        self._last: tuple[ExpertRows, _Cut] | None = None

    @property
    def learned(self) -> frozenset[int]:
        pairs = (pair for adapter in self._adapters for pair in adapter.values())
        return frozenset(id(tensor) for pair in pairs for tensor in (pair.a_RD, pair.b_OR))

    def changes(self, sites: Collection[str]) -> bool:
        return any(site in self._adapters[index] for index in self._present for site in sites)

    def sorted_rows(self, chosen_TK: Tensor, experts: int) -> ExpertRows:
        return ExpertRows.by_expert(chosen_TK, experts)

    def add(self, site: str, y_SO: Tensor, x_SD: Tensor, rows: ExpertRows) -> Tensor:
        cut, start = self._cut(rows), 0
        at, deltas = list[Tensor](), list[Tensor]()
        for place, index in enumerate(self._present):
            end = start + self._tokens[index] * rows.chosen
            pair = self._adapters[index].get(site)
            if pair is not None and cut.order is None:
                return y_SO + _delta(x_SD, pair, cut.ends[0])
            if pair is not None and cut.order is not None:
                at.append(cut.order[start:end])
                deltas.append(_delta(x_SD[at[-1]], pair, cut.ends[place]))
            start = end
        return y_SO.index_add(0, torch.cat(at), torch.cat(deltas)) if deltas else y_SO

    def _cut(self, rows: ExpertRows) -> _Cut:
        if self._last is None or self._last[0] is not rows:
            self._last = rows, self._sorted(rows)
        return self._last[1]

    def _sorted(self, rows: ExpertRows) -> _Cut:
        if self._adapter_T is None:
            return _Cut(None, rows.ends_E[None])
        adapter_S, order_S = torch.sort(self._adapter_T[rows.token_S], stable=True)
        each = rows.experts + 1  # one key more: rows of another rank's experts come last of each adapter
        keys_S = adapter_S * each + rows.expert_S[order_S]
        ends = ends_of(keys_S, len(self._present) * each).view(-1, each)[:, :-1]
        firsts = [0]
        for index in self._present[:-1]:
            firsts.append(firsts[-1] + self._tokens[index] * rows.chosen)
        return _Cut(order_S, ends - torch.tensor(firsts, dtype=torch.int32, device=ends.device)[:, None])


def _delta(x_ND: Tensor, pair: LoraPair, ends_E: Tensor) -> Tensor:
    a_ERD, b_EOR = by_expert(pair)
    h_NR = grouped(x_ND, a_ERD, ends_E) * pair.scaling
    return grouped(h_NR, b_EOR, ends_E)


def by_expert(pair: LoraPair) -> tuple[Tensor, Tensor]:
    """Return the pair's matrices as (E, R, D) and (E, O, R)."""
    (a_RD, b_OR), experts = (pair.a_RD, pair.b_OR), pair.experts
    return a_RD.view(experts, -1, a_RD.shape[1]), b_OR.view(experts, -1, b_OR.shape[1])


def expert_lora(
    segments: Segments, adapters: Sequence[Mapping[str, LoraPair]], device: torch.device
) -> ExpertLora | None:
    """Return the experts' terms of a step; None if no adapter has such pairs. `adapters`: their pairs of experts, by
    site."""
    return GroupedExpertLora(segments, adapters, device) if any(adapters) and segments.runs else None
