"""Page tables between ranks, sent as differences: whole tables of long contexts would take longer than the step."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from coserve.engine.ranks.commands import Launch
from coserve.generate.execution.interface import SequenceInput, StepInput


class PageTables:
    """Each sequence's page table in its last step. Both ends agree as long as they see the same steps and ends of
    sequences."""

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
    return msgspec.structs.replace(own, run=replace(own.run, pages=pages))
