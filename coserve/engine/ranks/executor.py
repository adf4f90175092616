"""Steps on all ranks: rank 0 sends a step's input to the followers, then runs it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.errors import EngineFault
from coserve.core.types import AdapterRef
from coserve.engine.ranks.commands import Choose, DropAdapter, Forget, Prepare
from coserve.engine.ranks.followers import Followers
from coserve.engine.ranks.page_tables import PageTables
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput, StepResult
from coserve.generate.sampling.sampler import Masks
from coserve.model.lora import LoraWeights

FAILED = "a step failed on rank 0, and the other ranks may have run it"


@dataclass(frozen=True)
class RankedStep:
    """Implements `StepInFlight`."""

    local: StepInFlight
    followers: Followers

    @property
    def sequences(self) -> Sequence[int]:
        return self.local.sequences

    @property
    def overlaps(self) -> bool:
        return self.local.overlaps

    def collect(self) -> StepResult:
        """See `StepInFlight`. Raises only `EngineFault`: after a step that failed here, the ranks' collectives would no
        longer match."""
        with self.followers.busy("collect"):
            try:
                return self.local.collect()
            except Exception as error:  # any kind: the ranks no longer match
                raise EngineFault(FAILED) from error


class RankedExecutor:
    """Implements `StepExecutor` on top of rank 0's executor. Results are those of rank 0."""

    def __init__(self, local: StepExecutor, followers: Followers) -> None:
        self._local, self._followers, self._tables = local, followers, PageTables()

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:
        """See `StepExecutor`. Raises only `EngineFault`."""
        with self._followers.together(self._tables.pack(step)):
            try:
                return [RankedStep(launched, self._followers) for launched in self._local.launch(step, adapters)]
            except Exception as error:  # as above
                raise EngineFault(FAILED) from error

    def choose(self, masks: Masks) -> None:
        """See `StepExecutor`. Raises only `EngineFault`."""
        with self._followers.together(Choose(dict(masks))):
            try:
                self._local.choose(masks)
            except Exception as error:  # as above
                raise EngineFault(FAILED) from error

    def forget(self, sequence: int) -> None:
        """See `StepExecutor`."""
        self._tables.forget(sequence)
        self._followers.send(Forget(sequence))
        self._local.forget(sequence)

    def evicted(self, adapter: AdapterRef) -> None:
        """See `StepExecutor`."""
        self._followers.send(DropAdapter(adapter, in_pages=True))
        self._local.evicted(adapter)

    @property
    def troubles(self) -> tuple[str, ...]:
        """See `StepExecutor`."""
        return self._local.troubles

    def prepare(self) -> bool:
        """See `StepExecutor`. The remaining work depends only on past steps, so it is the same on all ranks."""
        with self._followers.together(Prepare()):
            return self._local.prepare()
