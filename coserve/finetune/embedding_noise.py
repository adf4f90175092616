"""NEFTune: noise on the embeddings during training (Jain et al. 2023, https://arxiv.org/abs/2310.05914, section 2).

Letters: T packed tokens, D hidden, J jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from coserve.finetune.packed_rows import PackedRows


@dataclass(frozen=True)
class EmbeddingNoise:
    """One job's noise in one micro-batch: uniform in plus and minus `alpha` / sqrt(L D), with L the sequence's length.

    The noise depends only on `seed` and the job's rows, so a resumed job draws it again, whichever jobs share the
    batch. `seed` must change with every micro-batch.
    """

    alpha: float
    seed: int

    def draw(self, lengths: Sequence[int], hidden: int, device: torch.device) -> Tensor:
        """Draw the noise of consecutive sequences of these lengths: fp32 (T, D)."""
        digest = hashlib.blake2b(f"{self.seed}/neftune".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
        noise_TD = torch.empty(sum(lengths), hidden, device=device).uniform_(-1, 1, generator=generator)
        for part_LD in torch.split(noise_TD, list(lengths)):
            part_LD.mul_(self.alpha / (part_LD.numel() ** 0.5))
        return noise_TD


@torch.no_grad()
def add_noise(h_1TD: Tensor, rows: PackedRows, noises: Sequence[EmbeddingNoise | None]) -> None:
    """Add the noise of each job (J) to the hidden states of its rows, in place."""
    for noise, (first, last) in zip(noises, pairwise(rows.token_bounds), strict=True):
        if noise is not None:
            own = [bound for bound in rows.bounds if first <= bound <= last]
            lengths = [end - begin for begin, end in pairwise(own)]
            h_1TD[0, first:last] += noise.draw(lengths, h_1TD.shape[-1], h_1TD.device).to(h_1TD.dtype)
