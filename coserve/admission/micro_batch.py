"""Predicts the memory of a training micro-batch from measured costs of the base and exact sizes of LoRA's tensors.
Pure: no torch.

A micro-batch (`finetune.micro_batch`) has three phases. The forward keeps each layer's activations. The head computes
logits, loss and their gradient, chunk by chunk. The backward goes down layer by layer and frees what each layer has
kept. A layer keeps the sum of:

- what the base's own operations keep;
- the input of each group of sites (q, k and v; gate and up) that the adapter changes, once a group;
- x Aᵀ of each site, a row of R elements per token;
- the unscaled output of each site of a DoRA adapter.

The peak is what is kept plus the head, or what is kept plus the backward of one layer, whichever is larger. With CUDA
graphs the two add up, because the head cannot use the graphs' memory pool. A recomputed layer keeps its input only, and
its backward runs its forward first. The lowest layers are recomputed, because their backward comes when all layers
above have been freed. Compiled layers above them may recompute all but attention: they keep their input and attention's
output (`Kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coserve.admission.shapes import ITEMSIZE, SiteShape, role_of
from coserve.core.gpu_memory import GroupCosts, Kept, LevelCosts, TrainingCosts
from coserve.core.names import is_end
from coserve.core.types import BaseSpec

LEAST_STEP = 64
"""Tokens. Batches are padded to a multiple of it or, if that is larger, of the largest power of two up to a sixteenth
of their size."""
MOST_SHAPES = 6
"""Most batch sizes that have CUDA graphs at the same time. Each keeps its static tensors between batches."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

ROWS = 36
"""Bytes per token of a micro-batch's ids, positions, targets and labels."""
PAIRS = 36
"""Further bytes per token of a micro-batch of (chosen, rejected) pairs: each token's sequence, its gradient weight, and
the targets' losses."""
_NO_GROUP = -1
"""Group index of (A, B) pairs that are in no group: those of experts, and of a KV prefix."""
TEACHER_SHARE = 2
"""With a teacher, a chunk of logits is this many times smaller, because the teacher's logits are in memory too."""


@dataclass(frozen=True)
class MicroBatchShape:
    """Size of a micro-batch, and how its layers run."""

    tokens: int
    positions: int
    """Tokens whose next token is a target."""
    recomputed: int = 0
    """Number of layers, from the lowest trained one up, that are recomputed whole."""
    partly: int = 0
    """Number of layers above them that recompute all but attention."""
    teacher: bool = False
    pairs: bool = False
    """Whether it is a preference loss. The forward of a DPO loss's reference keeps no activations, and ends before the
    forward of the policy model begins."""
    graphs: bool = False
    """Whether layers run as CUDA graphs. Each captured shape has static copies of its input, its output and a gradient;
    every shape counts as large as this one. What layers keep and compute lies in the graphs' memory pool, which the
    head cannot use."""


@dataclass(frozen=True)
class MicroBatchBytes:
    """Predicted bytes of a micro-batch, beyond what the job keeps between micro-batches."""

    kept: int
    """Between forward and backward: the most that a suspended micro-batch holds."""
    peak: int


@dataclass(frozen=True)
class LoraLayer:
    """Bytes per token that LoRA adds in one layer."""

    first: GroupCosts
    """Costs of the first group that the adapter changes."""
    kept: float
    last: float
    """The part of `kept` in the last group, which the backward frees first."""
    shrinks: tuple[float, ...]
    """The part of `kept` that is x Aᵀ, for each group of the costs."""


def lora_layers(
    costs: TrainingCosts, shapes: Iterable[SiteShape], dtype: str, *, dropout: bool
) -> Mapping[int, LoraLayer]:
    """Return what LoRA adds in each layer that an adapter of these shapes changes, by layer, lowest first. What changes
    the embedding and the head is left out."""
    order = {role: index for index, group in enumerate(costs.groups) for role in group.roles}
    by_layer: dict[int, dict[int, list[SiteShape]]] = {}
    for shape in (shape for shape in shapes if not is_end(shape.name)):
        place = _NO_GROUP if shape.kept else order[shape.role]
        by_layer.setdefault(shape.layer, {}).setdefault(place, []).append(shape)
    element = ITEMSIZE[dtype]
    return {layer: _lora_layer(costs, groups, element, dropout=dropout) for layer, groups in sorted(by_layer.items())}


def micro_batch_bytes(
    costs: TrainingCosts, base: BaseSpec, layers: Mapping[int, LoraLayer], batch: MicroBatchShape
) -> MicroBatchBytes:
    """Predict a micro-batch with one adapter. `layers`: as `lora_layers` returns them for the same costs."""
    counts = np.array([batch.recomputed]), np.array([batch.partly])
    kept, peak = MicroBatchModel(costs, base, layers).bytes(batch, *counts)
    return MicroBatchBytes(round(float(kept[0])), round(float(peak[0])))


class MicroBatchModel:
    """Predicts micro-batches with one adapter, for many counts of recomputed layers at once."""

    def __init__(self, costs: TrainingCosts, base: BaseSpec, layers: Mapping[int, LoraLayer]) -> None:
        """`layers`: as `lora_layers` returns them for the same costs."""
        first = min(layers)
        self._costs, self._bottom = costs, layers[first]
        unchanged = LoraLayer(self._bottom.first, 0.0, 0.0, (0.0,) * len(costs.groups))
        self._each = tuple(layers.get(i, unchanged) for i in range(first, base.layers))
        """Trained layers, from the lowest one up."""
        element = ITEMSIZE[base.dtype]
        self._input = base.carried * element
        """Bytes per token of a layer's input."""
        self._lowest = self._input if first else 0
        """Bytes per token of the lowest trained layer's input; 0 for layer 0, whose input is the embedding, held in any
        case."""
        self._own = {Kept.ALL: costs.layer, Kept.INPUT: float(self._input)}
        self._own |= {kept: level.kept for kept, level in costs.levels.items()}
        """Bytes per token that a layer keeps without LoRA, for each level."""
        self._lora = {kept: _sums(self._lora_kept(kept, one) for one in self._each) for kept in Kept}
        """Bytes per token that LoRA adds to the lowest 0, 1, ... layers in all, for each level."""
        sites = [sum(role_of(name) in group.roles for name in base.sites) / base.layers for group in costs.groups]
        self._measured = [element * costs.rank * count for count in sites]
        """Bytes per token of each group's x Aᵀ, for the adapter that the levels were measured with."""

    def bytes(self, batch: MicroBatchShape, recomputed: Counts, partly: Counts) -> tuple[Floats, Floats]:
        """Return held and peak bytes, beyond what the job keeps, for each pair of counts in `recomputed` and `partly`;
        the counts in `batch` are ignored. Held: the most while the micro-batch is suspended. A count above the number
        of trained layers means all of them."""
        costs, tokens, trained = self._costs, batch.tokens, len(self._each)
        again = np.minimum(recomputed, trained)
        lean = again + np.minimum(partly, trained - again)
        kept = np.where(lean > 0, self._held(tokens, again, lean, trained), self._all_kept(tokens))
        peak = np.where(lean < trained, kept + self._backward(self._each[-1], tokens), 0)
        below = self._held(tokens, again, lean, lean) + self._lean_backward(Kept.ATTENTION, tokens)[lean]
        peak = np.where(lean > again, np.maximum(peak, below), peak)
        below = self._held(tokens, again, again, again) + self._lean_backward(Kept.INPUT, tokens)[again]
        peak = np.where(again > 0, np.maximum(peak, below), peak)
        head = costs.head.at(tokens, batch.positions)
        if batch.teacher:  # keeps the teacher's last hidden states; both heads run, over half-size chunks
            taught = tokens * self._input
            kept, peak = kept + taught, peak + taught
            head = 2 * costs.head.at(tokens, min(batch.positions, max(4, costs.head.most // TEACHER_SHARE)))
        static = 3 * MOST_SHAPES * self._input * batch.graphs
        besides = tokens * (ROWS + PAIRS * batch.pairs + static)
        held = kept + tokens * self._input + besides
        return held, (peak + head if batch.graphs else np.maximum(kept + head, peak)) + besides

    def _lora_kept(self, kept: Kept, layer: LoraLayer) -> float:
        """Bytes per token that LoRA adds to a layer that keeps `kept`: each x Aᵀ that is not recomputed, and at
        `Kept.ALL` also inputs."""
        level = self._costs.levels.get(kept)
        if level is None:
            return layer.kept if kept is Kept.ALL else 0.0
        return sum(own for own, stays in zip(layer.shrinks, level.shrinks, strict=True) if stays)

    def _all_kept(self, tokens: int) -> int:
        """Bytes that all layers keep if none is recomputed."""
        own = self._bottom.first.bottom + (len(self._each) - 1) * self._costs.layer + self._lowest
        return round(self._costs.fixed + tokens * (own + float(self._lora[Kept.ALL][-1])))

    def _held(self, tokens: int, again: Counts, lean: Counts, count: Counts | int) -> Floats:
        """Bytes that the lowest `count` layers keep: the lowest `again` are recomputed whole, those up to `lean` all
        but attention. At least one layer is recomputed."""
        numbers = {Kept.INPUT: again, Kept.ATTENTION: lean - again, Kept.ALL: count - lean}
        own = sum(number * (self._own.get(kept, 0.0) - self._input) for kept, number in numbers.items())
        lora = self._lora[Kept.ALL][count] - self._lora[Kept.ALL][lean] + self._lora[Kept.INPUT][again]
        lora = lora + self._lora[Kept.ATTENTION][lean] - self._lora[Kept.ATTENTION][again]
        inputs = (count - 1) * self._input + self._lowest
        return np.asarray(self._costs.recompute.at(tokens) + tokens * (own + inputs + lora), np.float64)

    def _lean_backward(self, kept: Kept, tokens: int) -> Floats:
        """For the lowest 0, 1, ... layers: the most that the backward of one of them takes beyond what is kept, if each
        keeps only `kept`."""
        level = self._costs.levels.get(kept)
        if level is not None:
            return level.backward.at(tokens) + tokens * _highest(self._more(level, one) for one in self._each)
        found = {
            one: round(tokens * (self._costs.layer + one.kept)) + self._backward(one, tokens) for one in {*self._each}
        }
        return _highest(found[one] for one in self._each)  # the whole forward runs again, and keeps everything

    def _more(self, level: LevelCosts, layer: LoraLayer) -> float:
        """Bytes per token by which this layer's recomputed x Aᵀ exceed those of the measured adapter."""
        each = zip(layer.shrinks, self._measured, level.shrinks, strict=True)
        return max(0.0, sum(own - measured for own, measured, stays in each if not stays))

    def _backward(self, layer: LoraLayer, tokens: int) -> int:
        """Bytes that the backward of a layer that keeps everything takes beyond what is kept."""
        return round(max(self._costs.last.at(tokens), self._costs.others.at(tokens) - tokens * layer.last))


def _sums(each: Iterable[float]) -> Floats:
    """Sums of the first 0, 1, ... entries."""
    return np.cumsum([0.0, *each])


def _highest(each: Iterable[float]) -> Floats:
    """Maxima of the first 0, 1, ... entries; none is below 0."""
    return np.maximum.accumulate([0.0, *each])


def _lora_layer(
    costs: TrainingCosts, groups: Mapping[int, Sequence[SiteShape]], element: int, *, dropout: bool
) -> LoraLayer:
    kept, shrinks = dict[int, float](), [0.0] * len(costs.groups)
    for index, sites in groups.items():
        if index == _NO_GROUP:
            kept[index] = float(element * sum(site.kept for site in sites))
            continue
        own = costs.groups[index].kept
        if dropout:  # each site has its own input, and a dropout mask
            own = 2.0 * element * sum(site.inputs for site in sites)
        shrinks[index] = float(element * sum(site.rank for site in sites))
        kept[index] = own + shrinks[index] + element * sum(site.magnitude for site in sites)
    return LoraLayer(
        first=costs.groups[min((index for index in groups if index != _NO_GROUP), default=0)],
        kept=sum(kept.values()),
        last=kept.get(len(costs.groups) - 1, 0.0),
        shrinks=tuple(shrinks),
    )


def padded(tokens: int, least_step: int = LEAST_STEP) -> int:
    """Return the size that a batch of `tokens` tokens is padded to, so that few sizes need CUDA graphs."""
    step = max(least_step, 1 << max(tokens.bit_length() - 5, 0))
    return -(-tokens // step) * step
