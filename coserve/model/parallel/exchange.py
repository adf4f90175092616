"""Collectives of fully sharded LoRA in serving steps with slots: one per group of sites that share an input.

S-LoRA (Sheng et al., MLSys '24), section 6, with the intermediates of all sites and adapters in one message, as in
vLLM. Column-parallel: an all-gather of the ranks' shards. Row-parallel: an all-reduce, after which rank i adds terms to
its O/N outputs, before the base's own sum.

A small all-gather is an all-reduce of zero-padded shards: on GPUs of one host that is one kernel of some 7 µs, where
NCCL's all-gather takes 14 to 20 (`SymmetricMesh`), and padding R-sized intermediates costs nothing. The shrink writes
the zeros itself, so that no other kernel runs. In a small message the shrink's splits over the inputs are not summed
before; the expand adds them up, as it does without ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from coserve.kernels.lora.exchange import Exchange
from coserve.kernels.lora.types import SiteGroup
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.modules import SiteShard

SPLIT_BYTES = 1 << 18
"""Largest message whose splits are sent separately; for larger ones, a kernel adds them up first. Not measured."""


@dataclass(frozen=True, eq=False)
class GatheredRanks:
    """`Exchange` of column-parallel sites."""

    mesh: Mesh
    outputs: tuple[int, int] | None = None
    split_bytes: int = SPLIT_BYTES

    @property
    def shards(self) -> int:
        return self.mesh.size

    @property
    def own(self) -> int:
        return self.mesh.rank

    def needs_all_parts(self, size: int) -> bool:
        return self.mesh.one_shot(size)

    def run(self, h: Tensor) -> Tensor:
        if h.shape[0] > 1:
            return self.mesh.all_reduce(_short(h, self.split_bytes))
        own = _without_splits(h)[0]
        if not self.mesh.one_shot(own.nbytes * self.mesh.size):
            return self.mesh.all_gather_parts(own)
        parts = own.new_zeros(self.mesh.size, *own.shape)
        parts[self.mesh.rank] = own
        return self.mesh.all_reduce(parts)


@dataclass(frozen=True, eq=False)
class SummedTerms:
    """`Exchange` of row-parallel sites."""

    mesh: Mesh
    outputs: tuple[int, int] | None
    shards: int = 1
    own: int = 0
    split_bytes: int = SPLIT_BYTES

    def needs_all_parts(self, size: int) -> bool:
        return False

    def run(self, h: Tensor) -> Tensor:
        return self.mesh.all_reduce(_short(h, self.split_bytes))


def exchanges_of(shards: Mapping[SiteGroup, SiteShard]) -> dict[SiteGroup, Exchange]:
    """Return the exchange of each group of sites that share an input. `shards`: shard of each group's sites.

    Groups that `partition_pair` never shards fully are left out.
    """
    found: dict[SiteGroup, Exchange] = {}
    for group, shard in shards.items():
        mesh = shard.mesh
        if not shard.partition.sums:
            found[group] = GatheredRanks(mesh)
        elif shard.partition.outputs.size % mesh.size == 0:
            each = shard.partition.outputs.size // mesh.size
            found[group] = SummedTerms(mesh, (mesh.rank * each, (mesh.rank + 1) * each))
    return found


def _short(h: Tensor, split_bytes: int) -> Tensor:
    return h if h.nbytes <= split_bytes else _without_splits(h)


def _without_splits(h: Tensor) -> Tensor:
    return h if h.shape[1] == 1 else h.sum(1, keepdim=True)
