"""What the model and generation know of attention: the KV cache, a sequence's new tokens, and who attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """A paged KV cache: for each layer `(P + 1, page_tokens, K, D)`; the last page is never written and holds zeros.

    A page lies in one piece; between a layer's pages there may be others, those of other layers for instance.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class AttentionParams(NamedTuple):
    """How a layer turns queries and keys into weights: `softmax(softcap(scaling q kᵀ))`.

    A named tuple and not a dataclass: torch.compile traces code that makes one.
    """

    scaling: float
    """Factor of the products of queries and keys, above 0."""
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all tokens before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    sinks: Tensor | None = None
    """(H): a score per head that takes part in the softmax and carries no value."""


class Attention(Protocol):
    """What a forward needs of attention: it knows the batch's sequences and where their keys and values live."""

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Causal attention of each token within its own sequence: (T, H, D).

        Rotary positions are applied already; H is a multiple of K.
        """
        ...


@dataclass(frozen=True)
class TokenRun:
    """The new tokens of one sequence in a packed batch. Runs follow each other from row 0 on, with nothing between or
    behind."""

    tokens: int
    position: int
    """Of the first of them in the sequence."""
    pages: tuple[int, ...]
    """They hold the sequence's positions in order, those of the new tokens included."""


class StaticPagedAttention(Attention, Protocol):
    """Attention of steps in which each of at most `batch` sequences has one new token; T = `batch`.

    Use: `load(runs)` (any runs), warm up a forward over `batch` rows with it, capture that forward; then, for each
    step, `load(runs)` on the stream of the graph and replay. Row i of q, k and v belongs to `runs[i]`; rows behind the
    last run are padding: nothing is written for them and they get zeros. Grids and addresses depend on `batch` and
    `max_tokens` alone, so a graph is right for any contexts up to `max_tokens`. `attend` never waits for the device.
    """

    batch: int
    max_tokens: int
    positions: Tensor
    """int64 (batch), device: the position of each row's token, 0 for padding. Filled by `load`; what the base takes."""

    def load(self, runs: Sequence[TokenRun]) -> None:
        """What the next step attends to. One pinned copy to the device on the current stream; does not wait for it.

        Each run has one token; `run.pages` holds its position too. Callers may load the next step while the device
        still runs the last one: the copy takes its place in the stream.
        """
        ...


@dataclass(frozen=True)
class MixedCapacity:
    """What a graph of steps of any mix holds."""

    tokens: int
    """T: rows of the step; those behind the last run are padding."""
    sequences: int
    chunks: int
    """Sequences with more than one new token."""
    context: int
    """Longest, the new tokens included."""

    def holds(self, runs: Sequence[TokenRun]) -> bool:
        return (
            len(runs) <= self.sequences
            and sum(run.tokens for run in runs) <= self.tokens
            and sum(run.tokens > 1 for run in runs) <= self.chunks
            and all(run.position + run.tokens <= self.context for run in runs)
        )


class MixedAttention(Attention, Protocol):
    """Attention of steps of any mix, decodes and chunks of prompts, within a `MixedCapacity`; T = `capacity.tokens`.

    Used as `StaticPagedAttention` is. Runs follow each other from row 0 on; rows behind the last are padding: nothing
    is written for them and they get zeros. Grids and addresses depend on the capacity alone.
    """

    capacity: MixedCapacity

    def load(self, runs: Sequence[TokenRun]) -> None:
        """What the next step attends to; the capacity holds it. Copies in stream order, and does not wait for the
        device."""
        ...
