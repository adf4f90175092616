"""Changes of a step's adapters at the ends of the model: its input embedding and its head.

    embedding:  e = W[token] + scaling B A[:, token]        head:  y = x Wᵀ + scaling (x Aᵀ) Bᵀ

where an adapter may replace rows of W, or all of them, by its own (PEFT's `trainable_token_indices` and
`modules_to_save`). Everything is computed adapter by adapter, on top of the base's output for all rows.

Letters: T tokens, N of them of one adapter, D features, V vocabulary, R LoRA rank, K replaced rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import embedding

from coserve.core.names import TOKEN_ROWS, WHOLE_COPY
from coserve.kernels.lora.grouped import pair_terms, rowwise_linear
from coserve.kernels.lora.types import LoraPair


@dataclass(frozen=True)
class EndChange:
    """One adapter's change of the embedding or of the LM head."""

    pair: LoraPair | None = None
    whole_VD: Tensor | None = None  # noqa: N815
    """Replaces the base's weight."""
    rows_KD: Tensor | None = None  # noqa: N815
    """Replaces the rows of `tokens`."""
    tokens: tuple[int, ...] = ()

    @staticmethod
    def of(
        end: str, pairs: Mapping[str, LoraPair], tokens: Mapping[str, Sequence[int]], tied: str, *, head: bool
    ) -> EndChange | None:
        """Return what an adapter changes at `end`; None: nothing. `tied`: the other end if both share one weight, else
        "": the weight under its LoRA applies here, too, and to the head its replaced tokens, unless this end has its
        own."""
        pair, whole = pairs.get(end), pairs.get(end + WHOLE_COPY)
        if whole is None and tied in pairs:
            whole = pairs.get(tied + WHOLE_COPY)
        name = next((name for name in ((end, tied) if head else (end,)) if name + TOKEN_ROWS in pairs), None)
        if pair is None and whole is None and name is None:
            return None
        rows = (None, ()) if name is None else (pairs[name + TOKEN_ROWS].a_RD, tuple(tokens[name]))
        return EndChange(pair, None if whole is None else whole.a_RD, *rows)

    @cached_property
    def sorted_tokens(self) -> tuple[Tensor, Tensor]:
        """The replaced tokens in ascending order, and the row of each: int64 (K) on the rows' device."""
        assert self.rows_KD is not None, "expected replaced rows"
        found_K, order_K = torch.tensor(self.tokens, device=self.rows_KD.device).sort()
        return found_K, order_K

    def embed(self, ids_N: Tensor, e_ND: Tensor, scale: Tensor | None) -> Tensor:
        """Return the embeddings of tokens, given the base's. `scale`: the factor that the base gives them."""
        factor = 1.0 if scale is None else scale.to(e_ND.dtype)
        if self.whole_VD is not None:
            e_ND = embedding(ids_N, self.whole_VD) * factor
        if self.rows_KD is not None:
            tokens_K, order_K = self.sorted_tokens
            at_N = torch.searchsorted(tokens_K, ids_N).clamp_(max=len(tokens_K) - 1)
            own_ND = embedding(order_K[at_N], self.rows_KD) * factor
            e_ND = torch.where((tokens_K[at_N] == ids_N)[:, None], own_ND, e_ND)
        if self.pair is not None:
            h_NR = embedding(ids_N, self.pair.a_RD.T) * self.pair.scaling
            e_ND = e_ND + rowwise_linear(h_NR, self.pair.b_OR) * factor
        return e_ND

    def logits(self, x_ND: Tensor, y_NV: Tensor) -> Tensor:
        """Return the head's output, given the base's."""
        if self.whole_VD is not None:
            y_NV = rowwise_linear(x_ND, self.whole_VD)
        if self.rows_KD is not None:
            tokens_K, order_K = self.sorted_tokens
            y_NV = y_NV.index_copy(1, tokens_K, rowwise_linear(x_ND, self.rows_KD[order_K]))
        return y_NV if self.pair is None else y_NV + pair_terms(x_ND, self.pair)


@dataclass(frozen=True)
class EndTerms:
    """The changes at one end for the rows of one forward."""

    changes: Sequence[tuple[Tensor, EndChange]]
    """For each adapter that changes the end: its rows of the forward, int64 (N) on the device, and its change."""
    rows: int
    """Rows of the forward (T)."""

    def embed(self, ids_T: Tensor, e_TD: Tensor, scale: Tensor | None) -> Tensor:
        """Return the embeddings of all tokens, given the base's."""
        assert len(ids_T) == self.rows, f"expected the {self.rows} tokens of the step, got {len(ids_T)}"
        for rows_N, change in self.changes:
            e_TD = _put(e_TD, rows_N, change.embed(ids_T[rows_N], e_TD[rows_N], scale))
        return e_TD

    def logits(self, x_TD: Tensor, y_TV: Tensor) -> Tensor:
        """Return the head's output for all rows, given the base's."""
        assert len(x_TD) == self.rows, f"expected the {self.rows} rows of the step, got {len(x_TD)}"
        for rows_N, change in self.changes:
            y_TV = _put(y_TV, rows_N, change.logits(x_TD[rows_N], y_TV[rows_N]))
        return y_TV


@dataclass(frozen=True)
class Ends:
    """The terms of one forward at the model's ends; None: no adapter of the batch changes that end."""

    embedding: EndTerms | None = None
    head: EndTerms | None = None


def _put(x: Tensor, rows_N: Tensor, own: Tensor) -> Tensor:
    """Replace rows of x: in place, unless a gradient is to flow."""
    return x.index_copy(0, rows_N, own) if torch.is_grad_enabled() else x.index_copy_(0, rows_N, own)
