"""`block_sparse`: the ETS paper's method (§4.3.4), with stk's block-sparse products.

Tokens are sorted by adapter, and each adapter's tokens are padded to whole blocks:

    H = sdd(X, A)         X Aᵀ where a row block and a rank block belong to one adapter, nothing elsewhere
    Y = dsd(H, B)

The paper calls the first product DDS and the second SDD. Its ranks must be divisible by 16; here weights are padded. A
and B hold the weights of several adapters (`kept_weights`). Generation keeps them across steps, and training across
micro-batches; of the adapters in them, only those with tokens are computed. The topology is built once a batch. A and B
are dense operands of stk's products: block-diagonal pairs are expanded. stk's block size is process-global; only
`use_block` sets it. Indices are int32: stk's own int16 overflows at 256 block rows under recent Triton. Its `validate`
refuses both int32 and bfloat16, and is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import stk
import stk.ops
import torch
from stk.backend import triton_kernels
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.lora.interface import Adapters, SitewiseLora, TritonBackend
from coserve.kernels.lora.kept_weights import KeptWeights, Operands, Rows
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import VECTOR, LoraPair, SiteGroup

WARPS = {16: 1, 32: 2, 64: 4, 128: 4}
"""For each block size, the warps of a program that measured best on an H200."""
DECODE_BLOCK, PREFILL_BLOCK = 32, 64
"""Block sizes that measured best on an H200, for few and for many tokens per adapter."""
KEPT_BYTES = 2 << 30
"""Most bytes of weights that generation keeps. Where a step's adapters alone exceed them, it copies them each time."""


@dataclass(frozen=True)
class Topology:
    """Positions of one step's tokens and ranks in the padded block-sparse product."""

    block: int
    sources: Tensor
    """For each padded row, the batch's row. Padding rows repeat a row of the same adapter; their results are unused."""
    rows: Tensor
    """Rows of the batch that have an adapter, in the order of `places`."""
    places: Tensor
    """For each of `rows`, its row in the padded product."""
    matrix: stk.Matrix


class BlockSparseBackend(TritonBackend):
    """A backend on stk's `sdd` and `dsd` products (ETS §4.3.4)."""

    name = "block_sparse"
    kept_bytes = KEPT_BYTES

    def __init__(self, block: int | None = None, kept: KeptWeights | None = None) -> None:
        """`block`: 16, 32, 64 or 128 rows and ranks; None: the size that measured best for each batch. `kept`: weights
        of earlier steps, see `keeping`."""
        self._block, self._kept = block, kept
        self._last: tuple[Hashable, BlockSparseLora] | None = None
        """The last step's terms: decode steps of the same sequences share them."""

    @property
    def bytes(self) -> int:
        """Bytes of the weights that it keeps."""
        return 0 if self._kept is None else self._kept.bytes

    def keeping(self) -> BlockSparseBackend:
        return BlockSparseBackend(self._block, KeptWeights(self._block, self.kept_bytes))

    def forget(self, adapter: Mapping[str, LoraPair]) -> None:
        if self._kept is not None:
            self._kept.forget(adapter)

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> BlockSparseLora:
        self.refuse_adapters(adapters)
        kept = self._kept
        rows = None if kept is None else kept.place(adapters)
        if kept is None or rows is None:
            block = self._block or best_block(segments)
            kept = KeptWeights(block)
            rows = kept.place(adapters)
            assert rows is not None, "expected no limit"
            return BlockSparseLora(segments, adapters, kept, rows, block)
        key = segments, kept.generation, tuple(map(_key, adapters))
        if self._last is None or self._last[0] != key:
            block = self._block or best_block(segments)
            if any(each.size % block for each in rows):
                block = DECODE_BLOCK
            self._last = key, BlockSparseLora(segments, adapters, kept, rows, block)
        return self._last[1]


def _key(adapter: Mapping[str, LoraPair]) -> int:
    """Return the id of its first pair, by which `KeptWeights` recognises an adapter."""
    return id(next(iter(adapter.values()), None))


class BlockSparseLora(SitewiseLora):
    """Terms by one topology for all sites at which the adapters have the same ranks."""

    def __init__(
        self, segments: Segments, adapters: Adapters, kept: KeptWeights, rows: Sequence[Rows], block: int
    ) -> None:
        """`rows`: each adapter's rows in `kept`."""
        super().__init__(segments, adapters)
        self._kept, self._rows, self._block = kept, rows, block
        self._topologies: dict[tuple[int, ...], Topology] = {}
        """Topologies, by the ranks of the adapters that have tokens."""
        self._found: dict[str, tuple[Operands, Topology]] = {}
        """Operands that no training changes, by site."""

    def for_batch(self, segments: Segments) -> BlockSparseLora | None:
        if self._block != best_block(segments) or segments.runs.keys() != self.segments.runs.keys():
            return None
        return BlockSparseLora(segments, self._adapters, self._kept, self._rows, self._block)

    @property
    def holds_weights(self) -> bool:
        return True

    def add_site(self, site: str, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        found = self._found.get(site) or self._find(site, x_TD.device)
        if found is None:
            return y_TO
        operands, topology = found
        delta_NO = _product(x_TD, operands, topology)[:, : y_TO.shape[1]]
        if torch.is_grad_enabled() and (y_TO.requires_grad or delta_NO.requires_grad):
            return y_TO.index_add(0, topology.rows, delta_NO)
        return y_TO.index_add_(0, topology.rows, delta_NO)

    def _find(self, site: str, device: torch.device) -> tuple[Operands, Topology] | None:
        """Return the site's operands and topology; None if no adapter with tokens changes it."""
        slots = [slot for slot in self.segments.runs if site in self._adapters[slot]]
        if not slots:
            return None
        adapters = [self._adapters[slot] for slot in slots]
        pairs = [adapter[site].dense() for adapter in adapters]
        topology = self._topology(slots, [pair.rank for pair in pairs], device)
        operands = self._kept.operands(site, adapters, pairs)
        if not any(pair.a_RD.requires_grad or pair.b_OR.requires_grad for pair in pairs):
            self._found[site] = operands, topology
        elif torch.is_grad_enabled():
            firsts = [self._rows[slot].first for slot in slots]
            weights = chain.from_iterable((pair.a_RD, pair.b_OR) for pair in pairs)
            operands = Operands(*_trained(operands, firsts, [pair.scaling for pair in pairs], *weights))
        return operands, topology

    def _topology(self, slots: Sequence[int], ranks: Sequence[int], device: torch.device) -> Topology:
        key = *slots, *ranks
        if key not in self._topologies:
            runs = {slot: self.segments.runs[slot] for slot in slots}
            firsts = [self._rows[slot].first for slot in slots]
            self._topologies[key] = topology_of(
                list(runs.values()), firsts, ranks, self._kept.capacity, self._block, device
            )
        return self._topologies[key]


class _Trained(torch.autograd.Function):
    """Operands that hold the weights of trained pairs, as differentiable functions of those weights."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - as torch has it
        operands: Operands,
        firsts: Sequence[int],
        scalings: Sequence[float],
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`firsts`: each pair's first row in the operands; `weights`: its a_RD and b_OR, both dense."""
        ctx.firsts, ctx.scalings, ctx.shapes = firsts, scalings, [weight.shape for weight in weights]
        return operands.a_RD.detach(), operands.b_RO.detach()

    @staticmethod
    def backward(ctx: Any, da_RD: Tensor, db_RO: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - as above
        shapes = list(zip(ctx.firsts, ctx.shapes[::2], ctx.shapes[1::2], strict=True))
        a = [da_RD[first : first + rank, :inputs] for first, (rank, inputs), _ in shapes]
        b = [db_RO[first : first + rank, :outputs] for first, (rank, _), (outputs, _) in shapes]
        scaled = [own.t() for own in torch._foreach_mul(b, ctx.scalings)]
        return None, None, None, *chain.from_iterable(zip(a, scaled, strict=True))


_trained: Callable[..., tuple[Tensor, Tensor]] = _Trained.apply


def _product(x_TD: Tensor, operands: Operands, topology: Topology) -> Tensor:
    if columns := operands.a_RD.shape[1] - x_TD.shape[1]:
        x_TD = pad(x_TD, (0, columns))
    x_MD = x_TD.index_select(0, topology.sources)
    use_block(topology.block)
    h = stk.ops.sdd(x_MD, operands.a_RD.t(), topology.matrix)
    y_MO: Tensor = stk.ops.dsd(h, operands.b_RO)
    for tensor in (h.data, y_MO):  # the backward may run after the block size was changed
        if tensor.requires_grad:
            tensor.register_hook(lambda _, block=topology.block: use_block(block))
    return y_MO.index_select(0, topology.places)


def best_block(segments: Segments) -> int:
    """Return the block size that measured best for such a batch."""
    runs = segments.runs.values()
    longest = max((sum(end - start for start, end in own) for own in runs), default=0)
    return DECODE_BLOCK if longest <= DECODE_BLOCK else PREFILL_BLOCK


def topology_of(
    runs: Sequence[Sequence[tuple[int, int]]],
    firsts: Sequence[int],
    ranks: Sequence[int],
    capacity: int,
    block: int,
    device: torch.device,
) -> Topology:
    """Build the topology in blocks of `block` rows, for operands of `capacity` rows.

    `runs`: each adapter's runs of tokens; `firsts`: its first row in the operands; `ranks`: its LoRA rank.
    """
    sources: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    columns: list[int] = []
    offsets = [0]
    row_blocks: list[int] = []
    for own_runs, first, rank in zip(runs, firsts, ranks, strict=True):
        own = [row for start, end in own_runs for row in range(start, end)]
        places.extend(range(len(sources), len(sources) + len(own)))
        rows.extend(own)
        rank_blocks = range(first // block, first // block - (-rank // block))
        for _ in range(-(-len(own) // block)):
            row_blocks.extend([len(offsets) - 1] * len(rank_blocks))
            columns.extend(rank_blocks)
            offsets.append(len(columns))
        sources.extend(own + own[-1:] * (-len(own) % block))
    matrix = _matrix(torch.Size((len(sources), capacity)), row_blocks, columns, offsets, block, device)
    sources_M, rows_N, places_N = _int32([sources, rows, places], device)
    return Topology(block, sources_M, rows_N, places_N, matrix)


def _matrix(
    shape: torch.Size, rows: list[int], columns: list[int], offsets: list[int], block: int, device: torch.device
) -> stk.Matrix:
    """Make a matrix without data from a topology and its transpose, int32."""
    order = sorted(range(len(columns)), key=lambda at: (columns[at], rows[at]))
    counts = [0] * (shape[1] // block + 1)
    for column in columns:
        counts[column + 1] += 1
    lists = [rows, columns, offsets, [rows[at] for at in order], [*accumulate(counts)], order]
    return stk.Matrix(shape, torch.empty(len(columns), block, block, device="meta"), *_int32(lists, device))


def _int32(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy the lists to the device at once. Each begins at a whole vector, for which Triton compiles one kernel."""
    padded = [[*own, *[0] * (-len(own) % VECTOR)] for own in lists]
    whole = torch.tensor([*chain.from_iterable(padded)], dtype=torch.int32, device=device)
    parts = torch.split(whole, [len(own) for own in padded])
    return [part[: len(own)] for part, own in zip(parts, lists, strict=True)]


def use_block(block: int) -> None:
    """Set stk's block size, which is a class attribute and part of its kernels' only launch configuration."""
    config = triton_kernels.TritonConfig
    narrow = min(32, block)
    config.BLOCK_M = config.BLOCK_N = config.BLOCK_SIZE = block
    config.BLOCK_K = narrow
    for kernel in (triton_kernels._sdd_kernel, triton_kernels._dsd_kernel, triton_kernels._dds_kernel):
        launch = kernel.configs[0]
        launch.kwargs.update(BLOCK_M=block, BLOCK_N=block, BLOCK_K=narrow, BLOCK_SIZE=block)
        launch.num_warps = WARPS[block]
