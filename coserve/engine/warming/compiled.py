"""Makes a rank ready to serve: compiles or loads the layers of steps and of training, captures graphs, and loads the
kernels outside of graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.types import DEFAULT_RANK
from coserve.engine.parts import EngineParts
from coserve.engine.spatial.training_stream import TrainingStream
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.part_runner import PartRunner
from coserve.engine.warmup.parts import WarmUpTask
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.execution.start import CompiledSteps
from coserve.memory.kv import KvCache
from coserve.model.agreement import FailedTogether
from coserve.model.parallel.lora import Strategy
from coserve.model.training.compiled_layers import CompiledLayers

FULLY_SHARDED = "training: with lora_sharding slora, layers of jobs without bd_blocks run without CUDA graphs"
EXPECTED = (FailedTogether, UnsupportedBase)
"""Errors that are logged by their message, without a traceback."""

log = logging.getLogger(__name__)

NOT_LOADED = "kernels could not be loaded ahead (see the log): the first step of each kind waits for them"


@dataclass(frozen=True)
class Compiled:
    """The executor of steps, and the layers of jobs."""

    executor: StepExecutor
    layers: CompiledLayers | None
    """Compiled layers of training; None: training runs operation by operation."""
    notes: tuple[str, ...]
    """Notes for the operator."""


def make_compiled(
    parts: EngineParts,
    kv: KvCache,
    task: WarmUpTask | None,
    training: TrainingStream | None = None,
    captured: Callable[[int, int], None] = lambda done, total: None,
) -> Compiled:
    """Make the executor and the training layers. Tensor-parallel ranks call this together. `task`: the warm-up that has
    compiled ahead; `training`: see `build_engine`; `captured` is called with the number of graphs captured and in
    total."""
    base, caches = parts.base, None if task is None else Caches(task)
    start = parts.make_start(kv, caches)
    layers, notes = make_training_layers(parts, caches, training)
    # Ranks that share a base would have to run the same steps, so they load kernels when they need them.
    runner = None if task is None or base.sharding is not None else PartRunner(base, parts.config, task)
    if runner is not None and (compiled := start.compiled) is not None:
        stream = torch.cuda.Stream(base.device)  # type: ignore[no-untyped-call]
        notes += _loaded("generation", partial(_run_steps, runner, compiled), torch.cuda.stream(stream))
    if start.graphs is not None:
        torch.cuda.empty_cache()
        _capture(start.graphs, captured)
    if runner is not None:  # last: the memory that it takes stays for the first slices
        notes += _loaded("training", runner.run_micro_batches, nullcontext() if training is None else training.enter())
    return Compiled(start.executor, layers, start.notes + notes)


def _run_steps(runner: PartRunner, compiled: CompiledSteps) -> None:
    runner.run_steps(lambda kv: compiled.executor(kv, capture=False))
    runner.run_steps(decodes=False)  # prompts that are scored run without compiled layers


def _loaded(what: str, run: Callable[[], None], stream: AbstractContextManager[object]) -> tuple[str, ...]:
    """Run one of each kind of work on its stream: a process loads a kernel at its first launch, and libraries create
    their handles. Returns a note for the operator if that failed."""
    began = time.monotonic()
    try:
        with stream:
            run()
            torch.cuda.current_stream().synchronize()
    except Exception:  # the first steps will load their kernels
        log.exception("the kernels of %s could not be loaded ahead", what)
        return (f"{what}: {NOT_LOADED}",)
    log.info("kernels of %s loaded in %.1f s", what, time.monotonic() - began)
    return ()


@torch.no_grad()
def _capture(graphs: GraphExecutor, captured: Callable[[int, int], None]) -> None:
    """Capture the graphs of steps without adapters, and with adapters of the default LoRA rank."""
    began, most = time.monotonic(), 1
    while graphs.prepare((DEFAULT_RANK,)):
        most = max(most, graphs.graphs_missing)
        captured(most - graphs.graphs_missing, most)
    log.info("graphs captured in %.1f s", time.monotonic() - began)


def make_training_layers(
    parts: EngineParts, caches: Caches | None, training: TrainingStream | None = None
) -> tuple[CompiledLayers | None, tuple[str, ...]]:
    """Return the training layers, compiled or loaded from the caches, and notes for the operator. Tensor-parallel ranks
    call this together, and all of them have layers or none has; an error on only one rank ends it."""
    base = parts.base
    if base.device.type == "cpu":
        return None, ()
    began = time.monotonic()
    try:
        layers = parts.training_layers(caches, nullcontext if training is None else training.enter)
        layers.compile()
    except Exception as error:  # a failing compiler may raise anything
        if base.sharding is not None and not isinstance(error, EXPECTED):
            raise
        return None, (_told("training: layers run operation by operation", error),)
    notes: tuple[str, ...] = (
        (FULLY_SHARDED,) if base.sharding is not None and base.sharding.strategy is Strategy.SLORA else ()
    )
    if layers.may_keep_less and caches is not None:
        notes += compile_levels(layers, caches)
    log.info("layers of training compiled in %.1f s", time.monotonic() - began)
    return layers, notes


def compile_levels(layers: CompiledLayers, caches: Caches) -> tuple[str, ...]:
    """Load the layers that keep fewer activations, if they were measured. Returns a note for the operator if there are
    none; jobs then run without them."""
    try:
        costs = caches.level_costs()
        if costs is None:
            raise UnsupportedBase("the warm-up could not compile or measure others")
        layers.compile_levels(costs)
    except Exception as error:  # noqa: BLE001 - as above
        return (_told("training: layers keep all or run their forward again", error),)
    finally:
        layers.forget_examples()
    return ()


def _told(what: str, error: Exception) -> str:
    note = f"{what}: {(str(error) or type(error).__name__).splitlines()[0]}"
    log.warning("%s", note, exc_info=None if isinstance(error, EXPECTED) else error)
    return note
