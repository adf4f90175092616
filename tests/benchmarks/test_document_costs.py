"""What the arms of the documents' benchmark report of their jobs, on the bundled base."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.documents.alone import alone
from benchmarks.documents.facts import documents
from benchmarks.documents.learning import PHASES, Learning, means, phases_took
from coserve.client import AsyncClient
from coserve.core.schemas.documents import DocumentJob, DocumentSettings, Phase
from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.step_metrics import StepMetrics
from tests.support.real_server import serve_real

OPTIONS = Namespace(
    steps=2, learning_rate=0.0, chunk_tokens=128, prefix_tokens=16, per_chunk=2, replay=0.1, lm_weight=None
)


@pytest.mark.slow
async def test_each_arm_alone_reports_its_seconds_and_tokens(tmp_path: Path) -> None:
    """And the requests after which it pays, beside a document that the prefix cache has."""
    put, arms = dict[str, dict[str, object]](), [Learning.of("topk_kd"), Learning.of("prefix=cartridge")]

    def record(key: str, value: float, unit: str, about: dict[str, object]) -> None:
        assert value > 0
        put[key] = about

    async with serve_real(tmp_path, kv_tokens=8192) as api, AsyncClient(api.url) as client:
        made = [*documents(2, 1, 6, seed=0)]
        left = iter([False, False])
        await alone(client, OPTIONS, made, [*arms, Learning.of("ce")], record, lambda: next(left, True))
    assert put.keys() - {"documents.break_even", "documents.prefix.break_even"} == {
        "documents.topk_kd.alone_s",
        "documents.prefix.alone_s",
    }, "no job begins once the time is over"
    for key, about in put.items():
        if key.endswith("alone_s"):
            seconds, tokens = about["seconds_of"], about["tokens_of"]
            assert isinstance(seconds, dict) and isinstance(tokens, dict)
            assert about["steps"] == 2
            assert all(seconds[name] > 0 for name in (*PHASES, "steps"))
            assert all(tokens[name] > 0 for name in ("questions", "answers", "training"))
        else:
            assert isinstance(about["context_cached"], float) and about["context_cached"] > 0.5


def test_seconds_and_tokens_are_those_of_each_phase() -> None:
    """A step that was done again counts once; with questions of one's own none are generated."""

    def event(at: float, phase: Phase | None = None, generated: int = 0, step: int = 0) -> JobEvent:
        document = phase and DocumentJob(DocumentSettings(), phase=phase, generated_tokens=generated)
        metrics = StepMetrics(step, 2, 0.0, 0.0, 0.0, 0.0, 30, 30, 0.5) if step else None
        return JobEvent(1, "j", at, "info", "document", "", document=document or None, metrics=metrics)

    events = [
        event(99, "chunks"),
        event(101, "questions"),
        event(104, "answers", 40),
        event(110, "answers", 100),
        event(112, "training", 100),
        *(event(120, step=step) for step in (1, 1, 2)),
        event(130, "evaluation", 100),
        event(133, "done", 100),
    ]
    took = phases_took(events, 100, 134)
    assert took["seconds_of"] == {"questions": 3, "answers": 8, "training": 18, "evaluation": 4, "steps": 1}
    assert took["tokens_of"] == {"questions": 40, "answers": 60, "training": 60}
    own = phases_took([event for event in events if event.created_at != 101], 100, 134)
    assert (own["seconds_of"]["questions"], own["tokens_of"]["questions"]) == (0, 40)
    found = means([{"seconds": 34.0} | took, {"seconds": 30.0} | own])
    assert found["job_s"] == pytest.approx(32)
    assert isinstance(found["seconds_of"], dict) and found["seconds_of"]["questions"] == 1.5
