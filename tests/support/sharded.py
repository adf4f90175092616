"""A tiny base with adapters of every kind: what ranks compute together, and what one process computes alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.functional import cross_entropy

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import BaseSpec, LoraSettings
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base
from coserve.model.dropout import DropoutSpec
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.lora import KeptLora, LoraBatch, LoraWeights
from coserve.model.parallel.adapter import AdapterPartition, Matrices
from coserve.model.parallel.mesh import Mesh
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.families import tiny_family
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.interpreted import interpreted
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import tokens_of

ROW = ("o_proj", "down_proj", "c_proj")
LENGTHS = (5, 9, 4, 7, 6)


class Kind(NamedTuple):
    """An adapter."""

    rank: int
    blocks: int = 1
    targets: tuple[str, ...] = ()
    """Suffixes; empty: every site."""
    uneven: tuple[str, ...] = ()
    """Suffixes of sites whose rank is one less, which no number of ranks divides."""
    dora: bool = False


KINDS = (Kind(8), Kind(8, blocks=2), Kind(8, blocks=4), Kind(3, targets=("q_proj", "o_proj", "up_proj")))
"""The last one's rank is divided by no number of ranks."""
BATCH = (2, 0, -1, 3, 1)
"""The adapter of each of the sequences; -1: the base alone."""


def save_base(folder: Path, **overrides: object) -> str:
    """A Llama of 8 query and 2 key/value heads, whose sizes four ranks and four blocks divide."""
    settings = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8} | overrides
    tiny_family("llama", **settings).save_pretrained(folder)
    return str(folder)


def load(folder: str, mesh: Mesh | None = None, strategy: str = "nfs", quantization: str = "none") -> Base:
    return load_base(folder, device="cpu", dtype="auto", mesh=mesh, strategy=strategy, quantization=quantization)


def whole_adapter(spec: BaseSpec, kind: Kind) -> LoraWeights:
    """Random pairs, the same in every process."""
    pairs = {}
    for name, site in spec.sites.items():
        if kind.targets and not name.endswith(kind.targets):
            continue
        a_blocks, b_blocks = (kind.blocks, 1) if name.endswith(ROW) else (1, kind.blocks)
        digest = hashlib.blake2b(f"{name}/{kind}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rank = kind.rank - name.endswith(kind.uneven)
        a = torch.randn(rank, site.in_features // a_blocks, generator=generator) * 0.2
        b = torch.randn(site.out_features, rank // b_blocks, generator=generator) * 0.2
        magnitude = torch.randn(site.out_features, generator=generator) + 2 if kind.dora else None
        pairs[name] = LoraPair(a, b, 0.5, a_blocks=a_blocks, b_blocks=b_blocks, magnitude_O=magnitude)
    return LoraWeights(LoraSettings(r=kind.rank, use_dora=kind.dora), pairs)


class Result(NamedTuple):
    logits: Tensor
    calls: dict[str, int]
    bytes: dict[str, int]


def mixed_logits(
    mesh: Mesh | None, folder: str, strategy: str, batch: tuple[int, ...] = BATCH, quantization: str = "none"
) -> Result:
    """Logits of one packed batch of sequences with different adapters."""
    base = load(folder, mesh, strategy, quantization)
    adapters = tuple(base.shard(whole_adapter(base.spec, kind)) for kind in KINDS)
    tokens = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS[: len(batch)])]
    bounds = tuple(sum(map(len, tokens[:i])) for i in range(len(tokens) + 1))
    positions = torch.cat([torch.arange(len(own)) for own in tokens])
    lora = LoraBatch(Segments(bounds, batch), adapters, GROUPED)
    if mesh is not None:
        mesh.traffic.clear()
    with torch.no_grad():
        logits = base.forward(torch.cat(tokens), positions, PackedAttention(bounds), lora=lora, keep=None)
    traffic = None if mesh is None else mesh.traffic
    return Result(logits, dict(traffic.calls) if traffic else {}, dict(traffic.bytes) if traffic else {})


def gradients(
    mesh: Mesh | None, folder: str, strategy: str, kind: Kind, dropout: float
) -> tuple[float, Matrices, float]:
    """`gradients_of` a base that is loaded for it."""
    return gradients_of(load(folder, mesh, strategy), kind, dropout)


def gradients_of(base: Base, kind: Kind, dropout: float = 0.0) -> tuple[float, Matrices, float]:
    """Loss, whole gradients of one adapter's matrices, and their norm."""
    whole = whole_adapter(base.spec, kind)
    weights, partition = base.shard(whole), base.partition(whole)
    for pair in weights.sites.values():
        pair.a_RD.requires_grad_()
        pair.b_OR.requires_grad_()
    tokens = tokens_of(16)
    dropped = DropoutSpec(dropout, seed=3) if dropout else None
    lora = LoraBatch(Segments((0, 16), (0,)), (weights,), GROUPED, dropped)
    logits = base.forward(tokens, torch.arange(16), PackedAttention((0, 16)), lora=lora, keep=None)
    loss = cross_entropy(logits[:-1], tokens[1:])
    loss.backward()
    found = {n: (_grad(pair.a_RD), _grad(pair.b_OR)) for n, pair in weights.sites.items()}
    if partition is None:
        norm = torch.stack([tensor.norm() for both in found.values() for tensor in both]).norm()
        return loss.item(), found, norm.item()
    partition.sum_gradients(found)
    return loss.item(), gathered(partition, found), partition.norm(found).item()


def gathered(partition: AdapterPartition, parts: Matrices) -> Matrices:
    """The whole matrices, which every rank then has."""
    wholes = {
        site: (torch.full((a.rows.size, a.columns.size), math.nan), torch.full((b.rows.size, b.columns.size), math.nan))
        for site, a, b in ((site, partition.pairs[site].a, partition.pairs[site].b) for site in parts)
    }
    partition.put(partition.gather(parts), wholes)
    return wholes


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    """Of the whole adapter, as a checkpoint has it."""
    calls: dict[str, int]
    """Collectives of the steps."""
    passes: int
    """Forwards and backwards of compiled layers."""


def train(
    mesh: Mesh | None,
    folder: str,
    strategy: str,
    kind: Kind,
    begin: int = 0,
    end: int = 3,
    state: dict[str, Tensor] | None = None,
    backend: str = "grouped",
    dropout: float = 0.2,
    compiled: bool = False,
    quantization: str = "none",
) -> Trained:
    """Optimizer steps of one adapter, layer by layer, with dropout and clipped gradients. `state`: after step `begin`.

    `backend`: of LoRA terms; where it groups inputs, and without dropout, sites of one input run together. `compiled`:
    by compiled layers, without a compiler.
    """
    base = load(folder, mesh, strategy, quantization)
    whole = whole_adapter(base.spec, kind)
    settings = TrainingSettings(steps=end, learning_rate=0.02, max_grad_norm=0.05, weight_decay=0.1)
    partition = base.partition(whole, learns=True)
    optimizer = AdapterOptimizer(
        whole, base.spec, settings, torch.float32, partition=partition, row_norms=base.row_norms
    )
    layers, passes = None, list[int]()
    if compiled:
        layers = CompiledLayers(base, LayerCut(base), partial(counted, passes))
        layers.compile()
        passes.clear()
    elif backend == "segmented":
        share_inputs(base)
    runner = MicroBatchRunner(base, recompute=False, compiled=layers)
    rows = pack_rows(random_corpus(), range(5), torch.device("cpu"))
    losses, norms, kept = [], [], KeptLora()
    if mesh is not None:
        mesh.traffic.clear()
    if state is not None:
        optimizer.restore(state, steps=begin)
    for step in range(begin, end):
        dropped = DropoutSpec(dropout, seed=step) if dropout else None
        segments, adapters = Segments((0, rows.tokens), (0,)), (optimizer.weights(),)
        lora = LoraBatch(segments, adapters, make_backend(backend), dropped, kept)
        optimizer.compute_scales()
        sums_12 = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
        losses.append(float(sums_12[0, 0]) / rows.targets)
        norms.append(optimizer.step(targets=rows.targets, learning_rate=settings.learning_rate))
    calls = {} if mesh is None else dict(mesh.traffic.calls)
    state = {name: tensor.clone() for name, tensor in optimizer.snapshot()().items()}
    return Trained(losses, norms, state, calls, len(passes))


def counted(
    passes: list[int], graph: fx.GraphModule, inputs: Sequence[object], *, is_backward: bool
) -> Callable[[list[object]], Sequence[Tensor]]:
    """`Compile` without a compiler; `passes` has an entry for each run of a forward (0) or backward (1)."""
    run = interpreted(graph, inputs, is_backward=is_backward)

    def noted(given: list[object]) -> Sequence[Tensor]:
        passes.append(int(is_backward))
        return run(given)

    return noted


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "expected a gradient"
    return tensor.grad
