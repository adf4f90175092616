"""The scales of a DoRA adapter in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from coserve.kernels.lora.types import LoraPair

SITES_AT_ONCE = 8
"""Sites whose DoRA norms are computed in one micro-step: each norm reads the base's whole weight."""
RowNorms = Callable[[Mapping[str, LoraPair], dict[str, Tensor]], Mapping[str, Tensor]]
"""Returns the norms that DoRA divides by: `Base.row_norms`."""


class DoraScales:
    """Scales of a DoRA adapter in training, one per output row: magnitude / norm of the adapted weight's row.

    Every update of the weights changes magnitudes and norms, so `slices` computes the scales again. Backwards sum the
    gradients of the scales; `to_magnitudes` converts these sums to gradients of the magnitudes.
    """

    def __init__(
        self, magnitudes: Mapping[str, Tensor], grads: Mapping[str, Tensor], row_norms: RowNorms, at_once: int
    ) -> None:
        """`magnitudes`: fp32 masters by site; NaN becomes the norm. `grads`: their gradient sums. Both change in place.
        `at_once`: sites of one slice."""
        self._at_once = at_once
        self._magnitudes, self._grads, self._row_norms = magnitudes, grads, row_norms
        self.scales = {site: torch.zeros_like(own).requires_grad_() for site, own in magnitudes.items()}
        self._norms = {site: torch.ones_like(own) for site, own in magnitudes.items()}
        self._squares: dict[str, Tensor] = {}

    @torch.no_grad()
    def slices(self, pairs: Mapping[str, LoraPair]) -> Iterator[None]:
        """Compute the scales of changed weights, suspended between slices. `pairs`: as forwards read them."""
        sites = [*self._magnitudes]
        for first in range(0, len(sites), self._at_once):
            if first:
                yield
            some = {site: pairs[site] for site in sites[first : first + self._at_once]}
            for site, norm_O in self._row_norms(some, self._squares).items():
                magnitude_O = self._magnitudes[site]
                magnitude_O.copy_(torch.where(magnitude_O.isnan(), norm_O, magnitude_O))
                self._norms[site].copy_(norm_O)
                torch.div(magnitude_O, norm_O, out=self.scales[site])

    def to_magnitudes(self) -> None:
        """Convert the summed gradients of the scales to those of the magnitudes: divide by the norms, which DoRA treats
        as constants in the backward."""
        torch._foreach_div_(list(self._grads.values()), list(self._norms.values()))
