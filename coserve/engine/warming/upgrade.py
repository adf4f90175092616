"""From eager steps to compiled ones, and how far the engine is on that way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coserve.engine.warming.beside import WarmUp
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.start import COMPILING, Compilation, giving_way
from coserve.generate.generator import Generator
from coserve.link import EngineWarming
from coserve.types import JobSpec
from coserve.warmup.parts import graphs

log = logging.getLogger(__name__)

LOADING, CAPTURING = 10, 40
"""Units of progress: loading the compiled layers, and capturing graphs; next to `warmup.parts.Part.weight`."""


class Upgrade:
    """Implements `ports.Upgrades`: `compile` on another thread, then `adopt` between two steps."""

    def __init__(
        self,
        compilation: Compilation,
        generator: Generator,
        notes: tuple[str, ...],
        warm: WarmUp | None = None,
        *,
        rehearse: Callable[[Compilation], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`notes`: what an operator should know of other things. `warm`: the warm-up that runs beside; None: all is compiled
        here. `rehearse`: loads what the first compiled steps will need, on the thread that compiles."""
        self._compilation, self._generator, self._notes, self._warm = compilation, generator, notes, warm
        self._rehearse, self._clock, self._began = rehearse, clock, clock()
        self._executor: GraphExecutor | None = None
        self._graphs = 0
        """To be captured, when the executor was adopted."""
        self._compiled = False
        self._adopted: tuple[str, ...] | None = None
        """Notes on compiled steps."""

    async def ready(self) -> None:
        """Returns once `compile` will find its kernels on disk, or never will."""
        if self._warm is not None:
            await self._warm.until((*graphs(0), *graphs(16)))  # steps without a graph need them too

    def may_train(self, spec: JobSpec) -> bool:
        """Whether a job would find its kernels on disk, or never will."""
        return self._warm is None or self._warm.trains(spec.lora.r)

    def notify(self, changed: Callable[[], None]) -> None:
        """`changed` is called when `progress` has changed outside of steps."""
        if self._warm is not None:
            self._warm.notify(changed)

    def compile(self) -> None:
        """Done once; later calls return at once."""
        if self._compiled:
            return
        self._compiled = True
        began = self._clock()
        self._compilation.compile()
        compiled = self._clock()
        with giving_way():
            self._rehearse(self._compilation)
        log.info(
            "layers compiled in %.1f s, their kernels loaded in %.1f s", compiled - began, self._clock() - compiled
        )

    def adopt(self) -> tuple[str, ...]:
        """From now on steps run compiled, if they can be; all notes for the operator."""
        executor, self._adopted = self._compilation.executor()
        if executor is not None:
            self._generator.adopt(executor)
            self._executor, self._graphs = executor, executor.missing
        return self.notes

    @property
    def notes(self) -> tuple[str, ...]:
        warm = () if self._warm is None else self._warm.notes
        return self._notes + ((COMPILING,) if self._adopted is None else self._adopted) + warm

    def progress(self) -> EngineWarming:
        """Units of the warm-up beside, of loading the layers, and of capturing graphs."""
        done, total = (0, 0) if self._warm is None else (self._warm.done, self._warm.total)
        total += LOADING + CAPTURING
        if self._adopted is not None:
            left = 0 if self._executor is None else self._executor.missing
            done += LOADING + CAPTURING * (self._graphs - min(left, self._graphs)) // max(self._graphs, 1)
            if not left and (self._warm is None or self._warm.ended):
                done = total
            done = min(done, total - 1) if left else done
        spent = self._clock() - self._began
        return EngineWarming(
            done=done,
            total=total,
            seconds_left=0.0 if done == total else round(spent * (total - done) / done, 1) if done else None,
            notes=self.notes,
        )
