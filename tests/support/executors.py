"""Executors of steps, as the engine makes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import Capture, GraphExecutor
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput, StepResult
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
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


INTERPRETER = threading.RLock()


class InTurn:
    """A step executor whose steps run while no other rank's do: Triton's interpreter is not for two threads."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> list[StepInFlight]:
        with INTERPRETER:
            return [StepInTurn(one) for one in self._executor.launch(step, adapters)]


@dataclass(frozen=True)
class StepInTurn:
    step: StepInFlight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def collect(self) -> StepResult:
        with INTERPRETER:
            return self.step.collect()
