"""Executors of steps, as the engine makes them."""

from __future__ import annotations

from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import Capture, GraphExecutor
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from tests.support.lora_backends import GROUPED


def eager(base: Base, kv: KvCache, lora_backend: LoraBackend = GROUPED) -> EagerExecutor:
    return EagerExecutor(base, kv, lora_backend)


def graphs(
    fused: FusedBase,
    kv: KvCache,
    lora_backend: LoraBackend = GROUPED,
    capture: Capture = Capture.IN_STEPS,
    **sizes: int,
) -> GraphExecutor:
    """`sizes`: arguments of `GraphExecutor`. On CPU nothing is captured: the graphs' steps run as they are."""
    return GraphExecutor(fused, kv, eager(fused.base, kv, lora_backend), capture=capture, **sizes)
