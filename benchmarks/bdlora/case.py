"""What `bdlora/measure.py` measures: shapes, strategies, ranks at equal parameters, and each rank's part of bases and
adapters.

Weights are random, and each rank makes only its own part of them, on its GPU: slices that two ranks share have the same
numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.bdlora.plan import SHAPES, Shape, Variant, bd_rank
from benchmarks.common.llama import llama_config, random_model
from coserve.core.types import LoraSettings, SiteSpec
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from coserve.model.parallel.adapter import AdapterPartition
from coserve.model.parallel.build import empty_model, fill_shard
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import MatrixPartition
from coserve.model.sharded import Shard

SEED = 11
STD = 0.02


class RandomWeights:
    """Implements `parallel.build.Weights`. A slice has the same numbers on every rank, whatever else the rank asks
    for."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def get(self, name: str, shape: torch.Size) -> RandomMatrix:
        return RandomMatrix(name, shape, self._device, self._dtype)

    def has(self, name: str) -> bool:
        return False


class RandomMatrix:
    """Implements `parallel.partition.Lazy`: only the slices that are asked for exist."""

    def __init__(self, name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> None:
        self._name, self._shape, self._device, self._dtype = name, shape, device, dtype

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor:
        slices = index if isinstance(index, tuple) else (index,)
        ranges = [range(*own.indices(size)) for own, size in zip(slices, self._shape, strict=False)]
        sizes = [*(len(own) for own in ranges), *self._shape[len(ranges) :]]
        if "norm" in self._name:
            return torch.ones(sizes, device=self._device, dtype=self._dtype)
        return drawn(f"{self._name}/{ranges}", sizes, self._device, self._dtype)


def drawn(key: str, sizes: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers that depend on the key alone."""
    generator = torch.Generator(device).manual_seed(SEED << 32 | zlib.crc32(key.encode()))
    return torch.empty(sizes, device=device, dtype=dtype).normal_(0.0, STD, generator=generator)


def make_base(shape: Shape, mesh: Mesh, device: torch.device) -> Base:
    """This rank's part of the base; all ranks of the mesh call this at once. The whole base on a mesh of one.

    Its strategy is `slora`, with which executors serve adapters of every kind; `make_adapter` cuts each by its own.
    """
    if mesh.size == 1:
        return wrap_base(random_model(llama_config(shape), device, SEED), name=f"{shape.name}-random")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(SEED)
    model = empty_model(llama_config(shape), dtype, trust_remote_code=False)
    sharding = fill_shard(model, RandomWeights(device, dtype), mesh, device, Strategy.SLORA)
    return wrap_base(model, name=f"{shape.name}-random", shard=Shard(model, sharding, "random"))


class Sizes(NamedTuple):
    """Numbers of an adapter."""

    whole: int
    """Of the adapter, each counted once, zeros of block-diagonal matrices not."""
    held: int
    """Those that this rank holds."""


def make_adapter(base: Base, variant: Variant) -> tuple[LoraWeights, Sizes]:
    """This rank's part of an adapter at all sites; nothing larger is ever made."""
    assert variant.strategy is not None, "the base alone has no adapter"
    blocks = base.sharding.mesh.size if base.sharding is not None and variant.blocked else 1
    rank = variant.rank if blocks == 1 else bd_rank(variant, SHAPES[variant.shape], blocks)
    whole = {name: _empty_pair(base, name, site, rank, blocks) for name, site in base.spec.sites.items()}
    count = sum(pair.a_RD.numel() + pair.b_OR.numel() for pair in whole.values())
    settings = LoraSettings(r=rank, alpha=rank, bd_blocks=blocks)
    sites = dict[str, LoraPair]()
    if base.sharding is None:
        for name, pair in whole.items():
            a, b = (_draw(base, f"{variant.name}/{name}", t) for t in (pair.a_RD, pair.b_OR))
            sites[name] = LoraPair(a, b, 1.0)
    else:
        strategy = Strategy.SLORA if variant.strategy == "slora" else Strategy.NFS
        cut = AdapterPartition.of(replace(base.sharding, strategy=strategy), whole)
        for name, own in cut.pairs.items():
            a, b = (_draw_part(base, f"{variant.name}/{name}/{i}", part) for i, part in enumerate((own.a, own.b)))
            sites[name] = own.pair(a, b, 1.0)
    held = sum(pair.a_RD.numel() + pair.b_OR.numel() for pair in sites.values())
    return LoraWeights(settings, sites), Sizes(count, held)


def _empty_pair(base: Base, name: str, site: SiteSpec, rank: int, blocks: int) -> LoraPair:
    """The whole pair, without memory. B is block-diagonal at column-parallel sites, A at row-parallel ones."""
    row = base.sharding is not None and base.sharding.sites[name].sums
    in_a, in_b = (blocks, 1) if row else (1, blocks)
    a = torch.empty(rank, site.in_features // in_a, device="meta")
    b = torch.empty(site.out_features, rank // in_b, device="meta")
    return LoraPair(a, b, 1.0, a_blocks=in_a, b_blocks=in_b)


def _draw(base: Base, key: str, like: Tensor) -> Tensor:
    return drawn(key, list(like.shape), base.device, base.dtype)


def _draw_part(base: Base, key: str, cut: MatrixPartition) -> Tensor:
    """The same on all ranks that hold the same part."""
    assert base.sharding is not None
    rank = base.sharding.mesh.rank
    return drawn(f"{key}/{cut.rows.ranks[rank]}/{cut.columns.ranks[rank]}", list(cut.shape), base.device, base.dtype)
