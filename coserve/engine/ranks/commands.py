"""Commands that rank 0 sends to the followers (all other ranks), and their answers.

Followers execute commands in the order in which they were sent. So a follower's pages, adapters and jobs equal those of
rank 0 whenever both have executed the same commands. Only rank 0 knows which request holds which page, what waits, and
what runs next.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.data.corpus.batch import arrays_in, arrays_out
from coserve.finetune.sessions.session import Verb
from coserve.finetune.sessions.trainee import Retry
from coserve.generate.execution.interface import SequenceInput, StepInput


class Command(Struct, frozen=True, tag=True):
    """Base of commands without an answer."""


class Question(Struct, frozen=True, tag=True, kw_only=True):
    """Base of commands that each follower answers with an `Answer`, usually from a thread, without delaying later
    commands."""

    number: int = 0
    """Set by `Followers.ask`."""


# Start.


class MeasurePool(Question, frozen=True, kw_only=True):
    """Answer with the tokens that this rank's page pool could hold."""


class BuildEngine(Question, frozen=True, kw_only=True):
    """Make the page pool, of `tokens` tokens on every rank, the executor and the trainer."""

    tokens: int


# Generation.


class Launch(Command, frozen=True):
    """Run a step: see `StepExecutor.launch`."""

    step: StepInput
    """The step, with page tables reduced to their new pages: see `page_tables`."""
    kept: list[int]
    """For each sequence, how many leading pages are unchanged since its last step."""


class Choose(Command, frozen=True):
    """See `StepExecutor.choose`."""

    rows: dict[int, int]
    words: bytes
    """See `Masks`."""


class Forget(Command, frozen=True):
    """See `StepExecutor.forget`."""

    sequence: int


class Prepare(Command, frozen=True):
    """See `StepExecutor.prepare`."""


# Adapters.


class ReadAdapter(Question, frozen=True, kw_only=True):
    """Read this rank's shard of an adapter's files into host memory."""

    adapter: AdapterRef
    digests: AdapterDigests | None


class LoadIntoPages(Command, frozen=True):
    """Move the contents of pages (`moved`: from, to), then copy the adapter's host copy into `pages` pages starting at
    `first`."""

    adapter: AdapterRef
    first: int
    pages: int
    moved: dict[int, int]


class DropAdapter(Command, frozen=True):
    """Drop this rank's copy of an adapter: in pages, or in host memory."""

    adapter: AdapterRef
    in_pages: bool = False


# Jobs.


class LoadJob(Question, frozen=True, kw_only=True):
    """Load a job from its last checkpoint. Answer with the step that it continues from. Later commands refer to this
    load by its `number`; the first of them commits it."""

    spec: JobSpec


class DropJob(Command, frozen=True):
    """See `Trainer.drop`. The load may still be running, or not be committed."""

    load: int


class RunVerb(Command, frozen=True):
    """See `FollowedSessions.run`."""

    load: int
    verb: Verb


class Advance(Question, frozen=True, kw_only=True):
    """Run micro-steps of the last `RunVerb`. Answer with the `Outcome` of `Sessions.attempt`; `value`: whether it
    `updated`. Later commands wait for this one."""

    load: int
    micro_steps: int


class AbandonJob(Command, frozen=True):
    """See `FollowedSessions.abandon`; with `how`, `Sessions.begin_again`."""

    load: int
    how: Retry | None = None


class ReleaseMemory(Command, frozen=True):
    """See `Trainer.release_memory`."""


class ReadDevice(Question, frozen=True, kw_only=True):
    """Answer with the growth of the bytes in use on this rank's GPU outside its allocator, over the smallest reading so
    far."""


class CopySnapshot(Question, frozen=True, kw_only=True):
    """Keep this rank's shard of the last gathered weights in host memory, as `adapter`. Answer with 1, or with 0 if
    there is no memory."""

    load: int
    adapter: AdapterRef


# End.


class Stop(Command, frozen=True):
    """End the follower: the engine ends."""


AnyQuestion = MeasurePool | BuildEngine | ReadDevice | ReadAdapter | LoadJob | Advance | CopySnapshot
AnyCommand = (
    AnyQuestion
    | Launch
    | Choose
    | Forget
    | Prepare
    | LoadIntoPages
    | DropAdapter
    | ReleaseMemory
    | RunVerb
    | AbandonJob
    | DropJob
    | Stop
)


def command_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=arrays_out)


def command_decoder() -> msgspec.msgpack.Decoder[AnyCommand]:
    return msgspec.msgpack.Decoder(AnyCommand, dec_hook=arrays_in)


ENGINE_FAULT = "engine_fault"
"""Answer code: the answering rank had an `EngineFault`."""


class Answer(Struct, frozen=True):
    """The answer to a question. `code`: of a `CoserveError`, or `ENGINE_FAULT`; empty on success."""

    number: int
    value: int = 0
    code: str = ""
    message: str = ""


class PageTables:
    """Each sequence's page table in its last step, sent as differences: whole tables of long contexts would take longer
    than the step. Both ends agree as long as they see the same steps and ends of sequences."""

    def __init__(self) -> None:
        self._last = dict[int, tuple[int, ...]]()

    def pack(self, step: StepInput) -> Launch:
        """Reduce a step's page tables to new pages; on rank 0."""
        kept, sequences = list[int](), list[SequenceInput]()
        for own in step.sequences:
            pages, last = own.run.pages, self._last.get(own.sequence, ())
            same = len(last) if pages[: len(last)] == last else 0  # if pages moved, resend the whole table
            self._last[own.sequence] = pages
            kept.append(same)
            sequences.append(_with_pages(own, pages[same:]))
        return Launch(StepInput(step.adapters, sequences), kept)

    def unpack(self, launch: Launch) -> StepInput:
        """Restore a step's page tables; on followers."""
        sequences = list[SequenceInput]()
        for own, kept in zip(launch.step.sequences, launch.kept, strict=True):
            pages = self._last.get(own.sequence, ())[:kept] + own.run.pages
            self._last[own.sequence] = pages
            sequences.append(_with_pages(own, pages))
        return StepInput(launch.step.adapters, sequences)

    def forget(self, sequence: int) -> None:
        """Drop the table of a sequence that has ended."""
        self._last.pop(sequence, None)


def _with_pages(own: SequenceInput, pages: tuple[int, ...]) -> SequenceInput:
    return replace(own, run=replace(own.run, pages=pages))
