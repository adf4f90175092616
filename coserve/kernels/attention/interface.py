"""Interfaces of attention for the model and generation: the KV cache, a sequence's new tokens, and the backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

Positions = TypeVar("Positions", int, NDArray[np.int64], Tensor)


E4M3_MAX = 448.0


class KvShape(NamedTuple):
    """Sizes of one layer's keys and values."""

    heads: int
    """K: key/value heads."""
    keys: int
    """D: head size of queries and keys."""
    values: int
    """E: head size of values; usually D."""
    source: int | None = None
    """The layer whose keys and values this one reads, having none of its own, so that its sizes are 0."""
    latent: bool = False
    """Whether a value is the first E numbers of its key, and is not stored again: the latents of multi-head latent
    attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1)."""
    expanded: int = 0
    """Bytes that a token of a long prompt chunk's context takes while a layer computes the chunk by keys and values of
    all heads (`attention.expanded`); 0: all steps absorb."""

    @property
    def numbers(self) -> int:
        """Numbers that a cache stores for a token."""
        return self.heads * (self.keys if self.latent else self.keys + self.values)


@dataclass(frozen=True)
class Pages:
    """A paged KV cache: for each layer keys `(P + 1, page_tokens, K, D)` and values `(P + 1, page_tokens, K, E)`. The
    last page is never written and holds zeros. If `latent`, values are a view of the keys' first E numbers.

    A page of a layer is contiguous. Other memory, such as pages of other layers, may lie between two pages.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    latent: bool = False


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round keys or values as a cache of this type stores them. FP8 has no infinity: what exceeds its range becomes its
    largest number."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(dtype)


class Window(NamedTuple):
    """The earlier tokens that a token of a layer sees, itself included."""

    tokens: int
    chunked: bool = False
    """False: the last `tokens`. True: those from the last multiple of `tokens` on (Llama 4)."""

    def first(self, position: Positions) -> Positions:
        """Return the first position that a token at `position` sees."""
        if self.chunked:
            return position - position % self.tokens
        return (position - self.tokens + 1) * (position >= self.tokens)


class AttentionParams(NamedTuple):
    """How a layer turns queries and keys into weights: `softmax(softcap(scaling q kᵀ))`.

    A named tuple and not a dataclass: torch.compile traces code that makes one.
    """

    scaling: float
    """Factor of the products of queries and keys; above 0."""
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all tokens before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)`."""
    sinks: Tensor | None = None
    """(H): a score per head that takes part in the softmax and carries no value."""
    chunked: bool = False
    """Whether `window` is the size of chunks (`Window.chunked`)."""

    @property
    def seen(self) -> Window | None:
        """The window; None: all tokens before a token."""
        return None if self.window is None else Window(self.window, self.chunked)


AttentionFields = tuple[float, int | None, float | None, Tensor | None, bool]
"""The fields of `AttentionParams`, as ops of compiled code take them."""


class Attention(Protocol):
    """The attention of one batch, as a forward calls it. It knows the batch's sequences and where their KV lies."""

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Causal attention of each token within its own sequence: (T, H, E), E numbers as in a value (K, T, E).

        Rotary positions are applied already; H is a multiple of K.
        """
        ...


def reads_pages(attention: Attention) -> bool:
    """Whether an attention keeps keys and values in a cache. It then gets latents where a layer has them."""
    return getattr(attention, "reads_pages", False)


class PagedStep(Attention, Protocol):
    """The attention of one step over pages, any mix of decodes and prompt chunks."""

    def read(self, layer: int, q_HTD: Tensor, params: AttentionParams) -> Tensor:
        """Compute `attend` of a step of prompt chunks whose new keys and values are in their pages already."""
        ...


class TokenRun(Struct, frozen=True, array_like=True):
    """The new tokens of one sequence in a packed batch. Runs are packed from row 0 on without gaps."""

    tokens: int
    position: int
    """Position of the first new token in its sequence."""
    pages: tuple[int, ...]
    """Pages of the sequence's positions, in order, including those of the new tokens."""
    slot: int = -1
    """Slot of the sequence's recurrent state; -1: the base has none."""


class StaticPagedAttention(Attention, Protocol):
    """Attention of decode steps: each of at most `batch` sequences has one new token; T = `batch`.

    Usage: `load(runs)` (any runs), warm up a forward over `batch` rows, and capture that forward. Then for each step,
    `load(runs)` on the graph's stream and replay. Row i of q, k and v belongs to `runs[i]`. Rows after the last run are
    padding: nothing is written for them, and their output is zero. Grids and addresses depend only on `batch` and
    `max_tokens`, so a graph serves any contexts up to `max_tokens`. `attend` never waits for the device.
    """

    batch: int
    max_tokens: int
    positions: Tensor
    """int64 (batch), device: the position of each row's token, 0 for padding. Input of the base; filled by `load`."""

    def load(self, runs: Sequence[TokenRun]) -> None:
        """Set the sequences of the next step: one pinned copy to the device on the current stream, without waiting for
        it.

        Each run has one token; `run.pages` includes the page of its position. Callers may load the next step while the
        device still runs the last one, because the copy is ordered by the stream.
        """
        ...


@dataclass(frozen=True)
class MixedCapacity:
    """Largest mixed step that a graph serves."""

    tokens: int
    """T: rows of the step; those after the last run are padding."""
    sequences: int
    chunks: int
    """Most sequences with more than one new token."""
    context: int
    """Longest context in tokens, the new ones included."""

    @classmethod
    def of(cls, runs: Sequence[TokenRun]) -> MixedCapacity:
        """Return the least capacity that holds a step."""
        return cls(
            tokens=sum([run.tokens for run in runs]),
            sequences=len(runs),
            chunks=sum([run.tokens > 1 for run in runs]),
            context=max([run.position + run.tokens for run in runs], default=0),
        )

    def covers(self, other: MixedCapacity) -> bool:
        return (
            self.tokens >= other.tokens
            and self.sequences >= other.sequences
            and self.chunks >= other.chunks
            and self.context >= other.context
        )

    def holds(self, runs: Sequence[TokenRun]) -> bool:
        return self.covers(MixedCapacity.of(runs))


class MixedAttention(Attention, Protocol):
    """Attention of mixed steps (decodes and prompt chunks) within a `MixedCapacity`; T = `capacity.tokens`.

    Used like `StaticPagedAttention`. Runs are packed from row 0 on. Rows after the last run are padding: nothing is
    written for them, and their output is zero. Grids and addresses depend only on the capacity.
    """

    capacity: MixedCapacity

    def load(self, runs: Sequence[TokenRun]) -> None:
        """Set the sequences of the next step, which must fit the capacity. Copies in stream order without waiting for
        the device."""
        ...
