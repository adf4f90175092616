"""Interface of layers with a recurrent state: short convolutions and gated linear recurrences over packed tokens.

Letters: T packed tokens, C channels, W taps of a convolution, H heads, G heads of queries and keys (H is a multiple), K
key size, V value size, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from coserve.kernels.attention.interface import TokenRun


@dataclass(frozen=True)
class StateShape:
    """Sizes of one layer's state for one sequence; 0 for a part that the layer does not have."""

    channels: int = 0
    taps: int = 0
    """W: the state holds the last W - 1 inputs of the convolution."""
    heads: int = 0
    keys: int = 0
    values: int = 0


class RecurrenceParams(NamedTuple):
    """How a layer computes its recurrence. Named tuples and not dataclasses: torch.compile traces code that makes
    them."""

    scale: float = 1.0
    """Factor of the queries."""
    normalize: bool = False
    """Divide queries and keys by their L2 norm first."""


class RecurrenceInputs(NamedTuple):
    """Inputs of a layer's recurrence, for T tokens."""

    q: Tensor
    """(T, G, K)."""
    k: Tensor
    """(T, G, K)."""
    v: Tensor
    """(T, H, V)."""
    decay: Tensor
    """Logarithm of the decay: (T, H), or (T, H, K) with one for each element of a key."""
    beta: Tensor | None = None
    """Strength of the delta rule's update: (T, H). None: no delta rule."""
    params: RecurrenceParams = RecurrenceParams()

    def rows(self, change: Callable[[Tensor], Tensor]) -> RecurrenceInputs:
        """Return the inputs with every tensor replaced by `change` of it."""
        beta = None if self.beta is None else change(self.beta)
        return RecurrenceInputs(change(self.q), change(self.k), change(self.v), change(self.decay), beta, self.params)


class Recurrence(Protocol):
    """The recurrent layers of one batch, as a forward calls them. It knows the batch's sequences and where their states
    lie."""

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """Causal depthwise convolution of each token's last W inputs within its own sequence, then `activation` ("silu"
        or None): (T, C)."""
        ...

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """Return `q_t S_t` for each token t, in the values' dtype: (T, H, V). The state S (K, V) of each head is fp32.

        With `beta` the gated delta rule (Yang et al., ICLR '25): `S_t = exp(d_t) S_{t-1} + k_t ⊗ beta_t (v_t - k_t
        exp(d_t) S_{t-1})`; without it (Mamba-2, Dao and Gu, ICML '24): `S_t = exp(d_t) S_{t-1} + k_t ⊗ v_t`, where d is
        the decay.
        """
        ...


class StaticRecurrence(Recurrence, Protocol):
    """The recurrence of steps in fixed device buffers, as a CUDA graph needs it: `load` the runs of each step, on the
    graph's stream, before the graph is replayed. Rows after the last run are padding: their output is zero."""

    def load(self, runs: Sequence[TokenRun]) -> None:
        """Set the sequences of the next step, without waiting for the device."""
        ...


@runtime_checkable
class HasRecurrence(Protocol):
    """An attention that comes with the recurrence of the same batch."""

    @property
    def recurrence(self) -> Recurrence: ...
