"""Recurrences over packed sequences by Triton kernels, forward and backward: see `chunked.kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from coserve.kernels.gpu.device import to_device
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.recurrent.chunked.backward_kernels import inputs_back, scan_back, solve_back
from coserve.kernels.recurrent.chunked.kernels import output, prepare, scan, solve
from coserve.kernels.recurrent.chunked.tables import cut
from coserve.kernels.recurrent.interface import RecurrenceInputs, RecurrenceParams
from coserve.kernels.recurrent.reference import CHUNK

MOST_KEYS = 128
"""Largest key size K: a program holds whole keys of a chunk."""
LEAST_SIZE = 64
"""Fewest keys and values of a head on a GPU whose chunks are solved in parts (`ChunkShape.part`): Triton 3.6 compiles
smaller products there, and those of one pipeline stage, to addresses outside of shared memory."""
VALUES = 64
"""Most values of a state in a program, but for what a `ChunkShape` says."""
MOST_PADDING = 1.25
"""Most rows of chunks for each token, empty ones included, with which a forward keeps the inverses: a chunk's takes as
much for one token as for all, and training's memory is planned by tokens."""
TOKENS = 16
"""Tokens of a program that normalises queries and keys."""


@dataclass(frozen=True)
class ChunkShape:
    """Launch shape of the kernels. Sums may differ in the last bits. Defaults are those of training."""

    values: int = VALUES
    """Most values of a state in a program of `scan`; a power of 2."""
    warps: int = 4
    """Warps of `scan`."""
    stages: int = 2
    """Pipeline stages of `scan`: chunks that are loaded or computed at the same time."""
    part: int = 16
    """Rows of a chunk's system that are solved one after another: see `solve`; a power of 2."""
    compact: bool = True
    """Whether `solve` does so in a loop over the parts alone: for 16 rows 95 instructions a turn and no barrier, where
    a loop over the chunk has some 450 and 8."""
    exact: bool = True
    """Whether products that join the parts are in fp32, not TF32."""
    solve_warps: int = 4
    outputs: int = VALUES
    """Most values in a program of `output`; a power of 2."""
    back_values: int = 32
    """Most values of a state in a program of `scan_back`; a power of 2."""
    back_warps: int = 4
    """Warps of `scan_back`."""
    back_stages: int = 2
    """Pipeline stages of `scan_back`."""


class SlotStates(NamedTuple):
    """States of B sequences, from which a batch begins and which it replaces."""

    slots: Tensor
    """(slots, H, K, V), fp32."""
    sources: Tensor
    """Each sequence's slot before the batch: (B) int32."""
    to: Tensor
    """Each sequence's slot after it: (B) int32. Two sequences do not share one, nor read another's."""


def supports(given: RecurrenceInputs) -> bool:
    """Whether the kernels compute these inputs. On a GPU fp32 is excluded, because compiling for it takes minutes."""
    return (
        given.decay.dim() == 2
        and given.k.shape[2] <= MOST_KEYS
        and not (given.k.is_cuda and given.k.dtype == torch.float32)
    )


class _Forward(NamedTuple):
    """Intermediate results that the forward's last kernel and the backward's kernels read."""

    states: Tensor
    """States before each chunk: (N, H, K, V)."""
    new: Tensor
    """Values that each token adds to the states under its key: (T, H, V)."""
    w: Tensor
    """(T, H, K). Without a delta rule it is unused, and holds the keys."""
    inverse: Tensor | None
    """(N, H, Z, Z), in the keys' dtype: see `chunked.kernels`; None without a delta rule."""


class ChunkedRecurrence:
    """The recurrences of one batch, in its layers."""

    def __init__(self, chunks: Tensor, first: Tensor, chunk: int = CHUNK, shape: ChunkShape = ChunkShape()) -> None:
        """`chunks` (N, 2), `first` (B + 1): int32 on the device, see `chunked.kernels`; they may change between calls.
        `chunk`: Z."""
        self._chunks, self._first, self._chunk, self._shape = chunks, first, chunk, shape
        self._count, self._sequences = len(chunks), len(first) - 1

    @classmethod
    def of_bounds(
        cls, bounds: Sequence[int], device: torch.device, chunk: int = CHUNK, shape: ChunkShape = ChunkShape()
    ) -> ChunkedRecurrence:
        """`bounds`: see `PackedRecurrence`."""
        rows, first = cut([(start, end) for start, end in pairwise(bounds) if end > start], chunk)
        padded = [*rows, *[0] * (len(rows) % 4)]  # keeps `first` aligned
        table = to_device(torch.tensor([*padded, *first], dtype=torch.int32), device)
        return cls(table[: len(rows)].view(-1, 2), table[len(padded) :], chunk, shape)

    def recur(self, given: RecurrenceInputs, out_THV: Tensor | None = None, states: SlotStates | None = None) -> Tensor:
        """Compute `Recurrence.recur`: (T, H, V), in the values' dtype.

        `out_THV`: where to; rows outside the chunks are not written. `states`: None: they begin at zero and are not
        kept.
        """
        return self.recur_keeping(given, out_THV, states)[0]

    def recur_keeping(
        self, given: RecurrenceInputs, out_THV: Tensor | None = None, states: SlotStates | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `recur`. Also return what spares `gradients` the systems' solution: their inverses (N, H, Z, Z), in the
        keys' dtype; None without a delta rule, and if the chunks are too empty (`MOST_PADDING`)."""
        batch = _Batch(given, self._chunk)
        kept, out_THV = self._forward(batch, states), torch.empty_like(batch.v) if out_THV is None else out_THV
        blocks, block_v = batch.value_blocks(self._shape.outputs)
        tensors = out_THV, batch.q, batch.k, kept.new, kept.states, batch.decay, self._chunks
        batch.launch(output, (self._count, batch.heads, blocks), *tensors, BV=block_v)
        full = self._count * self._chunk <= MOST_PADDING * len(batch.v)
        return out_THV, kept.inverse if full else None

    def gradients(self, given: RecurrenceInputs, dout_THV: Tensor, inverse: Tensor | None = None) -> list[Tensor]:
        """Return the gradients of q, k, v, the decay and, if there is one, beta, given that of `recur`'s output.
        Computes the forward again, but for what `recur_keeping` returned (`inverse`). The inputs are `normalized`."""
        batch, dout, chunks, shape = _Batch(given, self._chunk), dout_THV.contiguous(), self._chunks, self._shape
        kept, q, k = self._forward(batch, inverse=inverse), batch.q, batch.k
        v, decay, beta = batch.v, batch.decay, batch.beta
        delta, (tokens, groups, keys) = beta is not None, k.shape
        dstates, dnew = torch.empty_like(kept.states), torch.empty_like(kept.new)
        blocks, block_v = batch.value_blocks(shape.back_values)
        tensors = dstates, dnew, dout, q, k, kept.w, decay, chunks, self._first
        how: dict[str, int] = {"warps": shape.back_warps, "stages": shape.back_stages, "BV": block_v}
        batch.launch(scan_back, (self._sequences, batch.heads, blocks), *tensors, DELTA=delta, **how)
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

    def _forward(self, batch: _Batch, slots: SlotStates | None = None, inverse: Tensor | None = None) -> _Forward:
        """Compute all but the outputs, and the `inverse` if it is not known."""
        shape = self._shape
        k, v, heads, chunk = batch.k, batch.v, batch.heads, self._chunk
        (tokens, _, keys), values = k.shape, v.shape[2]
        u, new, w = v, v, k
        if batch.beta is not None:
            u, new = (k.new_empty(v.shape) for _ in range(2))
            known, w = inverse is not None, k.new_empty(tokens, heads, keys)
            inverse = k.new_empty(self._count, heads, chunk, chunk) if inverse is None else inverse
            part = chunk if k.is_cuda and min(keys, values) < LEAST_SIZE else min(shape.part, chunk)
            form = {"PART": part, "COMPACT": shape.compact and part < chunk, "EXACT": shape.exact, "GIVEN": known}
            solved, given = (inverse, u, w), (k, v, batch.decay, batch.beta, self._chunks)
            batch.launch(solve, (self._count, heads), *solved, *given, warps=shape.solve_warps, **form)
        states = k.new_empty(self._count, heads, keys, values)
        kept = (batch.decay, self._first, self._first) if slots is None else slots
        tensors = states, new, k, u, w, batch.decay, *kept, self._chunks, self._first
        blocks, block_v = batch.value_blocks(shape.values)
        flags = {"DELTA": inverse is not None, "SLOTS": slots is not None, "BV": block_v}
        of_values = self._sequences, heads, blocks
        batch.launch(scan, of_values, *tensors, warps=shape.warps, stages=shape.stages, **flags)
        return _Forward(states, new, w, inverse)


class _Batch:
    """The inputs, contiguous and `normalized`, and the sizes that kernels take."""

    def __init__(self, given: RecurrenceInputs, chunk: int) -> None:
        given = given if given.params == RecurrenceParams() else _prepared(given)
        self.q, self.k, self.v, self.decay, self.beta, _ = given.rows(Tensor.contiguous)
        (_, groups, keys), (_, self.heads, values) = self.k.shape, self.v.shape
        self._sizes = self.heads, groups, keys, values
        self._blocks = {"Z": chunk, "BK": max(16, next_power_of_2(keys)), "BV": self.value_blocks(VALUES)[1]}

    def value_blocks(self, most: int) -> tuple[int, int]:
        """Return the number of blocks of at most `most` values, and their size."""
        size = max(16, min(most, next_power_of_2(self._sizes[3])))
        return cdiv(self._sizes[3], size), size

    def launch(
        self,
        kernel: JITFunction[Callable[..., None]],
        grid: tuple[int, ...],
        *tensors: Tensor | None,
        warps: int = 4,
        stages: int = 1,
        **flags: bool | int,
    ) -> None:
        """Launch a kernel on these tensors, followed by the sizes."""
        launch(kernel, grid, *tensors, *self._sizes, **(self._blocks | flags), num_warps=warps, num_stages=stages)


def _prepared(given: RecurrenceInputs) -> RecurrenceInputs:
    """Compute `normalized` in one kernel, for inference."""
    tokens, groups, keys = given.k.shape
    from_q, from_k = (x if x[0].is_contiguous() else x.contiguous() for x in given[:2])
    q, k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (from_q, from_k))
    sizes = tokens, from_q.stride(0), from_k.stride(0), given.params.scale, groups
    blocks = {"BT": TOKENS, "BK": next_power_of_2(keys)}
    grid, normalize = (cdiv(tokens, TOKENS), groups), given.params.normalize
    launch(prepare, grid, q, k, from_q, from_k, *sizes, K=keys, NORMALIZE=normalize, **blocks)
    return given._replace(q=q, k=k, params=RecurrenceParams())
