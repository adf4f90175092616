"""PEFT's side: one adapter trained as a careful user does it, on the same rows in the same order as the daemon's first
job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.llama import random_model
from benchmarks.ets.figure_5_1_trainer import random_corpus, training_settings
from benchmarks.finetuning.cases import RANK, SEED, Case, Shape
from benchmarks.peers.trainer import CHUNK, adapted
from coserve.data.corpus.batch_plan import BatchPlan


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `linear(hidden, weight)`. The logits of `CHUNK` tokens at a time are in memory, and of them
    only the gradient of the hidden states is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:  # noqa: ANN401
        gradient_ND = torch.empty_like(hidden_ND)
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_ND), CHUNK):
            own = slice(start, start + CHUNK)
            leaf = hidden_ND[own].detach().requires_grad_()
            with torch.enable_grad():
                logits = torch.nn.functional.linear(leaf, weight_VD).float()
                part = torch.nn.functional.cross_entropy(logits, labels_N[own], reduction="sum") / len(labels_N)
            gradient_ND[own] = torch.autograd.grad(part, leaf)[0]
            loss += part.detach()
        ctx.save_for_backward(gradient_ND)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (gradient_ND,) = ctx.saved_tensors
        return gradient_ND * gradient.to(gradient_ND.dtype), None, None


def chunked_loss(model: Any, ids_BL: Tensor) -> Tensor:  # noqa: ANN401 - a PEFT model, whose members have no types
    """Mean loss of the next tokens."""
    base = model.get_base_model()
    hidden_BLD = base.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state[:, :-1]
    weight_VD = base.get_output_embeddings().weight
    loss: Tensor = ChunkedCrossEntropy.apply(hidden_BLD.flatten(0, 1), weight_VD, ids_BL[:, 1:].flatten())  # type: ignore[no-untyped-call]
    return loss


def plain_loss(model: Any, ids_BL: Tensor) -> Tensor:  # noqa: ANN401 - as `chunked_loss` has it
    """As transformers computes it: all logits at once."""
    loss: Tensor = model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss
    return loss


def optimizer_step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Backward, clipping to a norm of 1 as the daemon does by default, and the update; waits for the loss, which a
    trainer reports."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    float(loss.detach())


def batches(shape: Shape, case: Case) -> Iterator[Tensor]:
    """Token ids (B, L) of each optimizer step: those of the daemon's first job."""
    corpus = random_corpus(shape.vocab, 4 * case.rows, case.length, 0)
    plan = BatchPlan(corpus.lengths, training_settings(0, case.rows, case.length), case.tokens)
    for step in range(plan.total_steps):
        (rows,) = plan.step(step).micro_batches
        tokens = [torch.from_numpy(corpus.row(row)[0]).long() for row in rows]
        yield torch.stack(tokens).to(shape.device)


class PeftSide:
    """A base with one adapter, on the device."""

    def __init__(self, shape: Shape, mode: str | None) -> None:
        """`mode`: of `torch.compile` for each layer, with the loss in chunks; None: transformers as it is."""
        base = random_model(shape.config(), shape.device, SEED)
        self._shape, self._compiled = shape, mode is not None
        self._model: Any = adapted(base, RANK, shape.targets, compiled=self._compiled, mode=mode or "default").train()
        self._learned = [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def stepper(self, case: Case) -> Callable[[int], int]:
        """One call is an optimizer step; returns its tokens."""
        torch._dynamo.reset()  # each batch shape has code of its own
        base = self._model.get_base_model()
        if case.recompute:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            base.gradient_checkpointing_disable()
        settings = training_settings(0, case.rows, case.length)
        fused = self._shape.device == "cuda"
        optimizer = torch.optim.AdamW(self._learned, lr=settings.learning_rate, weight_decay=0.0, fused=fused)
        loss_of, source = chunked_loss if self._compiled else plain_loss, batches(self._shape, case)

        def train(run: int) -> int:
            ids_BL = next(source)
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            optimizer_step(loss_of(self._model, ids_BL), optimizer)
            return ids_BL.numel()

        return train
