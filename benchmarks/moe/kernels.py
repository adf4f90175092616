"""Times the kernels of experts' LoRA terms in a decode step: a part of `benchmarks.moe.experts`.

Microseconds of a layer in a CUDA graph over layers whose pairs exceed the L2 cache: terms of gate and up and of down,
by each way to cut them into programs (`TILINGS`). Beside them `order` (the rows sorted by expert and slot),
`order_base` (by expert alone), `order_torch` (the same by torch), the base's two `products`, and `floor`: the chosen
pairs once, at a bandwidth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton

from benchmarks.common.results import Results
from benchmarks.common.timing import microseconds
from coserve.kernels.lora.experts.rows import ExpertRows, ends_of, grouped
from coserve.kernels.lora.experts.slot_terms import DECODING, ExpertSlots, SlotExpertLora, Tiling, add_terms
from coserve.kernels.lora.types import LoraPair
from coserve.workloads.provisioning import MoeShape

TILINGS = {
    "used": DECODING,
    "late": replace(DECODING, early=False),
    "rows16": replace(DECODING, rows=16),
    "longer": replace(DECODING, steps=16),
    "shorter": replace(DECODING, steps=4),
    "wider": replace(DECODING, outputs=512),
    "narrower": replace(DECODING, outputs=128),
}
LAYERS = 4
"""Layers with pairs of their own: 105 MB of one adapter at Qwen3-30B-A3B's shape, twice an H200's L2 cache."""


class Terms:
    """Adapters of some layers in slots, and the rows of a step of `tokens`."""

    def __init__(self, moe: MoeShape, rank: int, adapters: int, tokens: int, device: torch.device) -> None:
        self.tokens, self._width = tokens, max(16, 1 << (rank - 1).bit_length())
        sizes = ((moe.hidden, 2 * moe.inner), (moe.inner, moe.hidden))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = partial(torch.randn, device=device, dtype=dtype)
        self._sites = [(f"{layer}.{place}", *sizes[place]) for layer in range(LAYERS) for place in (0, 1)]
        self._slots = ExpertSlots([site for site, *_ in self._sites], adapters, device)
        for slot in range(adapters):
            pairs = {
                site: LoraPair(
                    draw(moe.experts * rank, inputs) * 0.02,
                    draw(moe.experts * outputs, rank) * 0.02,
                    1.0,
                    experts=moe.experts,
                )
                for site, inputs, outputs in self._sites
            }
            self._slots.put(slot, pairs)
        self._slots_T = (torch.arange(tokens, device=device) % adapters).int()
        self._chosen_TK = torch.rand(tokens, moe.experts, device=device).topk(moe.chosen).indices
        self._experts = moe.experts
        self._lora = SlotExpertLora(self._slots.tables, self._slots_T, rank)
        self.rows = self.order()
        self.pairs = len(set(zip(self._slots_T[self.rows.token_S].tolist(), self.rows.expert_S.tolist(), strict=True)))
        count = tokens * moe.chosen
        self._x = [draw(count, inputs) for inputs, _ in sizes]
        self._y = [draw(count, outputs) for _, outputs in sizes]
        self._weights = [draw(moe.experts, outputs, inputs) * 0.02 for inputs, outputs in sizes]

    def order(self) -> ExpertRows:
        return self._lora.sorted_rows(self._chosen_TK, self._experts)

    def order_base(self) -> None:
        ExpertRows.by_expert(self._chosen_TK, self._experts)

    def order_torch(self) -> None:
        order_S = torch.argsort(self._chosen_TK.reshape(-1), stable=True)
        ends_of(self._chosen_TK.reshape(-1)[order_S], self._experts)
        torch.empty_like(order_S)[order_S] = order_S // self._chosen_TK.shape[1]

    def products(self) -> None:
        for x_SD, weight_EOD in zip(self._x, self._weights, strict=True):
            grouped(x_SD, weight_EOD, self.rows.ends_E)

    def add(self, tiling: Tiling) -> None:
        for place, (site, *_) in enumerate(self._sites):
            x_SD, y_SO = self._x[place % 2], self._y[place % 2]
            add_terms(y_SO, x_SD, self._slots_T, self.rows, self._slots.tables[site], self._width, tiling)


def measure_kernels(
    results: Results, moe: MoeShape, rank: int, bandwidth: float, device: torch.device, *, tiny: bool
) -> None:
    """Put a row for each number of tokens and of adapters: microseconds of what serves now, and of all others."""
    pair_bytes = moe.adapter_bytes(rank) / moe.layers / moe.experts
    for adapters in (1, 2 if tiny else 32):
        for tokens in (1, 3) if tiny else (8, 64, 128, 256):
            terms = Terms(moe, rank, min(adapters, tokens), tokens, device)
            found = dict[str, float]()
            for name, tiling in TILINGS.items():
                try:
                    found[name] = microseconds(partial(terms.add, tiling), device, LAYERS)
                except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                    print(name, error, flush=True)
            for other in (terms.order, terms.order_base, terms.order_torch, terms.products):
                found[other.__name__] = microseconds(other, device, 1)
            about = {name: round(value, 2) for name, value in found.items()}
            about |= {"pairs": terms.pairs, "floor": round(1e6 * terms.pairs * pair_bytes / bandwidth, 2)}
            print(tokens, adapters, about, flush=True)
            key = f"moe.kernels_us.b{tokens}.a{adapters}"
            results.put(key, about["used"], "us of a layer", None, (), about)
            del terms
