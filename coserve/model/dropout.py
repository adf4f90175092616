"""LoRA dropout with reproducible masks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from coserve.model.parallel.modules import SiteShard


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout of one training forward: each input element of a pair is dropped with probability `p` > 0.

    A site's mask is a function of (`seed`, site, shape) only, so that a recomputed forward, or a resumed job, drops the
    same elements. `seed` must change with every micro-batch.
    """

    p: float
    seed: int

    def apply(self, x_TD: Tensor, site: str, shard: SiteShard | None = None) -> Tensor:
        """Return `x_TD` with dropped elements zero and the others divided by `1 - p`.

        `shard`: this rank's shard of the site. If `x_TD` has only the rank's input features, the mask is their part of
        the whole input's mask.
        """
        digest = hashlib.blake2b(f"{self.seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator(x_TD.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = x_TD.shape[1] if shard is None else shard.partition.inputs.size
        kept_TD = x_TD.new_empty(x_TD.shape[0], whole).bernoulli_(1 - self.p, generator=generator)
        if shard is not None:
            ((start, stop),) = shard.partition.inputs.ranks[shard.mesh.rank]
            kept_TD = kept_TD[:, start:stop]
        return x_TD * kept_TD.div_(1 - self.p)


@dataclass(frozen=True)
class SegmentDropout:
    """Dropout of several jobs in one batch: `specs[j]` applies to the rows `bounds[j]:bounds[j + 1]`.

    A job's mask does not depend on the other jobs. A spec of None: no dropout.
    """

    bounds: Sequence[int]
    specs: Sequence[DropoutSpec | None]

    def apply(self, x_TD: Tensor, site: str, shard: SiteShard | None = None) -> Tensor:
        """See `DropoutSpec.apply`."""
        parts = [x_TD[first:last] for first, last in pairwise(self.bounds)]
        return torch.cat(
            [
                part if spec is None else spec.apply(part, site, shard)
                for part, spec in zip(parts, self.specs, strict=True)
            ]
        )


Dropout = DropoutSpec | SegmentDropout


def dropout_of(bounds: Sequence[int], specs: Sequence[DropoutSpec | None]) -> Dropout | None:
    """Return the dropout of a batch of these jobs, or None if there is none."""
    if not any(specs):
        return None
    return specs[0] if len(specs) == 1 else SegmentDropout(bounds, specs)
