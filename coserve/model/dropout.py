"""LoRA dropout, by masks that can be drawn again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout of one training forward: each input element of a pair is dropped with probability `p`.

    The mask of a site is a function of (`seed`, site, shape) alone, so that a recomputed forward, and a resumed job,
    drop the same elements. `seed` must change with every micro-batch.
    """

    p: float
    seed: int

    def apply(self, x_TD: Tensor, site: str) -> Tensor:
        """`x_TD` with dropped elements zero and the others divided by `1 - p`."""
        digest = hashlib.blake2b(f"{self.seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator(x_TD.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        kept_TD = torch.empty_like(x_TD, requires_grad=False).bernoulli_(1 - self.p, generator=generator)
        return x_TD * kept_TD.div_(1 - self.p)
