"""Each LoRA backend, and its rivals, at one layer's sites, as calls that a CUDA graph can capture.

Each starts from the same x and base outputs. What a server would have ready before the step is ready here too
and is not timed: tables, topologies, stacked or concatenated weights (which `segmented` alone does not need).
"""

from __future__ import annotations

from collections.abc import Callable

import stk.ops
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.kernels.lora_cases import DEVICE, DTYPE, Layer, prepared
from coserve.kernels.lora import block_sparse
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.block_sparse import BlockSparseBackend
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.kept_weights import KeptWeights
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair

Call = Callable[[], object]


def present(site: tuple[LoraPair | None, ...]) -> list[LoraPair]:
    return [pair for pair in site if pair is not None]


def segmented_call(layer: Layer, segments: Segments) -> Call:
    """Our kernels: two launches for all sites of the group."""
    return adding_call(layer, segments, make_backend("segmented"))


def grouped_call(layer: Layer, segments: Segments) -> Call:
    """A loop over adapters at each site."""
    return adding_call(layer, segments, make_backend("grouped"))


def adding_call(layer: Layer, segments: Segments, backend: LoraBackend) -> Call:
    lora, group = prepared(backend, segments, layer.pairs)
    return lambda: lora.add_(group, layer.ys, layer.x)


def gather_bmm_call(layer: Layer, segments: Segments) -> Call:
    """Punica's baseline (§7.1): gather each token's weights, then bmm, twice. Ranks padded to the largest."""
    sites = []
    for site in layer.pairs:
        pairs = present(site)
        rank = max(pair.rank for pair in pairs)
        a = torch.zeros(len(pairs), layer.group.inputs, rank, device=DEVICE, dtype=DTYPE)
        b = torch.zeros(len(pairs), rank, pairs[0].b_OR.shape[0], device=DEVICE, dtype=DTYPE)
        for index, pair in enumerate(pairs):
            a[index, :, : pair.rank] = pair.a_RD.T
            b[index, : pair.rank] = pair.b_OR.T * pair.scaling
        sites.append((a, b))
    spans = zip(segments.adapters, segments.bounds, segments.bounds[1:], strict=False)
    owner = torch.tensor([adapter for adapter, start, end in spans for _ in range(start, end)], device=DEVICE)

    def call() -> None:
        for y, (a, b) in zip(layer.ys, sites, strict=True):
            h = torch.bmm(layer.x[:, None], a.index_select(0, owner))
            y += torch.bmm(h, b.index_select(0, owner))[:, 0]

    return call


def stk_call(layer: Layer, segments: Segments, block: int) -> Call:
    """`sdd` and `dsd` alone: tokens already sorted and padded, weights concatenated, nothing added to y."""
    ready = []
    for site in layer.pairs:
        own = {slot: pair for slot in segments.runs if (pair := site[slot]) is not None}
        kept, adapters = KeptWeights(block), [{"": pair} for pair in own.values()]
        rows = kept.place(adapters)
        assert rows is not None, "expected no limit"
        runs, ranks = [segments.runs[slot] for slot in own], [pair.rank for pair in own.values()]
        topology = block_sparse.topology_of(runs, [each.first for each in rows], ranks, kept.capacity, block, DEVICE)
        a, b = kept.operands("", adapters, list(own.values()))
        ready.append((layer.x.index_select(0, topology.sources), a, b, topology))

    def call() -> None:
        for x, a, b, topology in ready:
            block_sparse.use_block(block)
            stk.ops.dsd(stk.ops.sdd(x, a.t(), topology.matrix), b)

    return call


def learning_call(layer: Layer, segments: Segments, name: str) -> Call:
    """Forward and backward through autograd, to x and every A and B, as fine-tuning runs them."""
    leaves = [
        LoraPair(p.a_RD.clone().requires_grad_(), p.b_OR.clone().requires_grad_(), p.scaling)
        for site in layer.pairs
        for p in present(site)
    ]
    count = len(layer.pairs[0])
    sites = [tuple(leaves[first : first + count]) for first in range(0, len(leaves), count)]
    x = layer.x.clone().requires_grad_()
    wanted = [x, *(tensor for pair in leaves for tensor in (pair.a_RD, pair.b_OR))]
    backend = BlockSparseBackend(int(name.removeprefix("stk"))) if name.startswith("stk") else make_backend(name)
    lora, group = prepared(backend, segments, sites)
    return lambda: torch.autograd.grad(lora.add(group, layer.ys, x), wanted, layer.ys)


def block_sparse_call(layer: Layer, segments: Segments) -> Call:
    """The whole of `block_sparse` at each site: gather and pad the tokens, `sdd`, `dsd`, add into y."""
    return adding_call(layer, segments, BlockSparseBackend())


def base_weights(layer: Layer) -> list[Tensor]:
    inputs = layer.group.inputs
    return [torch.randn(out, inputs, device=DEVICE, dtype=DTYPE) * inputs**-0.5 for out in layer.group.outputs]


def base_call(layer: Layer, weights: list[Tensor]) -> Call:
    """The base's own products, all tokens together."""

    def call() -> None:
        for weight in weights:
            linear(layer.x, weight)

    return call
