"""Recurrent layers over packed sequences that all begin in the batch, for training and checks; differentiable.

Letters: see `interface`; B sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coserve.kernels.gpu.device import to_device
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import CHUNK, by_tokens, convolved, in_chunks, normalized, prepared

if TYPE_CHECKING:
    from coserve.kernels.recurrent.chunked.recurrence import ChunkedRecurrence


class PackedRecurrence:
    """Implements `Recurrence` for sequences that begin in the batch: states start at zero and are not kept.

    `bounds` (S + 1) ascends from 0 to the number of rows; sequence s is the rows `[bounds[s], bounds[s + 1])`.
    Sequences with equal numbers of chunks are computed together.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._kernels: dict[torch.device, ChunkedRecurrence] = {}
        self._offsets: dict[torch.device, Tensor] = {}
        self._batches: dict[torch.device, tuple[list[Tensor], Tensor]] = {}
        self._set(bounds)

    def _set(self, bounds: Sequence[int]) -> None:
        self._spans = [(start, end) for start, end in pairwise(bounds) if end > start]
        self._bounds, self._rows = bounds, bounds[-1]
        self._batches.clear()

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        return convolved(x_TC, self.offsets(x_TC.device), weight_CW, bias_C, activation)

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """See `Recurrence.recur`. The backward computes it again from the inputs, as the tensors of all chunks take
        several times the memory of the rest of a layer; of those it keeps what `recur_keeping` returns."""
        if (kernels := self._kernels_for(given)) is not None:
            found: Tensor = _ByKernels.apply(kernels, *normalized(given)[:5])  # type: ignore[no-untyped-call]
            return found
        if torch.is_grad_enabled() and given.v.requires_grad:
            out: Tensor = checkpoint(self._recur, given, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._recur(given)

    def recur_keeping(self, given: RecurrenceInputs) -> tuple[Tensor, Tensor | None]:
        """Compute `recur` of `normalized` inputs without autograd. Also return what `gradients` need not compute again:
        some `CHUNK` elements for each token and head, in the keys' dtype. None: it computes everything again, as for
        many short rows."""
        if (kernels := self._kernels_for(given)) is not None:
            return kernels.recur_keeping(given)
        return self._recur(given), None

    def _kernels_for(self, given: RecurrenceInputs) -> ChunkedRecurrence | None:
        """Return the kernels, or None if they do not support these inputs."""
        if not given.v.is_cuda:
            return None
        from coserve.kernels.recurrent.chunked.recurrence import supports  # needs Triton

        if not supports(given):
            return None
        if given.v.device not in self._kernels:
            self._kernels[given.v.device] = self._new_kernels(given.v.device)
        return self._kernels[given.v.device]

    def _new_kernels(self, device: torch.device) -> ChunkedRecurrence:
        from coserve.kernels.recurrent.chunked.recurrence import ChunkedRecurrence  # needs Triton

        return ChunkedRecurrence.of_bounds(self._bounds, device)

    def _recur(self, given: RecurrenceInputs) -> Tensor:
        every = prepared(given)
        compute = in_chunks if given.decay.dim() == 2 else by_tokens
        batches, back_T = self._batches_on(given.v.device)
        outputs = []
        for rows_BL in batches:
            state_BHKV = every.v.new_zeros(len(rows_BL), *every.k.shape[1:], given.v.shape[2])
            outputs.append(compute(every.rows(partial(_at, rows_BL)), state_BHKV)[0].flatten(0, 1))
        return torch.cat(outputs).index_select(0, back_T).to(given.v.dtype)

    def gradients(self, given: RecurrenceInputs, dout_THV: Tensor, kept: Tensor | None = None) -> list[Tensor]:
        """Return the gradients of q, k, v, the decay and, if there is one, beta, given that of `recur`'s output.
        Computes the forward again, but for what was `kept` (`recur_keeping`). The inputs are `normalized`."""
        if (kernels := self._kernels_for(given)) is not None:
            return kernels.gradients(given, dout_THV, kept)
        with torch.enable_grad():
            own = given.rows(lambda x: x.detach().requires_grad_())
            leaves = [x for x in own[:5] if isinstance(x, Tensor)]
            return list(torch.autograd.grad(self._recur(own), leaves, dout_THV))

    def offsets(self, device: torch.device) -> Tensor:
        """Each row's index in its own sequence: (T) int32."""
        if device not in self._offsets:
            offsets = torch.cat([torch.arange(end - start, dtype=torch.int32) for start, end in self._spans])
            self._offsets[device] = to_device(offsets, device)
        return self._offsets[device]

    def _batches_on(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Batch the sequences by their number of chunks. Return the rows (B, L) of each batch, padded by repeating a
        sequence's last row, and the index of each row's output in the concatenated outputs of all batches."""
        if device not in self._batches:
            sizes: dict[int, list[tuple[int, int]]] = {}
            for start, end in self._spans:
                sizes.setdefault(-(-(end - start) // CHUNK), []).append((start, end))
            batches, back, first = [], torch.zeros(self._rows, dtype=torch.long), 0
            for spans in sizes.values():
                longest = max(end - start for start, end in spans)
                for number, (start, end) in enumerate(spans):
                    back[start:end] = first + number * longest + torch.arange(end - start)
                first += len(spans) * longest
                rows = [torch.arange(start, start + longest).clamp_max(end - 1) for start, end in spans]
                batches.append(torch.stack(rows).to(device))
            self._batches[device] = batches, back.to(device)
        return self._batches[device]


class _ByKernels(torch.autograd.Function):
    """`ChunkedRecurrence.recur`, differentiable. Saves the inputs and the systems' solution for the backward."""

    @staticmethod
    def forward(ctx: Any, kernels: ChunkedRecurrence, *given: Tensor | None) -> Tensor:  # noqa: ANN401 - torch's own
        out_THV, kept = kernels.recur_keeping(RecurrenceInputs(*given))  # type: ignore[arg-type]
        ctx.kernels = kernels
        ctx.save_for_backward(kept, *given)
        return out_THV

    @staticmethod
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's own
        kept, *given = ctx.saved_tensors
        found = ctx.kernels.gradients(RecurrenceInputs(*given), dout_THV, kept)
        return None, *found, *[None] * (5 - len(found))


def _at(rows_BL: Tensor, x: Tensor) -> Tensor:
    return x[rows_BL]
