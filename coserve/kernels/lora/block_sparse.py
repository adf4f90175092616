"""`block_sparse`: the ETS paper's method (§4.3.4), with stk's block-sparse products.

Tokens are sorted by adapter. Each adapter's tokens and its ranks are padded to whole blocks and concatenated:

    H = sdd(X, A_cat)     X A_catᵀ where a row block and a rank block belong to one adapter, nothing elsewhere
    Y = dsd(H, B_cat)

The topology is built once a step. A and B are dense operands of stk's products: block-diagonal ones are expanded. stk's
block size is process-global; only `use_block` sets it. Indices are int32: stk's own int16 overflows at 256 block rows
under recent Triton. Its `validate` refuses both int32 and bfloat16, and is not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import stk
import stk.ops
import torch
from stk.backend import triton_kernels
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.lora.interface import Adapters, SitewiseLora, TritonBackend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup

WARPS = {16: 1, 32: 2, 64: 4, 128: 4}
"""For each block size, the warps of a program that measured best on an H200."""
DECODE_BLOCK, PREFILL_BLOCK = 32, 64
"""Block sizes that measured best on an H200, for few and for many tokens per adapter."""


@dataclass(frozen=True)
class Topology:
    """Positions of one step's tokens and ranks in the padded block-sparse product."""

    block: int
    slots: tuple[int, ...]
    """The adapters that have tokens, in the order of their blocks."""
    sources: Tensor
    """For each padded row, the batch's row; T for a padding row."""
    rows: Tensor
    """Rows of the batch that have an adapter, in the order of `places`."""
    places: Tensor
    """Padded rows of `rows`."""
    matrix: stk.Matrix


class BlockSparseBackend(TritonBackend):
    """A backend on stk's `sdd` and `dsd` products (ETS §4.3.4)."""

    name = "block_sparse"

    def __init__(self, block: int | None = None) -> None:
        """`block`: 16, 32, 64 or 128 rows and ranks; None: the size that measured best for each batch."""
        self._block = block

    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> BlockSparseLora:
        self.refuse_adapters(adapters)
        return BlockSparseLora(segments, adapters, self._block or _best_block(segments))


class BlockSparseLora(SitewiseLora):
    """Terms by one topology for all sites at which the adapters have the same ranks."""

    def __init__(self, segments: Segments, adapters: Adapters, block: int) -> None:
        super().__init__(segments, adapters)
        self._block = block
        self._topologies: dict[tuple[int, ...], Topology] = {}
        """Topologies, by the ranks of the adapters that have tokens."""
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}
        """Concatenated weights by site, cached only in inference."""

    def add_site(self, site: str, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        pairs, block = self.pairs(site), self._block
        ranks = tuple([0 if (pair := pairs[slot]) is None else pair.rank for slot in self.segments.runs])
        if not any(ranks):
            return y_TO
        topology = self._topologies.get(ranks)
        if topology is None:
            topology = self._topologies[ranks] = topology_of(self.segments, ranks, block, x_TD.device)
        learning = torch.is_grad_enabled() and any(
            tensor.requires_grad
            for tensor in (y_TO, x_TD, *(t for pair in pairs if pair is not None for t in (pair.a_RD, pair.b_OR)))
        )
        own = [pair.dense() for slot in topology.slots if (pair := pairs[slot]) is not None]
        if learning:
            a_RD, b_RO = concatenate(own, block)
        else:
            if site not in self._weights:
                self._weights[site] = concatenate(own, block)
            a_RD, b_RO = self._weights[site]
        delta_NO = _product(x_TD, a_RD, b_RO, topology)[:, : y_TO.shape[1]]
        if learning:
            return y_TO.index_add(0, topology.rows, delta_NO)
        return y_TO.index_add_(0, topology.rows, delta_NO)


def _product(x_TD: Tensor, a_RD: Tensor, b_RO: Tensor, topology: Topology) -> Tensor:
    x_TD = pad(x_TD, (0, a_RD.shape[1] - x_TD.shape[1], 0, 1))  # the last row is zero, for padding to read
    x_MD = x_TD.index_select(0, topology.sources)
    use_block(topology.block)
    h = stk.ops.sdd(x_MD, a_RD.t(), topology.matrix)
    y_MO: Tensor = stk.ops.dsd(h, b_RO)
    for tensor in (h.data, y_MO):  # the backward may run after the block size was changed
        if tensor.requires_grad:
            tensor.register_hook(lambda _, block=topology.block: use_block(block))
    return y_MO.index_select(0, topology.places)


def concatenate(pairs: Sequence[LoraPair], block: int) -> tuple[Tensor, Tensor]:
    """Concatenate the adapters' A to (R, D) and scaling B to (R, O), each padded to whole blocks."""
    inputs, outputs = pairs[0].a_RD.shape[1], pairs[0].b_OR.shape[0]
    a = [pad(pair.a_RD, (0, -inputs % block, 0, -pair.rank % block)) for pair in pairs]
    b = [pad(pair.b_OR.t() * pair.scaling, (0, -outputs % block, 0, -pair.rank % block)) for pair in pairs]
    return torch.cat(a), torch.cat(b).contiguous()


def _best_block(segments: Segments) -> int:
    runs = segments.runs.values()
    longest = max((sum(end - start for start, end in own) for own in runs), default=0)
    return DECODE_BLOCK if longest <= DECODE_BLOCK else PREFILL_BLOCK


def topology_of(segments: Segments, ranks: Sequence[int], block: int, device: torch.device) -> Topology:
    """Build the topology in blocks of `block` rows.

    `ranks`: one for each adapter in `segments.runs`, in order; 0: it has no pair at the site.
    """
    sources: list[int] = []
    rows: list[int] = []
    places: list[int] = []
    columns: list[int] = []
    offsets = [0]
    row_blocks: list[int] = []
    first = 0
    slots: list[int] = []
    for (slot, runs), rank in zip(segments.runs.items(), ranks, strict=True):
        if not rank:
            continue
        slots.append(slot)
        own = [row for start, end in runs for row in range(start, end)]
        places.extend(range(len(sources), len(sources) + len(own)))
        rows.extend(own)
        wide = -(-rank // block)
        for _ in range(-(-len(own) // block)):
            row_blocks.extend([len(offsets) - 1] * wide)
            columns.extend(range(first, first + wide))
            offsets.append(len(columns))
        sources.extend(own + [segments.tokens] * (-len(own) % block))
        first += wide
    shape = torch.Size((len(sources), first * block))
    matrix = _matrix(shape, row_blocks, columns, offsets, block, device)
    index = [torch.tensor(values, device=device) for values in (sources, rows, places)]
    return Topology(block, tuple(slots), index[0], index[1], index[2], matrix)


def _matrix(
    shape: torch.Size, rows: list[int], columns: list[int], offsets: list[int], block: int, device: torch.device
) -> stk.Matrix:
    """Make a matrix without data from a topology and its transpose, int32."""
    order = sorted(range(len(columns)), key=lambda at: (columns[at], rows[at]))
    counts = [0] * (shape[1] // block + 1)
    for column in columns:
        counts[column + 1] += 1
    offsets_t = torch.tensor(counts).cumsum(0).tolist()

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return stk.Matrix(
        shape,
        torch.empty(len(columns), block, block, device="meta"),
        int32(rows),
        int32(columns),
        int32(offsets),
        int32([rows[at] for at in order]),
        int32(offsets_t),
        int32(order),
    )


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
