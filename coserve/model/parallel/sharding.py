"""How a base is sharded, from one tensor-parallel rank's view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.model.experts.shards import ExpertPartition
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import SitePartition
from coserve.model.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True, eq=False)
class Sharding:
    """A base sharded among the ranks of a mesh."""

    mesh: Mesh
    sites: Mapping[str, SitePartition]
    """Partition of each linear module, by its path."""
    vocabulary: VocabularyShard
    strategy: Strategy
    """Strategy of adapters that are not block-diagonal."""
    experts: Mapping[str, ExpertPartition] = field(default_factory=dict)
    """Partition of each fused parameter of experts, by its name."""
    norms: bool = False
    """Whether ranks exchange means of norms (`parallel.modules`)."""
