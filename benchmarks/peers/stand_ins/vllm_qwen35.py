"""The text model of Qwen3.5 as a model of vLLM 0.26, which registers it only inside the wrapper with a vision tower.
Its layers and its states' shapes are vLLM's own."""

from __future__ import annotations

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

WRAPPER = Qwen3_5ForConditionalGeneration


class Qwen35Text(Qwen3_5ForCausalLM, IsHybrid):  # type: ignore[misc]  # vLLM is not installed where types are checked
    get_mamba_state_dtype_from_config = WRAPPER.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = WRAPPER.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = WRAPPER.get_mamba_state_copy_func
