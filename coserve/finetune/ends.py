"""Runs the input embedding and the LM head (the model's two ends) forward and backward where an adapter changes them.

Letters: T packed tokens, K targets, D hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from coserve.finetune.layers.eager import add_gradients
from coserve.kernels.lora.types import LoraPair
from coserve.model.adapters.end_terms import Ends
from coserve.model.base import Base
from coserve.model.forward_context import ForwardContext, running
from coserve.model.layers import LayerCall, LayerCut, LayerInputs
from coserve.model.lora import LoraBatch


class EndPass:
    """Embedding and head of one batch: applies the adapters' LoRA pairs and replaced rows, and sums the gradients of
    those that are trained."""

    def __init__(self, base: Base, cut: LayerCut, lora: LoraBatch | None, *, learns: bool) -> None:
        self._base, self._cut, self._lora = base, cut, lora
        self._entering_1TD: Tensor | None = None
        """Input of the first layer, with its autograd graph; only if the embedding is trained."""
        self._arguments: list[tuple[Tensor, Tensor]] = []
        """Arguments of layers that depend on the trained embedding, too (Gemma's inputs of each layer), with their
        graphs, and the leaves that the layers get instead."""
        found = [] if lora is None else [(name, pair) for one in lora.adapters for name, pair in one.ends.items()]
        self.changes = bool(found)
        """Whether an adapter of the batch changes the embedding or the head."""
        learned = [pair for _, pair in found if learns and pair.main_grads is not None]
        both = [both for pair in learned for both in _with_sums(pair) if both[0].requires_grad]
        self._tensors, self._sums = [tensor for tensor, _ in both], [total for _, total in both]
        layers = [base.spec.site(name).layer for name, pair in found if learns and pair.main_grads is not None]
        self.embedding_learns = any(layer < 0 for layer in layers)

    def enter(self, inputs: LayerInputs) -> LayerInputs:
        """Return `inputs`, the base's inputs of the layers, with the embeddings that the batch's adapters change."""
        ends = self._ends(None)
        if ends is None or ends.embedding is None:
            return inputs
        with running(ForwardContext(ends=Ends(embedding=ends.embedding))):
            found = self._cut.embed(
                inputs.tokens_T, inputs.positions_T, inputs.attention, gradient=self.embedding_learns
            )
        if self.embedding_learns:
            self._entering_1TD = found.h_1TD
        calls = [LayerCall(*tree_map(self._detached, (call.args, call.kwargs))) for call in found.calls]
        return replace(found, h_1TD=found.h_1TD.detach().clone(), calls=tuple(calls))

    def _detached(self, argument: object) -> object:
        if not isinstance(argument, Tensor) or not argument.requires_grad:
            return argument
        self._arguments.append((argument, argument.detach().requires_grad_()))
        return self._arguments[-1][1]

    def head(self, h_1KD: Tensor, inputs: LayerInputs, keep_K: Tensor) -> Tensor:
        """Return the logits of these tokens, or this rank's shard of them: see `LayerCut.head`."""
        ends = self._ends(keep_K)
        with running(ForwardContext(ends=None if ends is None else Ends(head=ends.head))):
            return self._cut.head(h_1KD, inputs, keep_K, gather=False)

    def head_backward(self, logits: Tensor, leaf_1KD: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the hidden states. Adds the gradients of the head's LoRA pairs and replaced rows to
        their sums."""
        first, *others = torch.autograd.grad(logits, [leaf_1KD, *self._tensors], gradient, allow_unused=True)
        add_gradients(self._sums, others)
        assert first is not None, "logits depend on the hidden states"
        return first

    def backward(self, gradient_1TD: Tensor) -> None:
        """Add the gradients of the embedding's LoRA pairs and replaced rows to their sums. `gradient_1TD`: gradient of
        layer 0's input."""
        if self._entering_1TD is not None:
            read = [(one, leaf.grad) for one, leaf in self._arguments if leaf.grad is not None]
            begin, gradients = zip((self._entering_1TD, gradient_1TD), *read, strict=True)
            add_gradients(self._sums, torch.autograd.grad(begin, self._tensors, gradients, allow_unused=True))
            self._entering_1TD, self._arguments = None, []

    def _ends(self, keep_K: Tensor | None) -> Ends | None:
        if self._lora is None or not self.changes:
            return None
        return self._base.ends.prepare(self._lora.segments, self._lora.adapters, keep_K, self._base.device)


def _with_sums(pair: LoraPair) -> list[tuple[Tensor, Tensor]]:
    """Return a pair's tensors with the sums of their gradients."""
    assert pair.main_grads is not None, "expected an adapter that learns"
    return [(pair.a_RD, pair.main_grads.a_RD), (pair.b_OR, pair.main_grads.b_OR)]
