"""Truncated SVD of an adapter's update per shard, to convert LoRA to BD-LoRA or to another rank. NumPy only, no files.

An update B A of rank R is split into N shards, as tensor parallelism shards the site's weight. The best approximation
of each by a LoRA of rank r/N is its truncated SVD (Eckart and Young). The update itself, (O, D), is never formed: the
shards of B A have the singular values of (R, R) products of triangular QR factors. Letters: D inputs, O outputs, R
rank; K = min(R, D) or min(R, O).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coserve.lora.files.bdlora import ParallelStyle

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SiteShards:
    """The shards of one site's update in factored form: shard i is `left_i` (m, K) times `basisᵀ` (K, n).

    A row-parallel site is transposed first, so that shards are always groups of rows.
    """

    lefts: tuple[Matrix, ...]
    basis: Matrix
    """(n, K), orthonormal columns, shared by all shards."""
    style: ParallelStyle

    def spectra(self) -> Matrix:
        """Singular values of each shard, descending: (N, S), where S is the smallest rank of a shard that loses
        nothing."""
        return np.stack([np.linalg.svd(np.linalg.qr(left, mode="r"), compute_uv=False) for left in self.lefts])

    def truncated(self, rank: int, scale: float) -> tuple[Matrix, Matrix]:
        """Return a_RD and b_OR, packed as in PEFT, of the best approximation with this rank per shard, times `scale`.

        Both factors of a shard have the same norm.
        """
        first, second = [], []
        for left in self.lefts:
            u, s, vt = np.linalg.svd(left, full_matrices=False)
            root = np.sqrt(s[:rank] * abs(scale))
            first.append(u[:, :rank] * root * np.sign(scale))  # (m, rank)
            second.append(self.basis @ (vt[:rank].T * root))  # (n, rank)
        if self.style is ParallelStyle.COLUMN:
            return np.concatenate([part.T for part in second]), np.concatenate(first)
        return np.concatenate([part.T for part in first]), np.concatenate(second, axis=1)


def shard_update(a_RD: Matrix, b_OR: Matrix, style: ParallelStyle, blocks: int) -> SiteShards:
    """Split the update `b_OR a_RD` (dense factors) of one site into `blocks` shards."""
    outer, inner = (b_OR, a_RD.T) if style is ParallelStyle.COLUMN else (a_RD.T, b_OR)
    basis, triangle = np.linalg.qr(inner)  # (n, K), (K, R)
    return SiteShards(tuple(part @ triangle.T for part in np.split(outer, blocks)), basis, style)


def lost(spectra: Matrix) -> Matrix:
    """Squared Frobenius norm of the error at rank 0, 1, ... per shard, summed over shards: (S + 1)."""
    squares = np.square(spectra).sum(0)
    return np.append(np.cumsum(squares[::-1])[::-1], 0.0)
