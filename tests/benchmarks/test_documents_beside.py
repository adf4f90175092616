"""Requests beside a document's job are counted by its phases."""

from __future__ import annotations

import pytest

from benchmarks.documents.beside import Window, due_in, measures, windows
from coserve.core.schemas.documents import DocumentJob, DocumentSettings, Phase
from coserve.core.schemas.jobs import JobEvent
from coserve.workloads.metrics import Limits
from coserve.workloads.replay import Sample


def event(at: float, phase: Phase) -> JobEvent:
    document = DocumentJob(DocumentSettings(), phase=phase)
    return JobEvent(1, "j", at, "info", "document", "", document=document)


def sample(due: float, first: float, tokens: int, gap: float, error: str | None = None) -> Sample:
    times = tuple(due + first + gap * number for number in range(tokens))
    return Sample(0, "a", due, due, times, tokens, times[-1], error)


def test_requests_belong_to_the_phase_in_which_they_are_due() -> None:
    events = [event(99, "chunks"), event(101, "answers"), event(103, "answers"), event(110, "training")]
    own = windows([*events, event(130, "evaluation"), event(133, "done")], 134)
    assert own == [Window("answers", 101, 110), Window("training", 110, 130), Window("evaluation", 130, 134)]
    samples = [sample(due, 0.1, 2, 0.1) for due in (0.5, 1.5, 9.9, 10.5, 40.0)]
    assert [each.due for each in due_in(samples, 100, own[:1])] == [1.5, 9.9]
    assert [each.due for each in due_in(samples, 100, own)] == [1.5, 9.9, 10.5]


def test_both_targets_are_to_be_kept() -> None:
    kept, late, slow = sample(0, 0.5, 5, 0.01), sample(1, 2.0, 5, 0.01), sample(2, 0.5, 5, 0.1)
    share, about = measures([kept, late, slow, sample(3, 0.5, 1, 0.0, "timeout")], Limits(ttft=1, tpot=0.05))
    assert share == 0.25
    assert (about["requests"], about["failed"]) == (4, 1)
    assert about["ttft_ms"] == {"p50": 500, "p99": pytest.approx(1970)}
    assert about["tpot_ms"] == {"p50": 10, "p99": pytest.approx(98.2)}
    assert measures([], Limits())[1]["ttft_ms"] is None
