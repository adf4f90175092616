"""Predicts the memory of a training micro-batch: measured costs of the base, exact sizes of what LoRA adds. Pure: no torch.

A micro-batch (`finetune.micro_batch`) has three phases. The forward keeps each layer's activations; the head computes logits, loss
and their gradient, chunk by chunk; the backward goes down layer by layer and frees what each has kept. What is kept is a sum over layers:

    what the base's own operations keep
    + the input of each group of sites (q, k and v; gate and up) that the adapter changes, once
    + x Aᵀ, a row of R elements a token, of each site

The peak is the larger one of what is kept and the head, and what is kept and the backward of the topmost layer. With recomputation
only inputs of layers are kept, and the backward computes a whole layer first.
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
TEACHER_SHARE = 4
"""`finetune.micro_batch`: chunks of the logits are so many times smaller with a teacher."""


@dataclass(frozen=True)
class MicroBatchShape:
    """What is computed at once."""

    tokens: int
    positions: int
    """Tokens whose next token is a target."""
    recompute: bool = False
    dropout: bool = False
    teacher: bool = False
    pairs: bool = False
    """It has a DPO loss. The reference's forward keeps nothing, and ends before anything is kept."""


@dataclass(frozen=True)
class MicroBatchBytes:
    """Beyond what the job keeps."""

    kept: int
    """Between forward and backward: the most that a suspended micro-batch holds."""
    peak: int


def micro_batch_bytes(
    costs: TrainingCosts, base: BaseSpec, shapes: Iterable[SiteShape], batch: MicroBatchShape
) -> MicroBatchBytes:
    """Of a micro-batch with one adapter, of these shapes, on a base like `base` whose costs were measured."""
    tokens, element = batch.tokens, ITEMSIZE[base.dtype]
    layers = _layers(costs, shapes, element, dropout=batch.dropout)
    first, top = min(layers), max(layers)
    above = base.layers - 1 - first
    input_bytes = base.hidden * element  # of a layer, a token
    lowest = input_bytes if first else 0  # the embedding is the lowest one's input where it is layer 0
    if batch.recompute:
        kept = costs.recompute.at(tokens) + tokens * (above * input_bytes + lowest)
        computed = tokens * (costs.layer + max(layer.kept for layer in layers.values()))
    else:
        bottom = layers[first]
        own = bottom.first.bottom + bottom.kept + above * costs.layer + lowest
        own += sum(layer.kept for i, layer in layers.items() if i > first)
        kept, computed = round(costs.fixed + tokens * own), 0.0
    highest = layers[top] if top == base.layers - 1 else None
    freed = 0.0 if highest is None else highest.last
    backward = computed + max(costs.last.at(tokens), costs.others.at(tokens) - tokens * freed)
    head = costs.head.at(tokens, batch.positions)
    if batch.teacher:  # its last states are kept; its head runs beside the student's, over chunks of a quarter
        kept += tokens * input_bytes
        head = 2 * costs.head.at(tokens, min(batch.positions, max(4, costs.head.most // TEACHER_SHARE)))
    rows = tokens * (ROWS + PAIRS if batch.pairs else ROWS)
    held = kept + tokens * input_bytes + rows
    return MicroBatchBytes(held, kept + rows + round(max(head, backward)))


@dataclass(frozen=True)
class _LoraLayer:
    """What LoRA adds in one layer. Bytes a token."""

    first: GroupCosts
    """The first group that the adapter changes."""
    kept: float
    last: float
    """Part of `kept`: of the last group, which the backward frees first."""


def _layers(costs: TrainingCosts, shapes: Iterable[SiteShape], element: int, *, dropout: bool) -> dict[int, _LoraLayer]:
    """By layer: those that the adapter changes."""
    order = {role: index for index, group in enumerate(costs.groups) for role in group.roles}
    by_layer: dict[int, dict[int, list[SiteShape]]] = {}
    for shape in shapes:
        by_layer.setdefault(shape.layer, {}).setdefault(order[shape.role], []).append(shape)
    return {layer: _lora_layer(costs, groups, element, dropout=dropout) for layer, groups in sorted(by_layer.items())}


def _lora_layer(
    costs: TrainingCosts, groups: Mapping[int, Sequence[SiteShape]], element: int, *, dropout: bool
) -> _LoraLayer:
    kept = {}
    for index, sites in groups.items():
        own = costs.groups[index].kept
        if dropout:  # each site has an input of its own, and its mask
            own = 2.0 * element * sum(site.inputs for site in sites)
        kept[index] = own + element * sum(site.rank for site in sites)
    return _LoraLayer(
        first=costs.groups[min(groups)], kept=sum(kept.values()), last=kept.get(len(costs.groups) - 1, 0.0)
    )
