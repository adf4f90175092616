"""How several GPUs exchange the intermediates of fully sharded pairs, between the shrink and the expand of a group of
sites."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """One group's. S-LoRA (Sheng et al., MLSys '24), section 6; `parallel.exchange` implements it.

    Letters: P parts of an intermediate, K splits of its sum, G sites, T tokens, W ranks of a part.
    """

    @property
    def shards(self) -> int:
        """P: each GPU has the intermediate of an equal part of the ranks; 1: a term of all ranks' intermediate."""
        ...

    @property
    def own(self) -> int:
        """This GPU's part."""
        ...

    @property
    def outputs(self) -> tuple[int, int] | None:
        """`[start, stop)` of the outputs that this GPU adds its terms to; None: all."""
        ...

    def needs_all_parts(self, size: int) -> bool:
        """Whether `run` is given all parts, with zeros in those of the others; else its own part. `size`: bytes of a
        split of all parts."""
        ...

    def run(self, h: Tensor) -> Tensor:
        """(1 or P, K, G, T, W) -> (P, 1 or K, G, T, W), complete: one collective. May overwrite `h`, of which parts may
        be unset.

        Can be captured. All GPUs call it at once.
        """
        ...
