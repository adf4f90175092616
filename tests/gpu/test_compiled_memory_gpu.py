"""The memory of compiled layers on a GPU is what was predicted from a base of two layers, as a warm-up measures it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from coserve.admission.micro_batch import ROWS, MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.shapes import lora_shapes
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.types import LoraSettings
from tests.support.lora_backends import SEGMENTED

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def profiler(layers: int) -> tuple[Base, MemoryProfiler]:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=7168, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=64000, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device(DEVICE):
        base = wrap_base(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), name="random")
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    conditions = Conditions(SEGMENTED, False, 4, 16, Work(64, 2048, 1))
    return base, MemoryProfiler(base, CudaMemoryMeter(DEVICE), conditions, compiled=compiled)


def test_compiled_layers_take_what_a_smaller_base_predicts() -> None:
    costs = profiler(2)[1].costs(2048)
    base, measures = profiler(10)
    errors = {}
    for rank, targets in ((16, TARGETS), (64, ("q_proj", "v_proj")), (8, ("down_proj",))):
        lora = LoraSettings(r=rank, targets=targets)
        layers = lora_layers(costs, lora_shapes(lora, base.spec), base.spec.dtype, dropout=False)
        for tokens in (700, 2048, 4096):
            for recomputed in (0, 3, 10):
                found = measures.phases(tokens, recomputed=recomputed, targets=targets, rank=rank)
                batch = MicroBatchShape(tokens, found.positions, recomputed)
                expected = micro_batch_bytes(costs, base.spec, layers, batch).peak - ROWS * tokens
                errors[rank, tokens, recomputed] = round(expected / max(found.head, found.backward) - 1, 4)
    print(errors)
    assert all(abs(error) < 0.03 for error in errors.values()), errors
