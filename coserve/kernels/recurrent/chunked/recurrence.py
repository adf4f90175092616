"""Recurrences over packed sequences by Triton kernels, forward and backward: see `chunked.kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from coserve.kernels.gpu.device import to_device
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.recurrent.chunked.backward_kernels import inputs_back, scan_back, solve_back
from coserve.kernels.recurrent.chunked.kernels import output, scan, solve
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import CHUNK

MOST_KEYS = 128
"""Largest key size K: a program holds whole keys of a chunk."""
VALUES = 64
"""Most values of a state in a program."""


class _Forward(NamedTuple):
    """Intermediate results that the forward's last kernel and the backward's kernels read."""

    states: Tensor
    """States before each chunk: (N, H, K, V)."""
    new: Tensor
    """Values that each token adds to the states under its key: (T, H, V)."""
    w: Tensor
    """(T, H, K). Without a delta rule it is unused, and holds the keys."""
    inverse: Tensor | None
    """(N, H, Z, Z): see `chunked.kernels`; None without a delta rule."""


class ChunkedRecurrence:
    """The recurrences of one batch, in its layers. Queries and keys come normalised and scaled (`normalized`)."""

    def __init__(self, bounds: Sequence[int], device: torch.device, chunk: int = CHUNK) -> None:
        """`bounds`: see `PackedRecurrence`."""
        spans = [(start, end) for start, end in pairwise(bounds) if end > start]
        chunks = [(at, min(at + chunk, end)) for start, end in spans for at in range(start, end, chunk)]
        first = [0, *accumulate(cdiv(end - start, chunk) for start, end in spans)]
        rows = [row for one in (*chunks, *[(0, 0)] * (len(chunks) % 2)) for row in one]  # keeps `first` aligned
        table = to_device(torch.tensor([*rows, *first], dtype=torch.int32), device)
        self._chunks, self._first = torch.split(table, [len(rows), len(first)])
        self._count, self._sequences, self._chunk = len(chunks), len(spans), chunk

    def recur(self, given: RecurrenceInputs) -> Tensor:
        """Compute `Recurrence.recur`: (T, H, V), in the values' dtype."""
        batch = _Batch(given, self._chunk)
        kept, out_THV = self._forward(batch), torch.empty_like(batch.v)
        grid = self._count, batch.heads, batch.value_blocks
        batch.launch(output, grid, out_THV, batch.q, batch.k, kept.new, kept.states, batch.decay, self._chunks)
        return out_THV

    def gradients(self, given: RecurrenceInputs, dout_THV: Tensor) -> list[Tensor]:
        """Return the gradients of q, k, v, the decay and, if there is one, beta, given that of `recur`'s output.
        Computes the forward again."""
        batch, dout, chunks = _Batch(given, self._chunk), dout_THV.contiguous(), self._chunks
        kept, q, k, v, decay, beta = self._forward(batch), batch.q, batch.k, batch.v, batch.decay, batch.beta
        delta, (tokens, groups, keys) = beta is not None, k.shape
        dstates, dnew = torch.empty_like(kept.states), torch.empty_like(kept.new)
        of_values = self._sequences, batch.heads, batch.value_blocks
        tensors = dstates, dnew, dout, q, k, kept.w, decay, chunks, self._first
        batch.launch(scan_back, of_values, *tensors, warps=8, DELTA=delta)
        summed = torch.float32 if groups < batch.heads else q.dtype
        dq, dk = (q.new_empty(tokens, batch.heads, keys, dtype=summed) for _ in range(2))
        ddecay, of_chunks, dbeta = torch.empty_like(decay), (self._count, batch.heads), list[Tensor]()
        # Parts have memory of their own: one thread might overwrite what another of its program has not read yet.
        part_dk = dk if beta is None else torch.empty_like(dk, dtype=torch.float32)
        part_dg = ddecay if beta is None else torch.empty_like(ddecay, dtype=torch.float32)
        dv, dw = dnew.to(v.dtype), torch.empty_like(kept.w)
        inputs = q, k, kept.new, kept.states, dout, dnew, dstates, decay
        batch.launch(inputs_back, of_chunks, dq, part_dk, dw, part_dg, *inputs, chunks, warps=8, DELTA=delta)
        if beta is not None:
            dv, dbeta = torch.empty_like(v), [torch.empty_like(beta)]
            found = dk, dv, ddecay, *dbeta, part_dk, part_dg
            batch.launch(solve_back, of_chunks, *found, k, v, decay, beta, kept.inverse, dnew, dw, chunks, warps=8)
        if groups < batch.heads:
            dq, dk = (x.view(tokens, groups, -1, keys).sum(2).to(q.dtype) for x in (dq, dk))
        return [dq, dk, dv, ddecay, *dbeta]

    def _forward(self, batch: _Batch) -> _Forward:
        """Compute all but the outputs."""
        k, v, heads, chunk = batch.k, batch.v, batch.heads, self._chunk
        (tokens, _, keys), values = k.shape, v.shape[2]
        u, new, w, inverse = v, v, k, None
        if batch.beta is not None:
            u, new = (k.new_empty(v.shape) for _ in range(2))
            w, inverse = k.new_empty(tokens, heads, keys), k.new_empty(self._count, heads, chunk, chunk)
            grid = self._count, heads
            batch.launch(solve, grid, inverse, u, w, k, v, batch.decay, batch.beta, self._chunks)
        states = k.new_empty(self._count, heads, keys, values)
        tensors = states, new, k, u, w, batch.decay, self._chunks, self._first
        of_values = self._sequences, heads, batch.value_blocks
        batch.launch(scan, of_values, *tensors, DELTA=inverse is not None)
        return _Forward(states, new, w, inverse)


class _Batch:
    """The inputs, contiguous, and the sizes that kernels take."""

    def __init__(self, given: RecurrenceInputs, chunk: int) -> None:
        self.q, self.k, self.v, self.decay, self.beta, _ = given.rows(Tensor.contiguous)
        (_, groups, keys), (_, self.heads, values) = self.k.shape, self.v.shape
        self._sizes = self.heads, groups, keys, values
        block_v = max(16, min(VALUES, next_power_of_2(values)))
        self.value_blocks = cdiv(values, block_v)
        self._blocks = {"Z": chunk, "BK": max(16, next_power_of_2(keys)), "BV": block_v}

    def launch(
        self,
        kernel: JITFunction[Callable[..., None]],
        grid: tuple[int, ...],
        *tensors: Tensor | None,
        warps: int = 4,
        **flags: bool,
    ) -> None:
        """Launch a kernel on these tensors, followed by the sizes."""
        launch(kernel, grid, *tensors, *self._sizes, **flags, **self._blocks, num_warps=warps, num_stages=1)
