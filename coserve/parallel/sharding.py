"""How a base is cut: what a rank must know of its shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coserve.parallel.cuts import SiteCut
from coserve.parallel.lora import Strategy
from coserve.parallel.mesh import Mesh
from coserve.parallel.vocabulary import VocabularyShard


@dataclass(frozen=True, eq=False)
class Sharding:
    """A base cut among the ranks of a mesh."""

    mesh: Mesh
    sites: Mapping[str, SiteCut]
    """By the path of the linear module."""
    vocabulary: VocabularyShard
    strategy: Strategy
    """Of adapters that are not block-diagonal."""
