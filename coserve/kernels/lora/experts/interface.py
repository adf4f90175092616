"""The interfaces of LoRA terms of experts. S rows: one for each pair of a token and one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coserve.kernels.lora.experts.rows import ExpertRows
from coserve.kernels.lora.segments import Segments


class ExpertLora(Protocol):
    """The experts' LoRA terms of one step."""

    @property
    def learned(self) -> frozenset[int]:
        """Ids (`id`) of the pairs' tensors for which autograd returns gradients."""
        ...

    def changes(self, sites: Collection[str]) -> bool:
        """Whether an adapter of the step changes one of these parameters."""
        ...

    def sorted_rows(self, chosen_TK: Tensor, experts: int) -> ExpertRows:
        """Return the rows of a call in the order that `add` needs. `chosen_TK`: the experts of each token."""
        ...

    def add(self, site: str, y_SO: Tensor, x_SD: Tensor, rows: ExpertRows) -> Tensor:
        """Return `y` plus the parameter's terms for the inputs `x` of these rows."""
        ...


Pending = Callable[[], Tensor]
"""Waits for terms that another process computes, and returns them. Raises `LoraServerLost`."""


class RemoteTerms(Protocol):
    """The experts' terms that LoRA servers compute for one step, for N of its T tokens, in order.

    Letters: K experts chosen by each token, D hidden features, I inner features of an expert, O outputs of gate and up.
    Each call only sends: the servers compute the terms while the caller multiplies with the base's weights. `down`
    follows `gate_up` of the same layer. Both raise `LoraServerLost`.
    """

    tokens_N: Tensor  # noqa: N815
    """Indices of the tokens among the step's: int64."""

    def gate_up(self, site: str, x_ND: Tensor, chosen_NK: Tensor) -> Pending:
        """Send the inputs of gate and up, and the chosen experts; the terms are (N, K, O)."""
        ...

    def down(self, site: str, h_NKI: Tensor, weights_NK: Tensor) -> Pending:
        """Send the inputs of down, and the router's weights; the terms, summed over the experts, are (N, D)."""
        ...


class RemoteExperts(Protocol):
    """The LoRA servers of an engine."""

    @property
    def losses(self) -> int:
        """How often servers were lost so far. A step during which they were may have wrong terms."""
        ...

    def step(self, segments: Segments, slots: Sequence[int], device: torch.device) -> RemoteTerms | None:
        """Begin a step. `slots`: each adapter's slot at the servers, -1: it is not there. None: no token needs them."""
        ...
