"""Rank 0's executor, adapters and memory readings. Each also sends its operations to the followers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coserve.core.errors import EngineFault
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.ranks import commands
from coserve.engine.ranks.followers import Answers, Followers
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput, StepResult
from coserve.generate.sampling.masks import Masks
from coserve.lora.store.host_memory import Unread
from coserve.lora.store.interfaces import CopyMirror
from coserve.lora.store.store import Load
from coserve.memory.pages import Span
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
        self._local, self._followers, self._tables = local, followers, commands.PageTables()

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:
        """See `StepExecutor`. Raises only `EngineFault`."""
        with self._followers.together(self._tables.pack(step)):
            try:
                return [RankedStep(launched, self._followers) for launched in self._local.launch(step, adapters)]
            except Exception as error:  # as above
                raise EngineFault(FAILED) from error

    def choose(self, masks: Masks) -> None:
        """See `StepExecutor`. Raises only `EngineFault`."""
        with self._followers.together(commands.Choose(dict(masks.rows), masks.words.numpy().tobytes())):
            try:
                self._local.choose(masks)
            except Exception as error:  # as above
                raise EngineFault(FAILED) from error

    def forget(self, sequence: int) -> None:
        self._tables.forget(sequence)
        self._followers.send(commands.Forget(sequence))
        self._local.forget(sequence)

    def evicted(self, adapter: AdapterRef) -> None:
        self._followers.send(commands.DropAdapter(adapter, in_pages=True))
        self._local.evicted(adapter)

    def kept(self, weights: LoraWeights) -> None:
        """See `StepExecutor`. Ranks capture the same graphs, which therefore depend on past steps only."""

    @property
    def troubles(self) -> tuple[str, ...]:
        return self._local.troubles

    @property
    def graphs_missing(self) -> int:
        return self._local.graphs_missing

    def prepare(self) -> bool:
        """See `StepExecutor`. The remaining work depends only on past steps, so it is the same on all ranks."""
        with self._followers.together(commands.Prepare()):
            return self._local.prepare()


class FollowersCopies(CopyMirror):
    """Implements `CopyMirror`: followers load and drop copies in step with rank 0."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def loaded(self, ref: AdapterRef, span: Span, moved: Mapping[int, int]) -> None:
        self._followers.send(commands.LoadIntoPages(ref, span.first, span.pages, dict(moved)))

    def dropped(self, ref: AdapterRef) -> None:
        self._followers.send(commands.DropAdapter(ref))


def load_on_all(load: Load, followers: Followers) -> Load:
    """Wrap `load` so that it returns once every follower has its own host copy too. Raises any rank's error."""

    def everywhere(ref: AdapterRef, digests: AdapterDigests | None) -> Unread | LoraWeights:
        answers = followers.ask(commands.ReadAdapter(adapter=ref, digests=digests))
        try:
            weights = load(ref, digests)
        finally:
            answers.settle()  # so that no copy is dropped while it is being read
        answers.wait()
        return weights

    return everywhere


class FollowersMemory:
    """Polls the followers' memory without waiting: each answers once it has executed earlier commands."""

    def __init__(self, followers: Followers) -> None:
        self._followers, self._taken = followers, 0
        self._asked: Answers | None = None

    def taken(self) -> int:
        """Return the largest of the last answers to `ReadDevice`, and ask again. Raises `RankLost`."""
        if self._asked is not None and self._asked.complete:
            self._taken, self._asked = max(self._asked.wait()), None
        if self._asked is None:
            self._asked = self._followers.ask(commands.ReadDevice())
        return self._taken
