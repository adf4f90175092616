"""How generation gets to full speed: compiled layers, before the first request where their kernels are on disk by then; then
graphs, one at a time, while requests are served.

Other processes compile the kernels, into caches on disk (`coserve.warmup`); without them all is compiled here. Layers are
compiled, or loaded from disk, on a thread of their own over a shadow of the base (`FusedBase.shadow`), which shares its
weights and nothing that a forward changes. Everything that touches the base itself happens on the engine's thread: the
stacking of weights before the first request, the first steps of the graph executor after compilation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch._dynamo.exc import TorchDynamoException

from coserve.errors import UnsupportedBase
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import DECODE_BATCHES, LORA_RANKS, MIXED_TOKENS, PARTIAL_FOOTPRINTS
from coserve.generate.execution.interface import StepExecutor
from coserve.gpu_memory import TrainingCosts
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.types import StackedWeights
from coserve.memory.graph_bytes import GraphBytes
from coserve.memory.kv import KvCache
from coserve.model.agreement import FailedTogether, on_all_ranks
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice
from coserve.parallel.mesh import Mesh

log = logging.getLogger(__name__)

COMPILING = "generation: steps run one by one until compilation ends"
COMPILED = (
    "generation: prompts whose log-probabilities are asked for are computed step by step, beside the others; steps of more "
    f"than {DECODE_BATCHES[-1]} sequences, of more than {MIXED_TOKENS[-1]} tokens or many short prompts, and with an adapter of a rank above "
    f"{LORA_RANKS[-1]}, run without CUDA graphs; so do the first steps with prompts of a size; where adapters change some sites only, "
    f"the first {PARTIAL_FOOTPRINTS} such choices of sites have graphs of their own, others use those for all sites; "
    "block-diagonal adapters (BD-LoRA) are computed with their zeros"
)
NO_GEMMS = "generation: torch's own GEMM kernels run, as the warm-up could not measure which are faster"
INDUCTOR = {"combo_kernels": True}
"""Options of torch.compile: small kernels that do not depend on each other run as one (rotary of q and of k)."""


class WarmKernels(Protocol):
    """What other processes have compiled and measured for this base."""

    def graph_kernels_ready(self, rank: int) -> bool:
        """Whether the kernels of graphs for adapters up to `rank` (0: none) are on disk, or will never be."""
        ...

    def layers_ready(self) -> bool:
        """Whether the compiled layers are on disk: they are loaded before the first request, and nothing is traced."""
        ...

    def training_layers_ready(self) -> bool:
        """Whether the compiled layers of training are on disk."""
        ...

    def layer_costs(self) -> TrainingCosts | None:
        """The memory that those take; None: it was not measured."""
        ...

    def level_costs(self) -> TrainingCosts | None:
        """That, with the memory and the times of layers that keep less, once they are on disk; None: they were not measured."""
        ...

    def gemms(self, stacked: Sequence[StackedWeights], device: torch.device) -> GemmChoice | None:
        """The measured choice; None: it is not there."""
        ...


class Compilation:
    """A base's layers on their way from plain to compiled."""

    def __init__(
        self,
        fused: FusedBase,
        kv: KvCache,
        eager: EagerExecutor,
        *,
        max_running: int,
        step_tokens: int = MIXED_TOKENS[-1],
        warm: WarmKernels | None = None,
        graph_bytes: GraphBytes | None = None,
    ) -> None:
        """`eager`: runs what graphs cannot (see `GraphExecutor`). `warm`: None if all is compiled here."""
        self._fused, self._shadow = fused, fused.shadow()
        self._kv, self._eager, self._max_running, self._step_tokens = kv, eager, max_running, step_tokens
        self._warm, self._graph_bytes = warm, graph_bytes
        self._refusal: str | None = None
        self._gemms_missing = False
        self._done = False

    def compile(self) -> None:
        """Compiles the layers and checks their logits. On any thread, beside whatever the base is used for. Ranks that share a base do this at
        the same time: all of them run compiled steps, or none does."""
        if self._warm is not None:
            choice = self._warm.gemms(self._fused.stacked, self._fused.base.device)
            self._fused.gemms = self._shadow.gemms = choice or GemmChoice()
            self._gemms_missing = choice is None
        base = self._fused.base
        try:
            on_all_ranks(_mesh(base), base.device, self._shadow.check)
        except (TorchDynamoException, UnsupportedBase, RuntimeError, FailedTogether) as error:
            self._refusal = _refusal(base, error)
            log.warning("%s", self._refusal, exc_info=error)
        self._done = True

    @property
    def shadow(self) -> Base:
        """The base with modules of its own, for forwards on other threads than the engine's."""
        return self._shadow.base

    def preload_executor(self, kv: KvCache) -> GraphExecutor | None:
        """After `compile`, while no other thread uses the shadow: an executor over modules of its own and over `kv`, to load kernels from disk before
        the engine's steps need them. None: steps stay eager."""
        if self._refusal is not None:
            return None
        return GraphExecutor(
            self._shadow,
            kv,
            self._eager,
            max_running=self._max_running,
            step_tokens=self._step_tokens,
            on_disk=lambda _: False,
        )

    def executor(self) -> tuple[GraphExecutor | None, tuple[str, ...]]:
        """After `compile`, on the engine's thread: what runs steps from now on (None: they stay eager), and notes for the
        operator."""
        assert self._done, "expected compilation to have ended"
        if self._refusal is not None:
            return None, (self._refusal,)
        executor = GraphExecutor(
            self._fused,
            self._kv,
            self._eager,
            max_running=self._max_running,
            step_tokens=self._step_tokens,
            on_disk=None if self._warm is None else self._warm.graph_kernels_ready,
            graph_bytes=self._graph_bytes,
        )
        return executor, (COMPILED, *((NO_GEMMS,) if self._gemms_missing else ()))


@dataclass(frozen=True)
class ExecutorStart:
    """How steps run at first."""

    executor: StepExecutor
    notes: tuple[str, ...]
    """For the operator."""
    compilation: Compilation | None = None
    """To be done while requests are served."""


def make_start(
    base: Base,
    kv: KvCache,
    *,
    max_running: int,
    lora_backend: LoraBackend,
    when: str,
    step_tokens: int = MIXED_TOKENS[-1],
    warm: WarmKernels | None = None,
    graph_bytes: GraphBytes | None = None,
) -> ExecutorStart:
    """`when` layers are compiled: in the `background`, `before` the first request (with all graphs captured), or `off`.

    `graph_bytes`: counts what captures take. `warm`: what is loaded from disk; None: the fastest GEMM kernels are measured now. Nothing is compiled where there is no GPU.
    """
    eager = EagerExecutor(base, kv, lora_backend)
    if base.device.type != "cuda":
        return ExecutorStart(eager, ())
    if not lora_backend.capturable:
        why = f"the LoRA backend {lora_backend.name} cannot be captured"
        return ExecutorStart(eager, (f"generation: steps run one by one without CUDA graphs, as {why}",))
    if when == "off":
        return ExecutorStart(eager, ("generation: steps run one by one without CUDA graphs, as compile is off",))
    ready = warm is not None and warm.layers_ready()
    try:
        on_all_ranks(_mesh(base), base.device, lambda: None if ready else wake_compiler(base.device))
    except (TorchDynamoException, FailedTogether) as error:
        return ExecutorStart(eager, (_refusal(base, error),))
    fused = FusedBase(base, options=INDUCTOR, gemms=None if warm is None else GemmChoice())
    compilation = Compilation(
        fused, kv, eager, max_running=max_running, step_tokens=step_tokens, warm=warm, graph_bytes=graph_bytes
    )
    if when == "background":
        return ExecutorStart(eager, (COMPILING,), compilation)
    compilation.compile()
    executor, notes = compilation.executor()
    if executor is not None:
        executor.warm_up()
    return ExecutorStart(executor or eager, notes)


def _mesh(base: Base) -> Mesh | None:
    return None if base.sharding is None else base.sharding.mesh


def _refusal(base: Base, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    return f"generation: steps run one by one, as torch.compile refuses {base.spec.family}: {reason}"


@cache
def wake_compiler(device: torch.device) -> None:
    """Imports the compiler and lets it make what it makes once a process. On any thread; later calls do nothing.

    While inductor traces, it patches `nn.Module.__call__` for all threads. Its tracers let modules of others through,
    but for one, which fails them: that of an empty graph that it makes once (`loop_body._dummy_gm`).
    """
    uncached = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with uncached[0], uncached[1]:  # what is in a cache would not be traced
        torch.compile(_halved)(torch.zeros(64, device=device))


def _halved(x: torch.Tensor) -> torch.Tensor:
    return (x / 2).sum()
