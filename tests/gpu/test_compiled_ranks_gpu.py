"""Compiled training layers on two GPUs, over NCCL: without CUDA graphs and with them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from coserve.core.training.settings import TrainingSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import pack_jobs
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.lora.segments import Segments
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.lora import KeptLora, LoraBatch
from coserve.model.parallel.mesh import Mesh
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.finetuning import random_corpus
from tests.support.lora_backends import SEGMENTED
from tests.support.ranks import Ranks
from tests.support.sharded import Kind, save_base, whole_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CORPUS = random_corpus(lengths=(33, 20, 7, 40))
STEPS = 5
STRATEGIES = [("nfs", Kind(16)), ("nfs", Kind(16, blocks=2)), ("slora", Kind(16))]


class Learned(NamedTuple):
    losses: list[float]
    norms: list[float]
    calls: dict[str, int]
    """Collectives of the last step."""
    graphs: int
    """Bytes."""


def _train(mesh: Mesh, folder: str, strategy: str, kind: Kind, layers: str, dtype: str) -> Learned:
    """Steps on one batch. `layers`: the base's "own", "compiled", or "graphs" of those."""
    base = load_base(folder, device="cuda", dtype=dtype, mesh=mesh, strategy=strategy)
    compiled: CompiledLayers | None = None
    graphs: LayerGraphs | None = None
    if layers == "own":
        share_inputs(base)
    else:
        compiled = CompiledLayers(base, LayerCut(base))
        compiled.compile()
    if compiled is not None and layers == "graphs":
        stream = torch.cuda.Stream(base.device, priority=TRAINING_PRIORITY)
        graphs = LayerGraphs(compiled, lambda: GraphMemory(stream, mesh.traffic.held), ranks=True)
    runner = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs)
    whole = whole_adapter(base.spec, kind)
    settings = TrainingSettings(steps=STEPS, learning_rate=0.02)
    optimizer = AdapterOptimizer(
        whole, base.spec, settings, base.dtype, device=base.device, partition=base.partition(whole)
    )
    losses, norms, kept, calls = list[float](), list[float](), KeptLora(), dict[str, int]()
    tokens = sum(CORPUS.lengths)
    for _ in range(STEPS):
        rows = pack_jobs([corpus_batch(CORPUS, range(4))], base.device, runner.padded_size(int(tokens)))
        segments = Segments(rows.segment_bounds, (0,))
        lora = LoraBatch(segments, (optimizer.weights(),), SEGMENTED, kept=kept)
        mesh.traffic.clear()
        sums = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
        calls = dict(mesh.traffic.calls)
        losses.append(float(sums[0, 0]) / rows.targets)
        norms.append(optimizer.step(targets=rows.targets, learning_rate=settings.learning_rate))
    notes = () if graphs is None else graphs.notes
    assert not notes, notes
    return Learned(losses, norms, calls, 0 if graphs is None else graphs.bytes)


def _both(two: Ranks, folder: str, strategy: str, kind: Kind, layers: str, dtype: str = "float32") -> Learned:
    """Of rank 0; the other one learns the same."""
    first, other = two.run(_train, folder, strategy, kind, layers, dtype)
    assert (first.losses, first.norms, first.calls) == (other.losses, other.norms, other.calls)
    found: Learned = first
    return found


@pytest.mark.parametrize(("strategy", "kind"), STRATEGIES)
def test_compiled_layers_learn_and_send_what_the_layers_themselves_do(
    two: Ranks, tmp_path: Path, strategy: str, kind: Kind
) -> None:
    folder = save_base(tmp_path)
    expected, found = (_both(two, folder, strategy, kind, layers) for layers in ("own", "compiled"))
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert found.norms == pytest.approx(expected.norms, rel=2e-2)
    assert found.calls == expected.calls


@pytest.mark.parametrize(("strategy", "kind"), STRATEGIES[:2])
def test_graphs_of_compiled_layers_learn_the_same(two: Ranks, tmp_path: Path, strategy: str, kind: Kind) -> None:
    folder = save_base(tmp_path)
    # in 16 bits, as attention is one kernel there
    expected, found = (_both(two, folder, strategy, kind, layers, "bfloat16") for layers in ("compiled", "graphs"))
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.graphs > 0
    assert found.calls == expected.calls, "those of graphs count when they are launched"
