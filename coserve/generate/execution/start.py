"""Choice of the step executor: compiled layers and CUDA graphs on a GPU, otherwise eager steps.

Before the first request, layers are compiled, or loaded from the disk caches that `coserve.engine.warmup` fills.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.exc import TorchDynamoException

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import LORA_RANKS
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import DECODE_BATCHES, MIXED_TOKENS, PARTIAL_GROUPS
from coserve.generate.execution.interface import StepExecutor
from coserve.kernels.attention.expanded import EXPANDED_TOKENS
from coserve.kernels.lora.experts.interface import RemoteExperts
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.recurrent.chunked.long_runs import fits
from coserve.memory.graph_bytes import GraphBytes
from coserve.memory.kv import KvCache
from coserve.model.agreement import FailedTogether, on_all_ranks
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice

log = logging.getLogger(__name__)

COMPILED = (
    "generation: prompts whose log-probabilities are asked for are computed step by step, beside the others; steps of "
    f"more than {DECODE_BATCHES[-1]} sequences, of more than {MIXED_TOKENS[-1]} tokens or many short prompts, "
    f"with {EXPANDED_TOKENS} new tokens or more of a prompt over cached latents, and with an adapter of a rank above "
    f"{LORA_RANKS[-1]}, run without CUDA graphs; so do the first steps with prompts of a "
    f"size; where adapters change some sites only, the first {PARTIAL_GROUPS} such choices of sites have graphs of "
    "their own, others use those for more sites; block-diagonal adapters (BD-LoRA) are computed with their zeros"
)
NO_GEMMS = "generation: torch's own GEMM kernels run, as the warm-up could not measure which are faster"
UNCHUNKED = (
    "generation: prompts' recurrences are computed token by token, which is slower: chunks need a 16-bit base whose "
    "heads have 64 to 128 keys and at least 64 values"
)

LoadGemms = Callable[[Sequence[FrozenWeight], torch.device], GemmChoice | None]
"""Loads the choice of GEMM kernels measured earlier for these weights; None: there is none."""


@dataclass(frozen=True)
class CompiledSteps:
    """A base with compiled layers, and the settings of executors over it."""

    fused: FusedBase
    eager: EagerExecutor
    max_running: int
    step_tokens: int
    remote: RemoteExperts | None = None

    def executor(self, kv: KvCache, *, capture: bool, graph_bytes: GraphBytes | None = None) -> GraphExecutor:
        """Create an executor over `kv`, without any captured graphs; `capture`: it captures them by and by."""
        return GraphExecutor(
            self.fused,
            kv,
            self.eager,
            max_running=self.max_running,
            step_tokens=self.step_tokens,
            capture=capture,
            graph_bytes=graph_bytes,
            remote=self.remote,
        )


@dataclass(frozen=True)
class ExecutorStart:
    """The chosen executor, with notes on it."""

    executor: StepExecutor
    notes: tuple[str, ...] = ()
    """Notes for the operator."""
    graphs: GraphExecutor | None = None
    """The same executor if graphs are to be captured for it."""
    compiled: CompiledSteps | None = None


def make_start(
    base: Base,
    kv: KvCache,
    *,
    max_running: int,
    lora_backend: LoraBackend,
    compile: bool,
    step_tokens: int = MIXED_TOKENS[-1],
    gemms: LoadGemms | None = None,
    graph_bytes: GraphBytes | None = None,
    remote: RemoteExperts | None = None,
) -> ExecutorStart:
    """Compile the layers, check their logits, and return the executor. Tensor-parallel ranks call this together: all of
    them run compiled steps, or none does.

    `gemms`: None: the fastest GEMM kernels are measured now. `graph_bytes`: counts the memory of captures. `remote`:
    the LoRA servers, if there are any. Without a GPU, nothing is compiled.
    """
    eager = EagerExecutor(base, kv, lora_backend, remote)
    if base.device.type != "cuda":
        return ExecutorStart(eager)
    if why := _no_graphs(base, lora_backend, compile=compile, remote=remote):
        return ExecutorStart(eager, (f"generation: steps run one by one without CUDA graphs, as {why}",))
    fused = FusedBase(base, gemms=None if gemms is None else GemmChoice(), opaque_experts=remote is not None)
    choice = None if gemms is None else gemms(fused.stacked, base.device)
    fused.gemms = choice or fused.gemms
    if refusal := check_compiled(fused):
        return ExecutorStart(eager, (refusal,))
    compiled = CompiledSteps(fused, eager, max_running, step_tokens, remote)
    executor = compiled.executor(kv, capture=True, graph_bytes=graph_bytes)
    notes = [COMPILED, *[NO_GEMMS] * (gemms is not None and choice is None), *recurrence_notes(base)]
    return ExecutorStart(executor, tuple(notes), executor, compiled)


def recurrence_notes(base: Base) -> list[str]:
    """Return a note if a recurrence of this base is not computed in chunks."""
    recurrent = [shape for shape in base.states.values() if shape.keys]
    fit = all(fits(shape.keys, shape.values, base.dtype, base.device) for shape in recurrent)
    return [] if fit else [UNCHUNKED]


def _no_graphs(base: Base, lora_backend: LoraBackend, *, compile: bool, remote: RemoteExperts | None) -> str:
    """Return why steps cannot be captured; empty if they may be."""
    if not lora_backend.capturable:
        return f"the LoRA backend {lora_backend.name} cannot be captured"
    if not compile:
        return "compile is off"
    if base.spec.experts and base.dtype is not torch.bfloat16:
        return "products of experts wait for the host unless the base is bfloat16"
    if remote is not None and remote.recorded() is None:
        return "LoRA servers are reached through host memory"
    return ""


def check_compiled(fused: FusedBase) -> str:
    """Compile the layers and check their logits, on all ranks. Return the reason if they cannot run; empty if they
    can."""
    base = fused.base
    try:
        on_all_ranks(None if base.sharding is None else base.sharding.mesh, base.device, fused.check)
    except (TorchDynamoException, UnsupportedBase, RuntimeError, FailedTogether) as error:
        reason = str(error).splitlines()[0]
        refusal = f"generation: steps run one by one, as torch.compile refuses {base.spec.family}: {reason}"
        log.warning("%s", refusal, exc_info=error)
        return refusal
    return ""
