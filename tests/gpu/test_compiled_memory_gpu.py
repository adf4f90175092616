"""The memory of compiled layers on a GPU is what was predicted from a base of two layers, as a warm-up measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coserve.admission.micro_batch import ROWS, MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.shapes import lora_shapes
from coserve.core.gpu_memory import Kept, TrainingCosts
from coserve.core.types import LoraSettings
from coserve.engine.warming.layer_measurements import LayerTimer
from coserve.finetune.costs.training_costs import measure_levels
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.gpu.timing import CudaClock
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.lora_backends import SEGMENTED

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Measured:
    """A base of so many layers, and its compiled layers; with `levels` those that keep less, too."""

    base: Base
    layers: CompiledLayers
    profiler: MemoryProfiler


def measured(layers: int, *, levels: bool = False) -> Measured:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=7168,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=64000,
        max_position_embeddings=4096,
    )
    with torch.device(DEVICE):
        base = wrap_base(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), name="random")
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    if levels:
        compiled.compile_levels()
    conditions = Conditions(SEGMENTED, False, 4, 16, Work(64, 2048, 1))
    return Measured(base, compiled, MemoryProfiler(base, CudaMemoryMeter(DEVICE), conditions, compiled=compiled))


def level_costs(costs: TrainingCosts) -> TrainingCosts:
    """As a warm-up measures them."""
    small, clock = measured(2, levels=True), CudaClock()
    graphs = LayerGraphs(small.layers, lambda: GraphMemory(torch.cuda.Stream(DEVICE, priority=TRAINING_PRIORITY)))
    times = LayerTimer(small.base, small.layers, SEGMENTED, graphs, clock).times(2048)
    graphs.release()
    stays = {kept: small.layers.sites_kept(kept) for kept in (Kept.ATTENTION, Kept.INPUT)}
    return measure_levels(small.profiler.phases, costs, small.base.spec, stays, times, 2048)


def errors(found: Measured, costs: TrainingCosts, counts: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], float]:
    """Of predicted peaks, by rank, tokens, and numbers of layers that are computed again and again but for
    attention."""
    base, errors = found.base, {}
    for rank, targets in ((16, TARGETS), (64, ("q_proj", "v_proj")), (8, ("down_proj",))):
        lora = LoraSettings(r=rank, targets=targets)
        layers = lora_layers(costs, lora_shapes(lora, base.spec), base.spec.dtype, dropout=False)
        for tokens in (700, 2048, 4096):
            for recomputed, partly in counts:
                own = found.profiler.phases(tokens, recomputed=recomputed, partly=partly, targets=targets, rank=rank)
                batch = MicroBatchShape(tokens, own.positions, recomputed, partly)
                expected = micro_batch_bytes(costs, base.spec, layers, batch).peak - ROWS * tokens
                errors[rank, tokens, recomputed, partly] = round(expected / max(own.head, own.backward) - 1, 4)
    print(errors)
    return errors


def test_compiled_layers_take_what_a_smaller_base_predicts() -> None:
    costs = measured(2).profiler.costs(2048)
    found = errors(measured(10), costs, [(0, 0), (3, 0), (10, 0)])
    assert all(abs(error) < 0.03 for error in found.values()), found


def test_layers_that_keep_less_take_what_a_smaller_base_predicts() -> None:
    costs = level_costs(measured(2).profiler.costs(2048))
    attention, input = costs.levels[Kept.ATTENTION], costs.levels[Kept.INPUT]
    print(costs.time, attention, input)
    assert input.kept < attention.kept < 0.4 * costs.layer
    found = errors(measured(10, levels=True), costs, [(0, 0), (10, 0), (0, 10), (3, 4)])
    assert all(abs(error) < 0.03 for error in found.values()), found
