"""What rank 0 tells the ranks that follow it, and what they answer.

Followers execute commands in the order in which they were sent. So the pages, the adapters and the jobs of a follower
have the same contents as those of rank 0 whenever both have executed the same commands. Who holds which page, which
request waits and what runs next is known on rank 0 only.
"""

from __future__ import annotations

from msgspec import Struct

from coserve.admission.treatment import Treatment
from coserve.core.types import AdapterDigests, AdapterRef, JobSpec
from coserve.finetune.outcome import Retry
from coserve.generate.execution.interface import StepInput


class Command(Struct, frozen=True, tag=True):
    """Base of the commands that are not answered."""


class Question(Struct, frozen=True, tag=True, kw_only=True):
    """Base of the commands that each follower answers with an `Answer`, mostly from a thread: later commands do not
    wait."""

    number: int = 0
    """Set by `Followers.ask`."""


# Start.


class MeasurePool(Question, frozen=True, kw_only=True):
    """Answer with the tokens that the page pool of this rank could hold."""


class BuildEngine(Question, frozen=True, kw_only=True):
    """Make the page pool, of `tokens` tokens on every rank, and what runs steps and jobs."""

    tokens: int


# Generation.


class Launch(Command, frozen=True):
    """Run a step: see `StepExecutor.launch`."""

    step: StepInput
    """Page tables without their first pages: see `page_tables`."""
    kept: list[int]
    """For each sequence, how many pages its table begins with as in its last step."""


class Forget(Command, frozen=True):
    """See `StepExecutor.forget`."""

    sequence: int


class Prepare(Command, frozen=True):
    """See `StepExecutor.prepare`."""


# Adapters.


class ReadAdapter(Question, frozen=True, kw_only=True):
    """Read this rank's part of an adapter's files into host memory."""

    adapter: AdapterRef
    digests: AdapterDigests | None


class DropAdapterCopy(Command, frozen=True):
    """The host copy is not needed any more."""

    adapter: AdapterRef


class LoadIntoPages(Command, frozen=True):
    """Move the contents of pages (`moved`: from, to), then copy the adapter's host copy into `pages` pages from `first`
    on."""

    adapter: AdapterRef
    first: int
    pages: int
    moved: dict[int, int]


class EvictAdapter(Command, frozen=True):
    """The adapter has lost its pages."""

    adapter: AdapterRef


# Jobs.


class LoadJob(Question, frozen=True, kw_only=True):
    """Load a job as its last checkpoint left it. Answer with the step that it goes on from. Later commands name the
    load by its `number`; the first of them commits it."""

    spec: JobSpec


class DropJob(Command, frozen=True):
    """See `Trainer.drop`. The load may not have ended, or not have been committed."""

    load: int


class PrepareJob(Question, frozen=True, kw_only=True):
    """See `Trainer.preparation`."""

    load: int


class AdvanceJob(Question, frozen=True, kw_only=True):
    """Answer with the `Outcome` of `Trainer.attempt`, of which `value` is the position. Later commands do wait."""

    load: int
    micro_steps: int | None
    treatment: Treatment | None
    """See `Trainer.limit`; None: as set."""


class AbandonJob(Command, frozen=True):
    """See `Trainer.abandon`, or `Trainer.retry`."""

    load: int
    how: Retry | None = None


class ReleaseMemory(Command, frozen=True):
    """See `Trainer.release_memory`."""


class ReadDevice(Question, frozen=True, kw_only=True):
    """Answer with the bytes of this rank's GPU that others than its allocator have taken since its first answer."""


class GatherJob(Command, frozen=True):
    """See `Trainer.gather`."""

    load: int
    weights_only: bool


class CopySnapshot(Question, frozen=True, kw_only=True):
    """Keep this rank's part of what was gathered last in host memory, as that of `adapter`. Answer with 1, or 0: there
    is no memory."""

    load: int
    adapter: AdapterRef


# End.


class Stop(Command, frozen=True):
    """The engine ends."""


AnyQuestion = MeasurePool | BuildEngine | ReadDevice | ReadAdapter | LoadJob | PrepareJob | AdvanceJob | CopySnapshot
AnyCommand = (
    AnyQuestion
    | Launch
    | Forget
    | Prepare
    | DropAdapterCopy
    | LoadIntoPages
    | EvictAdapter
    | ReleaseMemory
    | GatherJob
    | AbandonJob
    | DropJob
    | Stop
)


ENGINE_FAULT = "engine_fault"
"""Code of an `EngineFault` of the rank that answers."""


class Answer(Struct, frozen=True):
    """What came of a question. `code`: of a `CoserveError`, or `ENGINE_FAULT`; empty where it succeeded."""

    number: int
    value: int = 0
    code: str = ""
    message: str = ""
