"""What people and programs get to see of a run."""

from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from coserve.types import JobState
from coserve.workloads.metrics import Limits
from coserve.workloads.replay import JobSample, ReplayResult, Sample
from coserve.workloads.report.files import Report, write_report
from coserve.workloads.report.tables import duration_text, latency_table, totals_table
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import summarise


def answered(index: int, error: str | None = None) -> Sample:
    at = index / 10
    return Sample(
        index=index,
        adapter="load-00",
        due=at,
        sent=at,
        times=() if error else (at + 0.5, at + 0.6),
        tokens=0 if error else 2,
        finished=at + 0.6,
        error=error,
    )


TRAINED = JobSample(
    index=0,
    adapter="load-00",
    rows=3,
    due=0,
    sent=0,
    job="j",
    trained=((1.0, 500), (2.0, 500)),
    state=JobState.SUCCEEDED,
)
FULL = ReplayResult(
    scenario=Scenario(),
    duration=4.0,
    samples=(*(answered(i) for i in range(20)), answered(20, error="queue_full")),
    jobs=(TRAINED, msgspec.structs.replace(TRAINED, index=1, job=None, trained=(), state=None, error="queue_full")),
)
EMPTY = ReplayResult(scenario=Scenario(), duration=0.0, samples=(), jobs=())


def text_of(table: Table) -> str:
    console = Console(width=120, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_say_what_the_summary_holds() -> None:
    summary = summarise(FULL, limits=Limits(ttft=1.0))
    latency, totals = text_of(latency_table(summary)), text_of(totals_table(summary))
    for word in ("TTFT", "TPOT", "ITL", "E2E", "p50", "p95", "p99", "500 ms", "100 ms", "600 ms"):
        assert word in latency
    for word in ("20 of 21", "queue_full", "95.2%", "250 tokens/s", "1 of 2", "TTFT <= 1.00 s", "5.00 requests/s"):
        assert word in totals


def test_tables_of_an_empty_run() -> None:
    summary = summarise(EMPTY)
    assert "-" in text_of(latency_table(summary))
    assert "0 of 0" in text_of(totals_table(summary))


@pytest.mark.parametrize("run", [FULL, EMPTY], ids=["full", "empty"])
def test_files_of_a_run(tmp_path: Path, run: ReplayResult) -> None:
    summary = summarise(run)
    paths = write_report(tmp_path / "deep" / "report", run, summary)
    assert [path.name for path in paths] == ["report.json", "report.png", "report.html"]
    assert msgspec.json.decode(paths[0].read_bytes(), type=Report) == Report(summary=summary, run=run)
    assert paths[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (0.123, "123 ms"),
        (0.99999, "1000 ms"),
        (1.234, "1.23 s"),
        (9.996, "10.0 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (float("nan"), "-"),
    ],
)
def test_durations_have_three_digits_that_matter(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
