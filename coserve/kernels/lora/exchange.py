"""The interface by which GPUs exchange intermediates of fully sharded pairs, between shrink and expand."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """The collective of one group of sites, as in S-LoRA (Sheng et al., MLSys '24, section 6); see `parallel.exchange`.

    Letters: P shards of an intermediate's LoRA ranks, K splits of its sum, G sites, T tokens, W LoRA ranks of a shard.
    """

    @property
    def shards(self) -> int:
        """P > 1: each GPU computes the intermediate of 1/P of the LoRA ranks. 1: each computes a partial sum for all
        LoRA ranks."""
        ...

    @property
    def own(self) -> int:
        """Index of this GPU's shard."""
        ...

    @property
    def outputs(self) -> tuple[int, int] | None:
        """`[start, stop)` of the outputs to which this GPU adds its terms; None: all."""
        ...

    def needs_all_parts(self, size: int) -> bool:
        """Whether `run` takes all shards, with zeros in those of other GPUs; otherwise it takes only this GPU's.

        `size`: bytes of all shards of one split.
        """
        ...

    def run(self, h: Tensor) -> Tensor:
        """Complete the intermediates: (1 or P, K, G, T, W) -> (P, 1 or K, G, T, W), by one collective.

        May overwrite `h`, which may be partly uninitialised. Can be captured. All GPUs call it at the same time.
        """
        ...
