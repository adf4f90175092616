"""LoRA dropout, by masks that can be drawn again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.parallel.modules import SiteShard


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout of one training forward: each input element of a pair is dropped with probability `p`.

    The mask of a site is a function of (`seed`, site, shape) alone, so that a recomputed forward, and a resumed job,
    drop the same elements. `seed` must change with every micro-batch.
    """

    p: float
    seed: int

    def apply(self, x_TD: Tensor, site: str, shard: SiteShard | None = None) -> Tensor:
        """`x_TD` with dropped elements zero and the others divided by `1 - p`.

        `shard`: of the site; where `x_TD` is one rank's part of the input, its mask is that part of the whole input's.
        """
        digest = hashlib.blake2b(f"{self.seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator(x_TD.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = x_TD.shape[1] if shard is None else shard.partition.inputs.size
        kept_TD = x_TD.new_empty(x_TD.shape[0], whole).bernoulli_(1 - self.p, generator=generator)
        if shard is not None:
            ((start, stop),) = shard.partition.inputs.ranks[shard.mesh.rank]
            kept_TD = kept_TD[:, start:stop]
        return x_TD * kept_TD.div_(1 - self.p)
