"""Layers that run as CUDA graphs, against the same compiled layers without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.init import new_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_jobs
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.families import tiny_family
from tests.support.finetuning import random_corpus
from tests.support.lora_backends import SEGMENTED
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

CORPUS = random_corpus(lengths=(90, 33, 7, 64, 120, 61))
DEVICE = torch.device("cuda", 0)


def optimizer(base: Base, rank: int, seed: int) -> AdapterOptimizer:
    start = new_adapter(LoraSettings(r=rank), base.spec, seed=seed, dtype=torch.float32, device="cuda")
    for pair in start.sites.values():
        pair.b_OR.normal_(std=0.05, generator=torch.Generator("cuda").manual_seed(seed))
    return AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype)


def gradients(
    runner: MicroBatchRunner,
    jobs: Sequence[tuple[AdapterOptimizer, Sequence[int]]],
    *,
    recomputed: int = 0,
    partly: int = 0,
) -> list[Tensor]:
    """The sums, and the gradients that this batch adds."""
    for own, _ in jobs:
        own.zero_grad()
    tokens = sum(len(part) for _, rows in jobs for row in rows for part, _ in CORPUS.sequences(row))
    packed = pack_jobs([corpus_batch(CORPUS, rows) for _, rows in jobs], DEVICE, runner.padded_size(tokens))
    segments = Segments(packed.segment_bounds, tuple(range(len(jobs))))
    lora = LoraBatch(segments, tuple(own.weights() for own, _ in jobs), SEGMENTED)
    trainable, grads = (
        [[tensor for each in layer for tensor in each] for layer in zip(*by_job, strict=True)]
        for by_job in ([own.trainable for own, _ in jobs], [own.grads for own, _ in jobs])
    )
    steps = runner.forward_backward(packed, lora, trainable, grads, how=StepRecompute(recomputed, partly))
    sums = run_to_end(steps)
    return [sums.clone(), *(each.clone() for layer in grads for each in layer)]


@pytest.mark.parametrize(
    ("levels", "recomputed", "partly"),
    [(False, 0, 0), (False, 1, 0), (False, 2, 0), (True, 2, 0), (True, 0, 2), (True, 1, 1)],
)
def test_gradients_are_those_without_graphs(levels: bool, recomputed: int, partly: int) -> None:
    """Rows of several lengths, of two adapters in turn and together, in one shape each; what layers keep changes
    rounding alone. `levels`: layers that keep less are compiled so."""
    base = wrap_base(tiny_model("llama").to(DEVICE, torch.bfloat16), name="llama")
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    if levels:
        compiled.compile_levels()
    graphs = LayerGraphs(compiled, lambda: GraphMemory(torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY)))
    plain = MicroBatchRunner(base, recompute=False, compiled=compiled)
    graphed = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs)
    a, b = optimizer(base, 16, 1), optimizer(base, 16, 2)
    batches = [[(a, (0,))], [(b, (4,))], [(a, (3, 2))], [(b, (0, 1))], [(a, (4,))]]
    batches += [[(a, (0,)), (b, (1, 2))], [(b, (3,)), (a, (5,))], [(a, (2, 3)), (b, (5,))]]
    for batch in batches:
        counts = {"recomputed": recomputed, "partly": partly}
        expected, found = (gradients(runner, batch, **counts) for runner in (plain, graphed))
        for own, right in zip(found, gradients(plain, batch), strict=True):
            assert float((own - right).norm() / right.norm().clamp_min(1e-6)) < 0.05, "what is kept makes rounding"
        for own, right in zip(found, expected, strict=True):
            assert float((own - right).norm() / right.norm().clamp_min(1e-6)) < 0.02
    assert not graphs.notes and graphs.bytes > 0
    assert graphs.release() and graphs.bytes == 0


@pytest.mark.filterwarnings("ignore")
def test_layers_with_a_recurrent_state_have_graphs() -> None:
    """Rows longer than a chunk of the recurrence and shorter, and other numbers of rows, by the same graphs."""
    options = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    base = wrap_base(tiny_family("qwen3_5_text", **options).to(DEVICE, torch.bfloat16), name="qwen3_5_text")
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    graphs = LayerGraphs(compiled, lambda: GraphMemory(torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY)))
    plain, own = MicroBatchRunner(base, recompute=False, compiled=compiled), optimizer(base, 16, 1)
    graphed = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs)
    for rows in ((4,), (0, 1), (3, 5), (0, 1), (4,)):
        expected, found = (gradients(runner, [(own, rows)]) for runner in (plain, graphed))
        for one, right in zip(found, expected, strict=True):
            assert float((one - right).norm() / right.norm().clamp_min(1e-6)) < 0.02
    assert not graphs.notes and graphs.bytes > 0


def test_attention_that_runs_sequence_by_sequence_has_no_graphs() -> None:
    base = wrap_base(tiny_model("gemma2").to(DEVICE, torch.bfloat16), name="gemma2")
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    graphs = LayerGraphs(compiled, lambda: GraphMemory(torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY)))
    runner, own = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs), optimizer(base, 16, 1)
    first, *others = (gradients(runner, [(own, (0, 1))]) for _ in range(4))
    for other in others:
        for one, right in zip(other, first, strict=True):
            assert float((one - right).norm() / right.norm().clamp_min(1e-6)) < 0.02
    assert "sequence by sequence" in graphs.notes[0]
