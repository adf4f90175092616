"""The suspendable step: one micro-batch forward and backward, cut at every decoder layer.

Each layer's input is detached into a leaf, so that a layer's graph is a micro-step of its own, and the backward goes layer by
layer with `torch.autograd.grad` on that leaf and the layer's LoRA tensors. The gradients of the base (the `M_backward`
of full fine-tuning, paper §4.2) are never formed. With `recompute` only the inputs stay between forward and backward.

The generators below yield after each micro-step, and hold no context (gradient mode, LoRA batch) while they are suspended:
whatever runs in between, inference of other adapters above all, changes nothing.

Letters: T packed tokens, D hidden, V vocabulary, K kept tokens (those whose next token is learned), L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coserve.corpus.tokenized import Corpus
from coserve.kernels.attention.packed import PackedAttention
from coserve.model.base import Base
from coserve.model.layers import LayerCut, LayerInputs
from coserve.model.lora import LoraBatch
from coserve.types import MicroStep

LOGITS_AT_ONCE = 1 << 25
"""Elements of one micro-step of logits: 128 MiB in fp32, whatever the vocabulary."""

Pieces = Generator[MicroStep, None, Tensor]
"""Yields after each micro-step but the last, which kind of micro-step comes next. The first is a `MicroStep.BEGIN`."""

Leaves = Sequence[Sequence[Tensor]]
"""The tensors to learn, by layer (L)."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of a corpus, packed: token t of `keep_K` predicts `labels_K`. All int64 on the base's device."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    bounds: tuple[int, ...]
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def targets(self) -> int:
        return self.keep_K.shape[0]


def pack_rows(corpus: Corpus, rows: Sequence[int], device: torch.device) -> PackedRows:
    """The rows one behind the other, each a sequence of its own."""
    parts = [corpus.row(row) for row in rows]
    tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)
    learned = np.flatnonzero(np.concatenate([target for _, target in parts]))
    lengths = [len(part) for part, _ in parts]
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert not (positions[learned] == 0).any(), "a row's first token has nothing to be predicted from"
    return PackedRows(
        tokens_T=torch.from_numpy(tokens).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        bounds=(0, *np.cumsum(lengths).tolist()),
        keep_K=torch.from_numpy(learned - 1).to(device),
        labels_K=torch.from_numpy(tokens[learned]).to(device),
    )


@dataclass
class _Passed:
    """What one layer leaves for its backward; `output` is missing where it is computed again."""

    input_1TD: Tensor  # noqa: N815
    output_1TD: Tensor | None  # noqa: N815


@dataclass(frozen=True)
class _Own:
    """What one layer learns. `bottom`: nothing below it does, so that the backward ends there."""

    leaves: Sequence[Tensor]
    grads: Sequence[Tensor]
    bottom: bool


class Stepper:
    """Runs micro-batches of any adapters through one base."""

    def __init__(self, base: Base, *, recompute: bool, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        """Raises `UnsupportedBase` for a base that cannot be run layer by layer."""
        assert not any(parameter.requires_grad for parameter in base.model.parameters()), "the base must be frozen"
        self._base, self._cut, self._recompute = base, LayerCut(base), recompute
        self._kept_at_once = max(16, logits_at_once // base.spec.vocab)

    def learn(
        self, rows: PackedRows, lora: LoraBatch, leaves: Leaves, grads: Leaves, *, last: MicroStep = MicroStep.BACKWARD
    ) -> Pieces:
        """Adds to `grads` (fp32, shaped as `leaves`) the gradient of the rows' summed NLL; returns that sum.

        `leaves[i]` are the tensors of `lora` at layer i's sites, each requiring gradients; `grads` are the pairs' `MainGrads`,
        if they have any. The sum (fp64, scalar, nats)
        is not divided by the number of targets, so that micro-batches of one optimizer step simply add up. `last` is the kind
        of its last micro-step.
        """
        passed: list[_Passed] = []
        layers, first = len(leaves), next(i for i, own in enumerate(leaves) if own)
        inputs = self._embed(rows)
        h_1TD = inputs.h_1TD
        for i in range(layers):
            h_1TD = self._forward(i, h_1TD, inputs, lora, passed, learn=i >= first, leaf=i > first)
            yield MicroStep.FORWARD if i + 1 < layers else MicroStep.HEAD
        nll, gradient_1TD = torch.zeros((), dtype=torch.float64, device=h_1TD.device), torch.zeros_like(h_1TD)
        kept, backward = self._kept(rows), MicroStep.BACKWARD if first + 1 < layers else last
        for place, (keep_K, labels_K) in enumerate(kept, start=1):
            nll += self._head(h_1TD, inputs, keep_K, labels_K, gradient_1TD)
            yield MicroStep.HEAD if place < len(kept) else backward
        for i in reversed(range(first, layers)):
            own = _Own(leaves[i], grads[i], bottom=i == first)
            gradient_1TD = self._backward(i, passed.pop(), gradient_1TD, inputs, lora, own)
            if not own.bottom:
                yield MicroStep.BACKWARD if i > first + 1 else last
        return nll

    def measure(self, rows: PackedRows, lora: LoraBatch) -> Pieces:
        """The rows' summed NLL (fp64, scalar) without gradients."""
        inputs = self._embed(rows)
        h_1TD = inputs.h_1TD
        layers = len(self._base.layers)
        for i in range(layers):
            h_1TD = self._forward(i, h_1TD, inputs, lora, [], learn=False, leaf=False)
            yield MicroStep.MEASURE if i + 1 < layers else MicroStep.MEASURE_HEAD
        nll = torch.zeros((), dtype=torch.float64, device=h_1TD.device)
        for place, (keep_K, labels_K) in enumerate(self._kept(rows)):
            if place:
                yield MicroStep.MEASURE_HEAD
            nll += self._head(h_1TD, inputs, keep_K, labels_K, None)
        return nll

    def _embed(self, rows: PackedRows) -> LayerInputs:
        return self._cut.embed(rows.tokens_T, rows.positions_T, PackedAttention(rows.bounds))

    def _kept(self, rows: PackedRows) -> list[tuple[Tensor, Tensor]]:
        """`keep_K` and `labels_K` in the parts whose logits are made at once."""
        starts, size = range(0, rows.targets, self._kept_at_once), self._kept_at_once
        return [(rows.keep_K[start : start + size], rows.labels_K[start : start + size]) for start in starts]

    def _forward(
        self,
        i: int,
        h_1TD: Tensor,
        inputs: LayerInputs,
        lora: LoraBatch,
        passed: list[_Passed],
        *,
        learn: bool,
        leaf: bool,
    ) -> Tensor:
        """Layer i. `learn`: its backward will come; `leaf`: and needs the gradient of the layer's input."""
        keep_graph = learn and not self._recompute
        input_1TD = h_1TD.detach().requires_grad_(leaf and keep_graph)
        output_1TD = self._layer(i, input_1TD, inputs, lora, gradient=keep_graph)
        if learn:
            passed.append(_Passed(input_1TD, output_1TD if keep_graph else None))
        return output_1TD.detach()

    def _layer(self, i: int, h_1TD: Tensor, inputs: LayerInputs, lora: LoraBatch, *, gradient: bool) -> Tensor:
        with torch.set_grad_enabled(gradient), self._base.lora(lora):
            return self._cut.layer(i, h_1TD, inputs)

    def _head(
        self, h_1TD: Tensor, inputs: LayerInputs, keep_K: Tensor, labels_K: Tensor, gradient_1TD: Tensor | None
    ) -> Tensor:
        """Summed NLL of some kept tokens; adds its gradient to `gradient_1TD`."""
        wanted = gradient_1TD is not None
        leaf_1TD = h_1TD.detach().requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            logits_KV = self._cut.head(leaf_1TD, inputs, keep_K)
            nll = torch.nn.functional.cross_entropy(logits_KV.float(), labels_K, reduction="sum")
        if gradient_1TD is not None:
            gradient_1TD += torch.autograd.grad(nll, leaf_1TD)[0]
        return nll.detach().double()

    def _backward(
        self, i: int, passed: _Passed, gradient_1TD: Tensor, inputs: LayerInputs, lora: LoraBatch, own: _Own
    ) -> Tensor:
        """Adds layer i's gradients to its own; returns the gradient of its input, which the bottom layer leaves out."""
        input_1TD, output_1TD = passed.input_1TD, passed.output_1TD
        if output_1TD is None:
            input_1TD = input_1TD.detach().requires_grad_(not own.bottom)
            output_1TD = self._layer(i, input_1TD, inputs, lora, gradient=True)
        if not output_1TD.requires_grad:  # the bottom layer's sites did not run: no token was sent to their expert
            return gradient_1TD
        learned = [] if lora.sums_gradients else own.leaves  # `segmented` adds to `own.grads` itself, as it goes
        reached = [] if own.bottom and not lora.sums_gradients else [lora.segments.anchor if own.bottom else input_1TD]
        wanted = [*learned, *reached]
        found = torch.autograd.grad(output_1TD, wanted, gradient_1TD, allow_unused=True)
        _add(own.grads, found[: len(learned)])
        if own.bottom:
            return gradient_1TD
        assert found[-1] is not None, "a layer's output depends on its input"
        return found[-1]


def _add(grads: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Adds what autograd found, in the compute dtype, to the fp32 sums; None: the tensor has no part in the output."""
    pairs = [(total, gradient) for total, gradient in zip(grads, found, strict=False) if gradient is not None]
    if pairs:
        torch._foreach_add_([total for total, _ in pairs], [gradient for _, gradient in pairs])


def run_to_end(micro_steps: Pieces, between: Callable[[], None] | None = None) -> Tensor:
    """What the micro-steps return in the end; `between` runs after each."""
    while True:
        try:
            next(micro_steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result
        if between is not None:
            between()
