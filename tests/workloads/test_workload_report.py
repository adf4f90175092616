"""What people and programs get to see of a run."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from coserve.errors import InvalidRequest
from coserve.types import JobState
from coserve.workloads.gauges import Snapshot
from coserve.workloads.metrics import Limits
from coserve.workloads.replay import JobSample, ReplayResult, Sample
from coserve.workloads.report.conditions import parse_condition
from coserve.workloads.report.files import Report, write_report
from coserve.workloads.report.tables import (
    ADAPTER_HEADER,
    LATENCY_HEADER,
    adapter_table,
    duration_text,
    latency_table,
    totals_table,
)
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


def text_of(table: Table, width: int = 120) -> str:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
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


def test_headings_and_numbers_are_whole_at_80_columns() -> None:
    samples = [msgspec.structs.replace(answered(i), adapter=f"{i % 2}-a-long-name-of-an-adapter") for i in range(2000)]
    summary = summarise(msgspec.structs.replace(FULL, samples=tuple(samples)), limits=Limits(ttft=1.0))
    latency, adapters = text_of(latency_table(summary), 80), text_of(adapter_table(summary), 80)
    assert all(heading in latency for heading in LATENCY_HEADER)
    for text in (*ADAPTER_HEADER, "1000/1000", "100.0%", "0.750", "500 ms", "600 ms"):
        assert text in adapters
    assert all(len(line) <= 80 for line in (latency + adapters).splitlines())


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


class Parts(HTMLParser):
    """Every tag, and every address that a page could fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "poster")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_asks_for_nothing_else(tmp_path: Path) -> None:
    run = msgspec.structs.replace(
        FULL,
        scenario=Scenario(preset="ets-5.1", adapter_prefix="<script src=//evil>", slo_ttft=1.0),
        snapshots=(Snapshot(at=0.0, waiting=1.0, running=2.0, cache=0.1, memory={"peak": 2.0**30}), Snapshot(at=1.0)),
    )
    *_, html = write_report(tmp_path, run, summarise(run), "vLLM <1>")
    content = html.read_text()
    page = Parts()
    page.feed(content)
    assert page.addresses and all(address.startswith("data:image/png;base64,iVBOR") for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in content and "url(" not in content and "@import" not in content
    for shown in (
        "vLLM <1>",
        "TTFT  time to first token",
        "20 of 21",
        "queue_full",
        "<script src=//evil>",
        "ets-5.1",
        "1.00 GiB",
    ):
        assert shown in page.text


def test_the_terminal_shows_the_worst_adapters() -> None:
    samples = [
        msgspec.structs.replace(answered(i, "timeout" if i < 3 else None), adapter=f"load-{i:02d}") for i in range(12)
    ]
    summary = summarise(msgspec.structs.replace(FULL, samples=tuple(samples)), limits=Limits(ttft=1.0))
    shown = text_of(adapter_table(summary))
    assert "the worst 8 of 12" in shown and "load-02" in shown and "load-11" not in shown
    assert "of the worst adapter" in text_of(totals_table(summary))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("slo>=0.95", True), ("slo >= 95%", True), ("slo>0.99", False), ("ttft_p99<=501ms", True), ("ttft_p99 < 0.5", False),
        ("errors<=1", True), ("errors<1", False), ("goodput>=4.9", True), ("slo_worst>=.95", True), ("tpot_mean<=1e-1s", True),
        ("finetune_tok_s>=16", True), ("finetune_share>=0", False), ("itl_p50<=0.11", True), ("output_tok_s>9.9", True),
        ("satisfaction>=0.7", True), ("requests_per_s>5", False), ("e2e_p90<=0.7", True), ("lag_p99<=0", True),
    ],
)  # fmt: skip
def test_conditions(text: str, holds: bool) -> None:
    summary = summarise(FULL, limits=Limits(ttft=1.0))
    assert parse_condition(text).holds(summary) is holds


@pytest.mark.parametrize(
    "text", ["", "slo", "slo=0.9", "slo>=", "slo>=high", "sloo>=0.9", "slo>=0.9ms2", "ttft>=1", "slo>=50"]
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="fail_under"):
        parse_condition(text)


def test_each_class_has_its_limits_and_shed_requests_are_missed() -> None:
    """First tokens come after 0.5 s."""
    samples = [answered(0), answered(1), answered(2, error="overloaded"), answered(3, error="queue_full")]
    samples[1] = msgspec.structs.replace(samples[1], slo_class="batch")
    run = msgspec.structs.replace(FULL, samples=tuple(samples))
    for limits, share in [
        (Limits(ttft=1.0), 0.5),
        (Limits(ttft=0.1), 0.25),
        (Limits(ttft=1.0, batch_ttft=0.1), 0.25),
        (Limits(e2e=0.1, batch_tpot=1.0), 0.25),
    ]:
        assert summarise(run, limits=limits).attainment == share
    summary = summarise(run, slos=(0.3, 10.0))
    assert summary.slo_attainment == {"0.3": 0.0, "10": 0.5}
    assert parse_condition("shed<=2").holds(summary) and not parse_condition("shed<2").holds(summary)
