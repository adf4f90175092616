"""The interfaces of LoRA terms of experts. S rows: one for each pair of a token and one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from coserve.core.errors import LoraServerLost
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
        """Return `y` plus the parameter's terms for the inputs `x` of these rows; may write into y if no gradient is
        required."""
        ...


Pending = Callable[[], Tensor]
"""Waits for terms that another process computes, and returns them. Raises `LoraServerLost`."""


class RemoteTerms(Protocol):
    """The experts' terms that LoRA servers compute for one step of T tokens: zeros for tokens of other adapters.

    Letters: K experts chosen by each token, S = T K choices in the order of the tokens, D hidden features, I inner
    features of an expert, O outputs of gate and up. Each call only sends: the servers compute the terms while the
    caller multiplies with the base's weights. `down` follows `gate_up` of the same layer. Both raise `LoraServerLost`.
    """

    def gate_up(self, site: str, x_TD: Tensor, chosen_TK: Tensor) -> Pending:
        """Send the inputs of gate and up, and the chosen experts; the terms are (S, O)."""
        ...

    def down(self, site: str, h_SI: Tensor, weights_TK: Tensor) -> Pending:
        """Send the inputs of down, and the router's weights; the terms, summed over the experts, are (T, D)."""
        ...


class RecordedTerms(RemoteTerms, Protocol):
    """The terms of a CUDA graph's steps. A step is begun, then the graph is launched, then it is told."""

    def begin(self, segments: Segments, slots: Sequence[int], tokens: int) -> None:
        """Begin a step that is padded to `tokens` tokens: see `RemoteExperts.step`. Raises `LoraServerLost`."""
        ...

    def launched(self) -> None:
        """Note that the graph with the step's exchanges was launched."""
        ...


def none_lost(remote: RemoteExperts) -> Callable[[], None]:
    """Return a function for the end of a step that begins now: it raises `LoraServerLost` if servers were lost
    meanwhile, as a GPU does not wait for them."""
    losses = remote.losses

    def check() -> None:
        if remote.losses != losses:
            raise LoraServerLost("LoRA servers were lost during the step")

    return check


class RemoteExperts(Protocol):
    """The LoRA servers of an engine."""

    @property
    def losses(self) -> int:
        """How often servers were lost so far. A step during which they were may have wrong terms."""
        ...

    def step(self, segments: Segments, slots: Sequence[int]) -> RemoteTerms | None:
        """Begin a step, once the device has come to the end of the one before. `slots`: each adapter's slot at the
        servers, -1: it is not there. None: no token needs them. Raises `LoraServerLost`."""
        ...

    def recorded(self) -> RecordedTerms | None:
        """Return the terms of any graph's steps; None: exchanges cannot be part of a graph, as they go through host
        memory. Waits for the servers' first start. Raises `StartupError` if that fails."""
        ...
