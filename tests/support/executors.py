"""Executors of steps, as the engine makes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput, StepResult
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.lora_backends import GROUPED


def eager(base: Base, kv: KvCache, lora_backend: LoraBackend = GROUPED) -> EagerExecutor:
    return EagerExecutor(base, kv, lora_backend)


class PreparedExecutor(GraphExecutor):
    """Before each step, captures all graphs that are known to be missing, as the daemon does when it is idle: those of
    adapters that were read, and of past steps."""

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> list[StepInFlight]:
        self.warm_up(())
        return super().launch(step, adapters)


def graphs(
    fused: FusedBase,
    kv: KvCache,
    lora_backend: LoraBackend = GROUPED,
    *,
    prepared: bool = True,
    max_running: int,
    step_tokens: int = 256,
) -> GraphExecutor:
    """An executor whose every step of a size that graphs have runs as one, or, unless `prepared`, as the daemon's does.
    On CPU nothing is captured: the graphs' steps run as they are."""
    kind, plain = PreparedExecutor if prepared else GraphExecutor, eager(fused.base, kv, lora_backend)
    return kind(fused, kv, plain, max_running=max_running, step_tokens=step_tokens)


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
