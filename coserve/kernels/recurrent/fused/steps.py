"""Recurrent layers of generation steps by Triton kernels, in fixed device buffers, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.gpu.device import device_info, interpreted, put
from coserve.kernels.gpu.launcher import launch
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2
from coserve.kernels.recurrent.chunked.long_runs import LongRuns, fits
from coserve.kernels.recurrent.chunked.recurrence import supports
from coserve.kernels.recurrent.fused.kernels import convolve, keep_inputs, recur
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.slots import LayerStates


@dataclass(frozen=True)
class RecurShape:
    """Launch shape of `recur` and, with `tokens` and `channels`, of `convolve`. Sums may differ in the last bits."""

    elements: int = 4096
    """Most elements of a state in one program's registers."""
    warps: int = 4
    by_value: bool = False
    """Whether programs that start together read neighbouring parts of one state, not parts of several sequences'
    states."""
    stream: bool = False
    """Whether states are evicted from the L2 cache first."""
    early: bool = False
    """Whether states are read before the preceding kernel has ended (programmatic dependent launch), where the GPU
    supports it."""
    blocks: int = 1
    """Parts of a state that a program of a decode step computes one after another, while the next are loaded; a power
    of 2."""
    stages: int = 1
    """Pipeline stages: parts that are loaded or computed at the same time."""
    registers: int | None = None
    """Most registers of a thread; None: as many as the compiler takes."""
    tokens: int = 16
    channels: int = 128
    """Tokens and channels of a program of the convolution."""


FEW, MANY = RecurShape(2048, by_value=True), RecurShape(by_value=True, early=True, blocks=4, stages=4)
"""The fastest of `benchmarks.recurrent.kernels` on an H200: up to `FEW_SEQUENCES` sequences, and more."""
FEW_SEQUENCES = 8


class FusedRecurrence:
    """Implements `StaticRecurrence` for steps of up to `tokens` tokens of `sequences` sequences: see
    `kernels.recurrent.fused.kernels`. Runs are computed token by token, or in chunks where they are long (`LongRuns`);
    a program holds the part of a head's state that belongs to some of its values."""

    chunked_from: int | None = 64
    """Fewest tokens of a run that is computed in chunks; None: no run is."""

    def __init__(
        self,
        states: Mapping[int, LayerStates],
        *,
        tokens: int,
        sequences: int,
        device: torch.device,
        decodes: bool = False,
        shape: RecurShape | None = None,
    ) -> None:
        """`decodes`: each sequence has one token, which saves a kernel. `shape`: None: the fastest known."""
        self._states, self._tokens, self._sequences = states, tokens, sequences
        self._shape = shape or (FEW if sequences <= FEW_SEQUENCES else MANY)
        layer = next(iter(states.values()))
        self._blank = layer.conv.shape[0] - 2
        self._decodes, least, (keys, values) = decodes, self.chunked_from, layer.recurrent.shape[2:]
        self._long = None
        if least is not None and tokens >= least and not decodes and fits(keys, values, layer.conv.dtype, device):
            self._long = LongRuns(tokens, sequences, least, device)
        self._host = np.zeros(2 * tokens + 5 * sequences + 1, dtype=np.int32)
        self._table = torch.zeros(len(self._host), dtype=torch.int32, device=device)
        self._sizes = [tokens, tokens, *[sequences] * 4, sequences + 1]
        self._first, self._source, self._starts, self._singly, self._from, self._to, self._ends = torch.split(
            self._table, self._sizes
        )
        self.load(())

    def load(self, runs: Sequence[TokenRun]) -> None:
        """See `StaticRecurrence.load`. One copy to the device, and one for long runs."""
        assert len(runs) <= self._sequences, f"expected at most {self._sequences} sequences, got {len(runs)}"
        assert all(run.slot >= 0 for run in runs), "expected sequences with slots"
        lengths = [run.tokens for run in runs]
        bounds = [0, *accumulate(lengths)]
        assert bounds[-1] <= self._tokens, f"expected at most {self._tokens} tokens, got {bounds[-1]}"
        assert not self._decodes or len(runs) == bounds[-1], "expected sequences of one token"
        first, source, starts, singly, sources, to, ends = np.split(self._host, np.cumsum(self._sizes[:-1]))
        slots = [run.slot if run.position else self._blank for run in runs]
        first[:], source[:] = np.arange(self._tokens), self._blank  # padding begins with itself
        first[: bounds[-1]] = np.repeat(np.array(bounds[:-1], np.int32), lengths)
        source[: bounds[-1]] = np.repeat(np.array(slots, np.int32), lengths)
        starts[:], ends[:], sources[:], to[:] = 0, 0, self._blank, self._blank + 1
        starts[: len(runs)], ends[: len(runs)] = bounds[:-1], bounds[1:]
        ends[-1] = bounds[-1]
        sources[: len(runs)], to[: len(runs)] = slots, [run.slot for run in runs]
        singly[:] = starts
        if self._long is not None:
            long = [i for i, length in enumerate(lengths) if length >= self._long.least]
            singly[long] = ends[long]  # to `recur` they are empty
            self._long.load([(bounds[i], bounds[i + 1]) for i in long], sources[long].tolist(), to[long].tolist())
        put(torch.from_numpy(self._host), self._table)

    def convolve(
        self, layer: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
    ) -> Tensor:
        """See `Recurrence.convolve`."""
        assert activation in ("silu", None), f"expected silu or nothing behind the convolution, got {activation}"
        states, (rows, channels), width = self._states[layer].conv, x_TC.shape, weight_CW.shape[1]
        assert rows <= self._tokens, f"expected at most {self._tokens} rows, got {rows}"
        x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
        out_TC = torch.empty(rows, channels, dtype=x_TC.dtype, device=x_TC.device)
        block_t, block_c = self._shape.tokens, self._shape.channels
        launch(
            convolve,
            (cdiv(rows, block_t), cdiv(channels, block_c)),
            out_TC,
            x_TC,
            weight_CW.contiguous(),
            weight_CW if bias_C is None else bias_C,
            states,
            self._first,
            self._source,
            self._to,
            rows,
            channels,
            x_TC.stride(0),
            W=width,
            HAS_BIAS=bias_C is not None,
            SILU=activation == "silu",
            KEEP=self._decodes,
            BT=block_t,
            BC=block_c,
        )
        if self._decodes:
            return out_TC
        launch(
            keep_inputs,
            (self._sequences, cdiv(channels, block_c)),
            x_TC,
            states,
            self._starts,
            self._ends,
            self._from,
            self._to,
            channels,
            x_TC.stride(0),
            W=width,
            BC=block_c,
        )
        return out_TC

    def recur(self, layer: int, given: RecurrenceInputs) -> Tensor:
        """See `Recurrence.recur`. Rows of padding are zero."""
        (rows, heads, values), (_, groups, keys) = given.v.shape, given.q.shape
        q_TGK, k_TGK, v_THV = (x if x[0].is_contiguous() else x.contiguous() for x in given[:3])
        decay, beta = given.decay.contiguous(), None if given.beta is None else given.beta.contiguous()
        block_k = next_power_of_2(keys)
        shape, early = self._shape, self._shape.early and device_info(given.v.device).early_launch
        block_v = max(1, min(next_power_of_2(values), shape.elements // block_k))
        blocks = min(shape.blocks, next_power_of_2(values) // block_v) if self._decodes else 1
        grid = self._sequences, heads, cdiv(values, block_v * blocks)
        out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
        states, long = self._states[layer].recurrent, self._long if supports(given) else None
        launch(
            recur,
            grid[::-1] if shape.by_value else grid,
            out_THV,
            q_TGK,
            k_TGK,
            v_THV,
            decay,
            decay if beta is None else beta,
            states,
            self._starts if long is None else self._singly,
            self._ends,
            self._from,
            self._to,
            rows,
            q_TGK.stride(0),
            k_TGK.stride(0),
            v_THV.stride(0),
            heads,
            groups,
            keys,
            values,
            given.params.scale,
            HAS_BETA=beta is not None,
            BY_KEY=decay.dim() == 3,
            NORMALIZE=given.params.normalize,
            BK=block_k,
            BV=block_v,
            BY_VALUE=shape.by_value,
            STREAM=shape.stream,
            BLOCKS=blocks,
            STAGES=shape.stages,
            PDL=early,
            num_warps=shape.warps,
            maxnreg=shape.registers,
            **({} if interpreted() else {"launch_pdl": early}),
        )
        if long is not None:
            long.recur(given, out_THV, states)
        return out_THV
