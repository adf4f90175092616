"""The settings of an engine as the conditions of its memory profile and of its warm-up."""

from __future__ import annotations

from coserve.config import Config
from coserve.core.gpu_memory import STEP_TOKENS
from coserve.finetune.memory_profiling import Conditions
from coserve.kernels.lora.backend import choose_backend
from coserve.memory.plan import Work
from coserve.model.base import Base


def conditions_of(config: Config, base: Base) -> Conditions:
    """Return how an engine with these settings runs. Raises `ConfigError`: see `choose_backend`."""
    step_tokens = config.step_tokens or STEP_TOKENS[base.device.type]
    return Conditions(
        lora_backend=choose_backend(config.lora_backend, base.device, base.dtype),
        recompute=config.recompute,
        max_running=config.batch_requests,
        page_tokens=config.page_tokens,
        work=Work(step_tokens, config.micro_batch_tokens, config.max_active_jobs),
        kv_cache_dtype=config.kv_cache_dtype,
    )
