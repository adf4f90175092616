"""Replaces eager steps by compiled ones while the engine serves, and reports the progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from coserve.engine.warming.client import WarmUpClient
from coserve.engine.warming.part_load import PartLoad, load_of_layers, load_of_levels
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.execution.start import COMPILING, Compilation
from coserve.generate.generator import Generator
from coserve.link import EngineWarming, FromEngine, Link, ToEngine
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.types import JobSpec
from coserve.warmup.parts import STEP_PARTS

log = logging.getLogger(__name__)


class PreloadKernels(Protocol):
    """Loads the kernels of the first steps over a base; the steps' executor is made by the function, or eager. Without `decodes`,
    of steps with prompts only. Returns a note for the operator where that failed, else nothing."""

    def __call__(
        self, base: Base, executor: Callable[[KvCache], StepExecutor | None] | None, *, decodes: bool = True
    ) -> str: ...


def preload_nothing(
    base: Base, executor: Callable[[KvCache], StepExecutor | None] | None, *, decodes: bool = True
) -> str:
    """Where there are no kernels on disk."""
    return ""


LOADING, CAPTURING = 10, 40
"""Units of progress for loading the compiled layers and for capturing graphs, as `warmup.parts.Part.weight`."""


async def report_progress(link: Link[FromEngine, ToEngine], warm: WarmUpClient) -> None:
    """Send the progress of a warm-up that the engine waits for before it is ready. Runs until cancelled."""
    began = time.monotonic()
    while True:
        await warm.next_progress()
        total = warm.total + LOADING + CAPTURING
        left = (time.monotonic() - began) * (total - warm.done) / warm.done if warm.done else None
        link.send(EngineWarming(warm.done, total, None if left is None else round(left, 1), warm.notes))


class Upgrade:
    """Implements `ports.Upgrades`: call `compile` on another thread, then `adopt` on the engine's."""

    def __init__(
        self,
        compilation: Compilation,
        generator: Generator,
        notes: tuple[str, ...],
        warm: WarmUpClient | None = None,
        *,
        training_layers: CompiledLayers | None = None,
        preload_kernels: PreloadKernels = preload_nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notes`: for the operator, on other subjects. `warm`: the warm-up's client; None if this process compiles everything.
        `training_layers`: those of jobs; None: jobs run the base's own. `preload_kernels`: called where `compile` and `preload_eager`
        are."""
        self._layers = None if training_layers is None else load_of_layers(training_layers, warm, clock)
        self._levels = None if training_layers is None else load_of_levels(training_layers, warm, clock)
        self._compilation, self._generator, self._notes, self._warm = compilation, generator, notes, warm
        self._preload_kernels, self._clock, self._began = preload_kernels, clock, clock()
        self._preload_note = ""
        self._executor: GraphExecutor | None = None
        self._graphs = 0
        """Most that were missing at once: those of a rank are known once it was asked for."""
        self.compiled = False
        """Whether `compile` was called."""
        self._layers_loaded = self._eager_loaded = False
        self._adopted: tuple[str, ...] | None = None
        """Notes on compiled steps; None before `adopt`."""

    async def ready(self) -> None:
        """Returns once the kernels that `compile` loads are on disk, or never will be."""
        if self._warm is not None:
            await self._warm.wait_for_parts(STEP_PARTS)  # steps without a graph need them too

    def may_train(self, spec: JobSpec) -> bool:
        """Whether the job's training kernels are on disk, or never will be, and its layers are compiled: all of a job runs the same."""
        if self._layers is not None and not self._layers.done:
            return False
        if self._warm is None:
            return True
        taught = spec.teacher is None or self._warm.training_kernels_ready(spec.teacher.rank)
        return taught and self._warm.training_kernels_ready(spec.lora.r, blocks=spec.lora.bd_blocks > 1)

    def notify(self, changed: Callable[[], None]) -> None:
        """`changed` is called when `progress` has changed outside of steps."""
        if self._warm is not None:
            self._warm.notify(changed)

    def load_layers(self) -> None:
        """Compile the layers, or load them from disk, on any thread. Later calls do nothing."""
        if not self._layers_loaded:
            self._layers_loaded, began = True, self._clock()
            self._compilation.compile()
            log.info("layers compiled in %.1f s", self._clock() - began)

    def compile(self) -> None:
        """`load_layers`, then load the kernels of steps, on the same thread. Later calls do nothing."""
        if self.compiled:
            return
        self.compiled = True
        self.load_layers()
        if self._warm is None and self._layers is not None:
            self._layers.load()  # what compiles anew, not from disk, would fail compiled steps of other threads
        began = self._clock()
        note = self._preload_kernels(self._compilation.shadow, self._compilation.preload_executor)
        self._preload_note = note or self._preload_note
        log.info("the layers' kernels loaded in %.1f s", self._clock() - began)
        self.preload_eager()

    def adopt(self) -> tuple[str, ...]:
        """Switch to compiled steps, between two steps. Returns all notes for the operator. Later calls change nothing."""
        if self._adopted is not None:
            return self.notes
        executor, self._adopted = self._compilation.executor()
        if executor is not None:
            self._generator.adopt(executor)
            self._executor, self._graphs = executor, executor.missing
        return self.notes

    def begin_compiled(self) -> None:
        """Before the engine serves: `compile`, `adopt`, and capture the graphs that most steps need. Beside steps captures take several
        times as long, and so do steps without a graph."""
        self.compile()
        self.adopt()
        if self._executor is not None:
            began = self._clock()
            self._executor.warm_up()
            log.info("graphs captured in %.1f s", self._clock() - began)

    @property
    def part_loads(self) -> tuple[PartLoad, ...]:
        """What is loaded for jobs, in this order, after `compile`."""
        return tuple(load for load in (self._layers, self._levels) if load is not None)

    def preload_eager(self) -> None:
        """Load the kernels of eager steps with prompts, which prompts that are scored need. Later calls do nothing. Beside steps that
        run it would take several times as long, and so would they."""
        if not self._eager_loaded:
            self._eager_loaded = True
            note = self._preload_kernels(self._compilation.shadow, None, decodes=False)
            self._preload_note = note or self._preload_note

    @property
    def notes(self) -> tuple[str, ...]:
        warm = () if self._warm is None else self._warm.notes
        failed = tuple(note for note in (self._preload_note, *(load.note for load in self.part_loads)) if note)
        return self._notes + ((COMPILING,) if self._adopted is None else self._adopted) + failed + warm

    def progress(self) -> EngineWarming:
        """Of the warm-up, of loading the layers, and of capturing graphs, in units."""
        done, total = (0, 0) if self._warm is None else (self._warm.done, self._warm.total)
        total += LOADING + CAPTURING
        if self._adopted is not None:
            missing = 0 if self._executor is None else self._executor.missing
            self._graphs = max(self._graphs, missing)
            done += LOADING + CAPTURING * (self._graphs - missing) // max(self._graphs, 1)
            if not missing and (self._warm is None or self._warm.ended):
                done = total
            done = min(done, total - 1) if missing else done
        spent = self._clock() - self._began
        return EngineWarming(
            done=done,
            total=total,
            seconds_left=0.0 if done == total else round(spent * (total - done) / done, 1) if done else None,
            notes=self.notes,
        )
