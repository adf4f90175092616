"""Page tables between ranks: a step sends what is new in them. Whole tables of long contexts would take longer than the
step."""

from __future__ import annotations

import msgspec

from coserve.engine.ranks.commands import Launch
from coserve.generate.execution.interface import SequenceInput, StepInput
from coserve.kernels.attention.interface import TokenRun


class PageTables:
    """Each sequence's table in its last step; the same on both ends if they see the same steps and ends of
    sequences."""

    def __init__(self) -> None:
        self._last = dict[int, tuple[int, ...]]()

    def pack(self, step: StepInput) -> Launch:
        """On rank 0."""
        kept, sequences = list[int](), list[SequenceInput]()
        for own in step.sequences:
            pages, last = own.run.pages, self._last.get(own.sequence, ())
            same = len(last) if pages[: len(last)] == last else 0  # pages that moved: all of it
            self._last[own.sequence] = pages
            kept.append(same)
            sequences.append(_with_pages(own, pages[same:]))
        return Launch(StepInput(step.adapters, sequences), kept)

    def unpack(self, launch: Launch) -> StepInput:
        """On the ranks that follow."""
        sequences = list[SequenceInput]()
        for own, kept in zip(launch.step.sequences, launch.kept, strict=True):
            pages = self._last.get(own.sequence, ())[:kept] + own.run.pages
            self._last[own.sequence] = pages
            sequences.append(_with_pages(own, pages))
        return StepInput(launch.step.adapters, sequences)

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""
        self._last.pop(sequence, None)


def _with_pages(own: SequenceInput, pages: tuple[int, ...]) -> SequenceInput:
    run = own.run
    return msgspec.structs.replace(own, run=TokenRun(run.tokens, run.position, pages))
