"""Loads of what a warm-up compiles for jobs, one part after another, while the engine serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum, auto

from coserve.engine.warming.client import WarmUpClient
from coserve.engine.warming.training_layers import first_line, training_note
from coserve.errors import UnsupportedBase
from coserve.model.faults import out_of_memory
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.warmup.parts import TRAINING_LAYERS, TRAINING_LEVELS

log = logging.getLogger(__name__)

NO_MEMORY_YET = "training: jobs wait until the warm-up has ended, as it leaves no memory to load their layers"


class _State(Enum):
    NOT_DONE = auto()
    FOUND_NO_MEMORY = auto()
    """Beside the warm-up: it is tried once more."""
    DONE = auto()
    """Or failed for good."""


class PartLoad:
    """Implements `ports.LoadsPart`. Where a load finds no memory beside the warm-up, which takes some, it is not done: the next one, after
    `ready`, is."""

    def __init__(
        self,
        part: str,
        load: Callable[[], None],
        warm: WarmUpClient | None,
        failed: Callable[[Exception], str],
        *,
        waits: str = "",
        free: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`part`: of the warm-up `warm`; None: there is nothing to wait for. `failed`: a note for the operator on why it was not loaded; `waits`:
        that note until it is tried again, if it is another. `free`: called once it is done."""
        self._part, self._load, self._warm, self._clock = part, load, warm, clock
        self._failed, self._waits, self._free = failed, waits, free
        self._state = _State.NOT_DONE
        self.note = ""
        """For the operator, if it was not loaded."""

    @property
    def done(self) -> bool:
        """It was loaded, or never will be."""
        return self._state is _State.DONE

    async def ready(self) -> None:
        """Returns once the part is on disk, or never will be; where there was no memory, once the warm-up has ended."""
        if self._warm is None or self.done:
            return
        await self._warm.wait_for_parts((self._part,))
        if self._state is _State.FOUND_NO_MEMORY:
            await self._warm.wait_until_ended()

    def load(self) -> None:
        """On any thread. Calls after it is done do nothing."""
        if self.done:
            return
        beside_warm_up, began = self._warm is not None and not self._warm.ended, self._clock()
        state, note = _State.DONE, ""
        try:
            self._load()
        except Exception as error:  # whatever a compiler raises that does not work
            note = self._failed(error)
            if beside_warm_up and out_of_memory(error):
                state, note = _State.FOUND_NO_MEMORY, self._waits or note
            log.warning("%s", note, exc_info=None if isinstance(error, UnsupportedBase) else error)
        self.note, self._state = note, state  # not before: a job must not start while its layers are loaded
        log.info("loading %s took %.1f s", self._part, self._clock() - began)
        if self.done:
            self._free()


def load_of_layers(layers: CompiledLayers, warm: WarmUpClient | None, clock: Callable[[], float]) -> PartLoad:
    """Compiles the layers of training, or loads them from disk. Jobs wait for it."""

    def load() -> None:
        if warm is not None and not warm.training_layers_ready():  # compiling them here would fail compiled steps
            raise UnsupportedBase("the warm-up could not compile them")
        layers.compile()

    return PartLoad(TRAINING_LAYERS, load, warm, training_note, waits=NO_MEMORY_YET, clock=clock)


def load_of_levels(layers: CompiledLayers, warm: WarmUpClient | None, clock: Callable[[], float]) -> PartLoad:
    """Loads the layers of training that keep less from disk, after the others. Jobs go on without them: layers keep all, or run their
    forward again."""

    def load() -> None:
        if warm is None or not (layers.ready and layers.may_keep_less):
            return
        costs = warm.level_costs() if warm.complete((TRAINING_LEVELS,)) else None
        if costs is None:  # compiling them here would fail compiled steps
            raise UnsupportedBase("the warm-up could not compile or measure others")
        layers.compile_levels(costs)

    return PartLoad(TRAINING_LEVELS, load, warm, _levels_note, free=layers.forget_examples, clock=clock)


def _levels_note(why: Exception) -> str:
    return f"training: layers keep all or run their forward again: {first_line(why)}"
