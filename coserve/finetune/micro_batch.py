"""Forward and backward of one micro-batch, suspended after every decoder layer.

Layers run one by one, forward and backward (`finetune.layers`). Gradients of the base weights (`M_backward` of full
fine-tuning, ETS paper section 4.2) are never computed. With `recompute`, only the layers' inputs are kept between
forward and backward (activation checkpointing).

With a teacher (an adapter on the same base), the loss is the divergence from its distributions instead of the NLL of
the rows' tokens (distillation). The base then runs twice: first with the teacher's LoRA terms and without gradients.
With a DPO or KTO loss it first runs the reference (an adapter, or none), without gradients, and keeps the likelihoods.

The generators below yield after each micro-step. While suspended they hold no context (gradient mode, LoRA batch), so
inference may run in between.

Letters: T packed tokens, D hidden, L layers, J jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.admission.micro_batch import TEACHER_SHARE
from coserve.core.gpu_memory import Kept
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import DpoLoss, KtoLoss
from coserve.data.corpus.batch import Batch
from coserve.data.documents.encoder import memory_ids
from coserve.finetune.encoder import encoded_positions
from coserve.finetune.ends import EndPass
from coserve.finetune.layers.compiled import CompiledLayerPass, levels_of, takes
from coserve.finetune.layers.eager import EagerLayerPass
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.layers.interface import LayerPass, LayerTensors
from coserve.finetune.losses import chunked
from coserve.finetune.losses.loss import NLL, Loss
from coserve.finetune.memory_limits import AS_CONFIGURED, StepRecompute
from coserve.finetune.packed_rows import EmbeddingNoise, PackedRows, add_noise
from coserve.kernels.attention.interface import Attention
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.attention.prefixed import EncodedAttention, PrefixedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.files.cartridge import FROZEN
from coserve.model.base import Base
from coserve.model.dropout import DropoutSpec
from coserve.model.forward_context import ForwardContext
from coserve.model.layers import LayerCut, LayerInputs
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers

LOGITS_BYTES = 128 << 20
"""Bytes of the logits computed at once, in the base's dtype. A micro-step of the head then takes about as long as one
of a layer, and fits between the tokens of requests (512 targets of 128,256 tokens; larger chunks are no faster). The
logits become their own gradient, so there is no second tensor of their size."""
TILE = 128
"""Rows of a GEMM tile: larger chunks of targets are a multiple of it."""

MicroSteps = Generator[MicroStep, None, Tensor]
"""Yields, after each micro-step but the last, the kind of the next one. The first one is a `MicroStep.BEGIN`."""


@dataclass(frozen=True)
class MicroBatch:
    """A session's request to compute rows with its adapter."""

    batch: Batch
    loss: Loss
    weights: LoraWeights
    trainable: LayerTensors
    grads: LayerTensors
    """`trainable`, `grads`: see `MicroBatchRunner.forward_backward`."""
    how: StepRecompute
    learns: bool
    """Forward and backward; False: an evaluation."""
    prepare: Callable[[], None] = lambda: None
    """Called in its first micro-step: completes what forwards read of the adapter."""
    dropout: DropoutSpec | None = None
    noise: EmbeddingNoise | None = None


class MicroBatchRunner:
    """Runs micro-batches of any adapters through one frozen base."""

    def __init__(
        self,
        base: Base,
        *,
        recompute: bool,
        logits_bytes: int = LOGITS_BYTES,
        attention: Callable[[Sequence[int]], Attention] = PackedAttention,
        compiled: CompiledLayers | None = None,
        graphs: LayerGraphs | None = None,
    ) -> None:
        """`attention`: makes the attention of packed rows from their bounds. `compiled`: layers that replace the base's
        own for batches they support, once they are compiled; `graphs`: their CUDA graphs. Raises `UnsupportedBase` for
        a base that cannot run layer by layer."""
        assert not any(parameter.requires_grad for parameter in base.model.parameters()), "the base must be frozen"
        self._base, self._cut, self._recompute = base, LayerCut(base) if compiled is None else compiled.cut, recompute
        self._attention, self._compiled, self._graphs = attention, compiled, graphs
        at_once = max(16, logits_bytes // (base.spec.vocab * base.dtype.itemsize))
        self.targets_at_once = at_once - at_once % TILE if at_once > TILE else at_once
        """Target positions whose logits are computed at once, without a teacher."""

    def padded_size(self, tokens: int) -> int:
        """Tokens of a training batch after padding for graphs."""
        return tokens if self._graphs is None else self._graphs.padded_size(tokens)

    def forward_backward(
        self,
        rows: PackedRows,
        lora: LoraBatch,
        trainable: LayerTensors,
        grads: LayerTensors,
        loss: Loss = NLL,
        how: StepRecompute = AS_CONFIGURED,
        noises: Sequence[EmbeddingNoise | None] = (),
    ) -> MicroSteps:
        """Add the gradient of each job's summed loss to `grads`. Returns each job's sums (fp64, (J, 2)): the loss in
        nats, and how many targets are predicted correctly (`losses.formulas.negative_log_likelihood_`).

        A `loss` other than the NLL is of one job only. A preference loss has the sums of `losses.chunked.Preference`;
        with one of tokens, log-probabilities follow the sums (`losses.chunked.TokenFunction`).

        `trainable[i]`: tensors of `lora` at layer i's sites, of all jobs, requiring gradients. `grads`: fp32, same
        shapes; the pairs' `MainGrads` if they have any. The sums are not divided by the number of targets, so
        micro-batches of one optimizer step add up.

        `how`: counts layers from the lowest trained one up. All layers keep only their input with the runner's
        `recompute`, or if the memory was planned for compiled layers that cannot run the batch. `noises`: each job's
        noise (J) on the input of the first layer, not applied to teacher or DPO reference; empty: no noise.
        """
        ends = EndPass(self._base, self._cut, lora, learns=True)
        layers, first = len(trainable), next(i for i, tensors in enumerate(trainable) if tensors)
        first = 0 if ends.embedding_learns else first
        inputs = self._embed(rows, lora)
        recomputed = layers if self._recompute else how.recomputed
        levels = levels_of(layers, first, recomputed, how.partly)
        result = yield from self._chunked(loss, rows, inputs, lora.backend, levels, MicroStep.FORWARD)
        inputs = ends.enter(inputs)
        if any(noises):
            add_noise(inputs.h_1TD, rows, noises)
        context, h_1TD = self._context(lora), inputs.h_1TD
        one = None if ends.embedding_learns else self._compiled_pass(inputs, context, first, levels, learns=True)
        if one is None:
            if self._graphs is not None:
                self._graphs.yield_memory()
            keep_from = layers if how.compiled else first + recomputed + how.partly
            bottom = -1 if ends.embedding_learns else first  # layer 0 then has a gradient of its input
            one = EagerLayerPass(self._cut, inputs, context, trainable, grads, bottom, keep_from)
        for i in range(layers):
            h_1TD = one.forward(i, h_1TD)
            yield MicroStep.FORWARD if i + 1 < layers else MicroStep.HEAD
        gradient_1TD = torch.zeros_like(h_1TD)
        chunks = self._target_chunks(rows, result, ends)
        for number, chunk in enumerate(chunks, start=1):
            self._head(h_1TD, inputs, chunk, result, gradient_1TD, ends)
            yield MicroStep.HEAD if number < len(chunks) else MicroStep.BACKWARD
        sums_J = result.finish(gradient_1TD)
        for i in reversed(range(first, layers)):
            gradient_1TD = one.backward(i, gradient_1TD)
            if i > first:
                yield MicroStep.BACKWARD
        ends.backward(gradient_1TD)
        return sums_J

    def evaluate(self, rows: PackedRows, lora: LoraBatch, loss: Loss = NLL) -> MicroSteps:
        """Return what `forward_backward` returns, without gradients."""
        inputs, levels = self._embed(rows, lora), (Kept.ALL,) * len(self._base.layers)
        result = yield from self._chunked(loss, rows, inputs, lora.backend, levels, MicroStep.EVALUATE)
        ends = EndPass(self._base, self._cut, lora, learns=False)
        h_1TD = yield from self._hidden(inputs, lora, levels, MicroStep.EVALUATE_HEAD, in_pool=True)
        for number, chunk in enumerate(self._target_chunks(rows, result, ends)):
            if number:
                yield MicroStep.EVALUATE_HEAD
            self._head(h_1TD, inputs, chunk, result, None, ends)
        return result.finish(None)

    def _chunked(
        self,
        loss: Loss,
        rows: PackedRows,
        inputs: LayerInputs,
        backend: LoraBackend,
        levels: Sequence[Kept],
        then: MicroStep,
    ) -> Generator[MicroStep, None, chunked.ChunkedLoss]:
        """Return the loss, after the teacher's or reference's forward if it needs one. `levels`: recompute levels of
        the trained adapter's forward; the other forward uses the same, so that rounding is equal and equal weights give
        equal likelihoods. `then`: kind of the micro-step that follows."""
        shard = None if self._base.sharding is None else self._base.sharding.vocabulary
        teacher, reference = (
            None if weights is None else LoraBatch(rows.segments, (weights,), backend)
            for weights in (loss.teacher, loss.reference)
        )
        if teacher is not None:
            taught_1TD = yield from self._hidden(inputs, teacher, levels, then, in_pool=False)
            own = EndPass(self._base, self._cut, teacher, learns=False)

            def taught(chunk: chunked.TargetChunk) -> Tensor:
                with torch.no_grad():
                    return own.head(taught_1TD[:, chunk.keep_K], inputs, chunk.keep_K)

            return chunked.Divergence(rows, taught, shard)
        likelihoods_Q2: Tensor | None = None
        if isinstance(loss.preference, DpoLoss | KtoLoss):
            h_1TD = yield from self._hidden(inputs, reference, levels, MicroStep.EVALUATE_HEAD, in_pool=True)
            likelihood = chunked.Likelihood(rows, rows.sequence_targets, shard)
            own = EndPass(self._base, self._cut, reference, learns=False)
            chunks = self._target_chunks(rows, likelihood, own)
            for number, chunk in enumerate(chunks, start=1):
                self._head(h_1TD, inputs, chunk, likelihood, None, own)
                yield MicroStep.EVALUATE_HEAD if number < len(chunks) else then
            likelihoods_Q2 = likelihood.finish(None)
        if loss.preference is not None:
            return chunked.Preference(rows, likelihoods_Q2, loss.preference, shard)
        if loss.tokens is not None:
            return (chunked.SoftTargets if rows.labels_K.ndim > 1 else chunked.TokenFunction)(rows, loss.tokens, shard)
        return chunked.Likelihood(rows, rows.job_targets, shard)

    def _hidden(
        self, inputs: LayerInputs, lora: LoraBatch | None, levels: Sequence[Kept], then: MicroStep, *, in_pool: bool
    ) -> MicroSteps:
        """Return the last layer's output (1, T, D), without gradients. `levels`: recompute levels whose forwards run;
        what they would keep is freed after each layer. `then`: kind of the micro-step that follows. `in_pool`: the
        output may lie in the graphs' memory pool, because it is not needed when graphs run again."""
        inputs = EndPass(self._base, self._cut, lora, learns=False).enter(inputs)
        h_1TD, context, layers = inputs.h_1TD, self._context(lora), len(self._base.layers)
        one = self._compiled_pass(inputs, context, layers, levels, learns=False)
        if one is not None and in_pool and self._graphs is not None:
            one = self._graphs.in_pool(one)
        one = one or EagerLayerPass(self._cut, inputs, context, (), (), layers, layers)
        for i in range(layers):
            h_1TD = one.forward(i, h_1TD)
            yield MicroStep.EVALUATE if i + 1 < layers else then
        return h_1TD

    def _compiled_pass(
        self, inputs: LayerInputs, context: ForwardContext, first: int, levels: Sequence[Kept], *, learns: bool
    ) -> LayerPass | None:
        """Return a pass of compiled layers, with graphs if possible; None: the base's own layers run."""
        if self._compiled is None or isinstance(inputs.attention, PrefixedAttention | EncodedAttention):
            return None
        if not takes(context, learns=learns):
            return None
        if learns and self._graphs is not None and context.lora is not None:
            graphed = self._graphs.begin(inputs, context.lora, first, levels)
            if graphed is not None:
                return graphed
        found = self._compiled.begin(inputs, context.lora)
        if found is None:
            return None
        one = CompiledLayerPass(found, first, levels)
        return self._graphs.in_pool(one) if learns and self._graphs is not None else one

    def _embed(self, rows: PackedRows, lora: LoraBatch) -> LayerInputs:
        prefix = lora.adapters[0].prefix
        if rows.encoded:
            memory = len(memory_ids(lora.adapters[0].settings))
            attention = EncodedAttention(rows.bounds, rows.encoded, memory)
            return self._cut.embed(rows.tokens_T, encoded_positions(rows, memory), attention)
        if not prefix:
            return self._cut.embed(rows.tokens_T, rows.positions_T, self._attention(rows.bounds))
        assert len(lora.adapters) == 1, "expected a cartridge to train alone"
        after = PrefixedAttention(rows.bounds, prefix, FROZEN)
        return self._cut.embed(rows.tokens_T, rows.positions_T + prefix[0].a_RD.shape[0], after)

    def _context(self, lora: LoraBatch | None) -> ForwardContext:
        """Return the forward context of a LoRA batch. A cartridge has no LoRA terms: only the attention reads it."""
        return self._base.prepare(None if lora is not None and lora.adapters[0].settings.cartridge else lora)

    def _target_chunks(self, rows: PackedRows, loss: chunked.ChunkedLoss, ends: EndPass) -> list[chunked.TargetChunk]:
        # smaller chunks: a second tensor of logits (teacher, gathered shards, a changed head) is alive at the same time
        wide = isinstance(loss, chunked.Divergence | chunked.SoftTargets) or ends.changes
        return chunked.target_chunks(
            rows, max(4, self.targets_at_once // TEACHER_SHARE) if wide else self.targets_at_once
        )

    def _head(
        self,
        h_1TD: Tensor,
        inputs: LayerInputs,
        chunk: chunked.TargetChunk,
        loss: chunked.ChunkedLoss,
        gradient_1TD: Tensor | None,
        ends: EndPass,
    ) -> None:
        """Add a chunk's targets to the loss, and write their gradient into `gradient_1TD` unless that is None."""
        leaf_1KD = h_1TD[:, chunk.keep_K].detach().requires_grad_(gradient_1TD is not None)
        with torch.set_grad_enabled(gradient_1TD is not None):
            logits = ends.head(leaf_1KD, inputs, chunk.keep_K)
        own = logits.detach()
        if self._cut.reads_logits:
            own = own.clone()
        loss.add(own, chunk)
        if gradient_1TD is not None:
            gradient_1TD[:, chunk.keep_K] = ends.head_backward(logits, leaf_1KD, own)


def run_to_end(micro_steps: MicroSteps, between: Callable[[], None] | None = None) -> Tensor:
    """Run all micro-steps and return their result; `between` is called after each but the last."""
    while True:
        try:
            next(micro_steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result
        if between is not None:
            between()
