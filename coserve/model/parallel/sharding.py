"""How a base is sharded, as one rank sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.partition import SitePartition
from coserve.model.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True, eq=False)
class Sharding:
    """A base sharded among the ranks of a mesh."""

    mesh: Mesh
    sites: Mapping[str, SitePartition]
    """By the path of the linear module."""
    vocabulary: VocabularyShard
    strategy: Strategy
    """Of adapters that are not block-diagonal."""
