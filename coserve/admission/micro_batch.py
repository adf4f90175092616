"""Predicts the memory of a training micro-batch: measured costs of the base, exact sizes of what LoRA adds. Pure: no torch.

A micro-batch (`finetune.micro_batch`) has three phases. The forward keeps each layer's activations; the head computes logits, loss
and their gradient, chunk by chunk; the backward goes down layer by layer and frees what each has kept. What is kept is a sum over layers:

    what the base's own operations keep
    + the input of each group of sites (q, k and v; gate and up) that the adapter changes, once
    + x Aᵀ, a row of R elements a token, of each site

The peak is the largest one of what is kept and the head, and what is kept and the backward of a layer. A layer that is recomputed keeps
its input only, and the backward computes it first. Those are the lowest ones: their turn comes when all above them have been freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coserve.admission.shapes import ITEMSIZE, SiteShape
from coserve.gpu_memory import GroupCosts, TrainingCosts
from coserve.types import BaseSpec

ROWS = 36
"""Bytes a token of a micro-batch's ids, positions, targets and labels."""
PAIRS = 36
"""Bytes a token of a micro-batch of pairs, besides: each token's sequence, the weights of its gradient, and the targets' losses."""
TEACHER_SHARE = 2
"""With a teacher, a chunk of the logits is this many times smaller: the teacher's are in memory too."""


@dataclass(frozen=True)
class MicroBatchShape:
    """What is computed at once."""

    tokens: int
    positions: int
    """Tokens whose next token is a target."""
    recomputed: int = 0
    """Layers, from the lowest trained one up, that are computed again."""
    teacher: bool = False
    pairs: bool = False
    """It has a DPO loss. The reference's forward keeps nothing, and ends before anything is kept."""
    graphs: bool = False
    """Its layers run as CUDA graphs, which have static copies of its input, its output and a gradient. What layers keep and compute lies in
    the graphs' memory pool, which the head cannot use."""


@dataclass(frozen=True)
class MicroBatchBytes:
    """Beyond what the job keeps."""

    kept: int
    """Between forward and backward: the most that a suspended micro-batch holds."""
    peak: int


@dataclass(frozen=True)
class LoraLayer:
    """What LoRA adds in one layer. Bytes a token."""

    first: GroupCosts
    """The first group that the adapter changes."""
    kept: float
    last: float
    """Part of `kept`: of the last group, which the backward frees first."""


def lora_layers(
    costs: TrainingCosts, shapes: Iterable[SiteShape], dtype: str, *, dropout: bool
) -> Mapping[int, LoraLayer]:
    """By layer: those that an adapter of these shapes changes, the lowest first."""
    order = {role: index for index, group in enumerate(costs.groups) for role in group.roles}
    by_layer: dict[int, dict[int, list[SiteShape]]] = {}
    for shape in shapes:
        by_layer.setdefault(shape.layer, {}).setdefault(order[shape.role], []).append(shape)
    element = ITEMSIZE[dtype]
    return {layer: _lora_layer(costs, groups, element, dropout=dropout) for layer, groups in sorted(by_layer.items())}


def micro_batch_bytes(
    costs: TrainingCosts, base: BaseSpec, layers: Mapping[int, LoraLayer], batch: MicroBatchShape
) -> MicroBatchBytes:
    """Of a micro-batch with one adapter. `layers`: of the same costs."""
    tokens, input_bytes = batch.tokens, base.hidden * ITEMSIZE[base.dtype]  # of a layer, a token
    first = min(layers)
    above = base.layers - 1 - first
    again = min(batch.recomputed, above + 1)
    lowest = input_bytes if first else 0  # the embedding is the lowest one's input where it is layer 0
    if again:
        own = (above + 1 - again) * (costs.layer - input_bytes) + above * input_bytes + lowest
        own += sum(layer.kept for i, layer in layers.items() if i >= first + again)
        kept = costs.recompute.at(tokens) + round(tokens * own)
    else:
        bottom = layers[first]
        own = bottom.first.bottom + bottom.kept + above * costs.layer + lowest
        own += sum(layer.kept for i, layer in layers.items() if i > first)
        kept = round(costs.fixed + tokens * own)
    peak = kept + _backward(costs, layers.get(base.layers - 1), tokens) if again <= above else 0
    if again:
        inputs = costs.recompute.at(tokens) + tokens * ((again - 1) * input_bytes + lowest)
        computed = (_recomputed(costs, layers.get(i), tokens) for i in range(first, first + again))
        peak = max(peak, inputs + max(computed))
    head = costs.head.at(tokens, batch.positions)
    if batch.teacher:  # its last states are kept; its head runs beside the student's, over chunks of half the size
        taught = tokens * input_bytes
        kept, peak = kept + taught, peak + taught
        head = 2 * costs.head.at(tokens, min(batch.positions, max(4, costs.head.most // TEACHER_SHARE)))
    besides = tokens * (ROWS + PAIRS * batch.pairs + 3 * input_bytes * batch.graphs)
    held = kept + tokens * input_bytes + besides
    return MicroBatchBytes(held, (peak + head if batch.graphs else max(kept + head, peak)) + besides)


def _backward(costs: TrainingCosts, layer: LoraLayer | None, tokens: int) -> int:
    """Of a layer, beyond what is kept. `layer` None: the adapter does not change it."""
    freed = 0.0 if layer is None else layer.last
    return round(max(costs.last.at(tokens), costs.others.at(tokens) - tokens * freed))


def _recomputed(costs: TrainingCosts, layer: LoraLayer | None, tokens: int) -> int:
    """Of a layer that is computed again, beyond what is kept then."""
    return round(tokens * (costs.layer + (0.0 if layer is None else layer.kept))) + _backward(costs, layer, tokens)


def _lora_layer(
    costs: TrainingCosts, groups: Mapping[int, Sequence[SiteShape]], element: int, *, dropout: bool
) -> LoraLayer:
    kept = {}
    for index, sites in groups.items():
        own = costs.groups[index].kept
        if dropout:  # each site has an input of its own, and its mask
            own = 2.0 * element * sum(site.inputs for site in sites)
        kept[index] = own + element * sum(site.rank for site in sites)
    return LoraLayer(
        first=costs.groups[min(groups)], kept=sum(kept.values()), last=kept.get(len(costs.groups) - 1, 0.0)
    )
