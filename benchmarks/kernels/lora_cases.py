"""Inputs of the LoRA kernel benchmarks: sites, adapters, batches. Random bf16 data; seeds fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora import types
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segmented.adapter_table import Slots, slot_columns
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class SiteGroup:
    """Sites that read one input."""

    name: str
    inputs: int
    outputs: tuple[int, ...]


LLAMA = (
    SiteGroup("q,k,v", 4096, (4096, 1024, 1024)),
    SiteGroup("o", 4096, (4096,)),
    SiteGroup("gate,up", 4096, (14336, 14336)),
    SiteGroup("down", 14336, (4096,)),
)
GPT2_MEDIUM = (
    SiteGroup("c_attn", 1024, (3072,)),
    SiteGroup("attn.c_proj", 1024, (1024,)),
    SiteGroup("c_fc", 1024, (4096,)),
    SiteGroup("mlp.c_proj", 4096, (1024,)),
)


def owners(popularity: str, units: int, seed: int = 0) -> list[int]:
    """The adapter of each of `units` sequences, an adapter's side by side; Punica's four popularities (§7)."""
    draw = random.Random(seed)
    match popularity:
        case "distinct":
            return list(range(units))
        case "identical":
            return [0] * units
        case "uniform":
            many = math.ceil(math.sqrt(units))
            return sorted(index % many for index in range(units))
        case "skewed":
            chosen = draw.choices(range(units), [1.5**-index for index in range(units)], k=units)
            names = {owner: index for index, owner in enumerate(sorted(set(chosen)))}
            return sorted(names[owner] for owner in chosen)
    raise ValueError(f"expected a popularity, got {popularity!r}")


def batch(adapter_of: list[int], length: int) -> Segments:
    """A packed batch of sequences of `length` tokens each."""
    return Segments(tuple(range(0, (len(adapter_of) + 1) * length, length)), tuple(adapter_of))


@dataclass
class Layer:
    """One copy of one group's inputs: x, the base's outputs, and every adapter's pairs (`pairs[site][adapter]`)."""

    group: SiteGroup
    x: Tensor
    ys: list[Tensor]
    pairs: list[tuple[LoraPair | None, ...]]

    @property
    def weight_bytes(self) -> int:
        return sum(p.a_RD.nbytes + p.b_OR.nbytes for site in self.pairs for p in site if p is not None)


def prepared(
    backend: LoraBackend, segments: Segments, pairs: Sequence[Sequence[LoraPair | None]]
) -> tuple[PreparedLora, types.SiteGroup]:
    """The terms of one group, `pairs[site][adapter]`, for one batch; and what the group is called in them."""
    group = types.SiteGroup(tuple(str(site) for site in range(len(pairs))))
    adapters = [
        {name: pair for name, pair in zip(group.names, own, strict=True) if pair is not None}
        for own in zip(*pairs, strict=True)
    ]
    return backend.prepare(segments, adapters, [group]), group


def make_layer(group: SiteGroup, tokens: int, ranks: list[int]) -> Layer:
    """Random values at the scale that keeps outputs near one."""
    x = torch.randn(tokens, group.inputs, device=DEVICE, dtype=DTYPE)
    ys = [torch.randn(tokens, outputs, device=DEVICE, dtype=DTYPE) for outputs in group.outputs]
    pairs: list[tuple[LoraPair | None, ...]] = []
    for outputs in group.outputs:
        a = torch.randn(sum(ranks), group.inputs, device=DEVICE, dtype=DTYPE) * group.inputs**-0.5
        b = torch.randn(outputs * sum(ranks), device=DEVICE, dtype=DTYPE) * 0.01
        a_own = torch.split(a, ranks)
        b_own = [part.view(outputs, -1) for part in torch.split(b, [outputs * rank for rank in ranks])]
        pairs.append(tuple(LoraPair(one, two, 2.0) for one, two in zip(a_own, b_own, strict=True)))
    return Layer(group, x, ys, pairs)


def fill_slots(layers: list[Layer], adapters: int) -> tuple[Slots, list[int]]:
    """One slot an adapter, a column a site; and each layer's first column."""
    firsts, sites = [], 0
    for layer in layers:
        firsts.append(sites)
        sites += len(layer.pairs)
    slots = Slots(adapters, sites, DEVICE)
    for adapter in range(adapters):
        slots.put(adapter, *slot_columns([site[adapter] for layer in layers for site in layer.pairs]))
    return slots, firsts
