"""What people and programs get to see of a run."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from coserve.core.errors import InvalidRequest
from coserve.core.training.jobs import JobState
from coserve.workloads.gauges import Snapshot
from coserve.workloads.metrics import Limits
from coserve.workloads.replay import JobSample, ReplayResult, Sample
from coserve.workloads.report.conditions import parse_condition
from coserve.workloads.report.files import Report, write_report
from coserve.workloads.report.tables import (
    ADAPTER_HEADER,
    CLASS_HEADER,
    LATENCY_HEADER,
    adapter_table,
    class_table,
    duration_text,
    failure_lines,
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
    for word in ("20 of 21", "queue_full", "95.2%", "250 tokens/s", "1 of 2", "TTFT <= 1.00 s", "7.69 requests/s"):
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
    assert "was interrupted" not in paths[2].read_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0, "0.00 ms"), (0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (0.99999, "1000 ms")),
        *((1.234, "1.23 s"), (9.996, "10.0 s"), (12.34, "12.3 s"), (123.4, "123 s"), (float("nan"), "-")),
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
        both(),
        scenario=Scenario(preset="ets-5.1", trace_model="<script src=//evil>", slo_ttft=1.0),
        interrupted=True,
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
        *("vLLM <1>", "TTFT  time to first token", "19 of 20", "queue_full", "<script src=//evil>", "ets-5.1"),
        *("1.00 GiB", "Classes", "9/10", "Failures", "first message", "[/b] full", "was interrupted"),
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
        *(("slo>=0.95", True), ("slo >= 95%", True), ("slo>0.99", False), ("ttft_p99<=501ms", True)),
        *(("ttft_p99 < 0.5", False), ("errors<=1", True), ("errors<1", False), ("errors<=5%", True)),
        *(("errors<=4%", False), ("shed<=5%", True), ("goodput>=7.6", True), ("slo_worst>=.95", True)),
        *(("tpot_mean<=1e-1s", True), ("finetune_tok_s>=16", True), ("finetune_share>=0", False)),
        *(("itl_p50<=0.11", True), ("output_tok_s>9.9", True), ("satisfaction>=0.7", True)),
        *(("requests_per_s>8", False), ("e2e_p90<=0.7", True), ("lag_p99<=0", True)),
    ],
)
def test_conditions(text: str, holds: bool) -> None:
    summary = summarise(FULL, limits=Limits(ttft=1.0))
    assert parse_condition(text).holds(summary) is holds


@pytest.mark.parametrize(
    "text",
    [
        *("", "slo", "slo=0.9", "slo>=", "slo>=high", "sloo>=0.9", "slo>=0.9ms2", "ttft>=1", "slo>=50", "slo>=1s"),
        *("goodput>=5%", "ttft_p99<=5%", "errors<=1ms"),
    ],
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


# ---- what was not measured


@pytest.mark.parametrize(
    "text",
    [
        *("slo>=0.9", "slo_worst>=0", "slo_interactive>=0", "slo_batch>=0", "satisfaction>=0", "goodput>=0"),
        *("errors<=0", "shed<=0", "requests_per_s>=0", "output_tok_s>=0", "finetune_tok_s>=0", "finetune_share>=0"),
        *("ttft_p99<=9", "lag_p99<=9"),
    ],
)
def test_without_requests_no_condition_holds(text: str) -> None:
    for limits in (Limits(), Limits(ttft=1.0, batch_ttft=1.0)):
        summary = summarise(EMPTY, limits=limits)
        condition = parse_condition(text)
        assert condition.value(summary) is None and not condition.holds(summary)


@pytest.mark.parametrize("name", ["slo", "slo_worst", "goodput", "slo_interactive", "slo_batch"])
def test_without_limits_nothing_is_in_them(name: str) -> None:
    summary = summarise(FULL, limits=Limits(batch_ttft=1.0))
    assert parse_condition(f"{name}>=0").value(summary) is None, "no request was of the class batch"
    shown = text_of(totals_table(summary)) + text_of(adapter_table(summary))
    assert "In the limits" not in shown and "Goodput" not in shown and "95.2%" in shown, "of SLO attainment"
    assert "satisfied" in shown


# ---- two classes


def both() -> ReplayResult:
    """Ten interactive requests, one of them failed, and as many batch ones; first tokens come after 0.5 s."""
    samples = [msgspec.structs.replace(answered(i), slo_class="batch" if i % 2 else "interactive") for i in range(20)]
    samples[0] = msgspec.structs.replace(answered(0, error="overloaded"), slo_class="interactive", message="[/b] full")
    return msgspec.structs.replace(FULL, samples=tuple(samples))


def test_both_classes_have_their_numbers() -> None:
    summary = summarise(both(), limits=Limits(ttft=1.0, batch_ttft=0.1))
    found = {each.slo_class: (each.requests, each.completed, each.attainment) for each in summary.classes}
    assert found == {"interactive": (10, 9, 0.9), "batch": (10, 10, 0.0)}
    assert all(each.ttft and each.ttft.p99 == pytest.approx(0.5) and each.tpot and each.e2e for each in summary.classes)
    totals, classes = text_of(totals_table(summary), 80), text_of(class_table(summary), 80)
    for shown in (
        "In the limits ",
        "interactive (TTFT <= 1.00 s)",
        "90.0%",
        "batch (TTFT <= 100 ms)",
        "45.0%",
        "Goodput ",
    ):
        assert shown in totals
    for shown in (*CLASS_HEADER, "9/10", "10/10", "500 ms", "600 ms"):
        assert shown in classes
    assert all(len(line) <= 80 for line in classes.splitlines())
    for text, holds in (
        ("slo_interactive>=0.9", True),
        ("slo_batch>=0.1", False),
        ("slo_batch<=0", True),
        ("slo>=0.45", True),
    ):
        assert parse_condition(text).holds(summary) is holds


def test_a_class_without_limits_has_no_attainment() -> None:
    summary = summarise(both(), limits=Limits(ttft=1.0))
    assert summary.class_attainment("batch") is None and summary.has_limits
    assert "batch (no limits)" in text_of(totals_table(summary))
    only = msgspec.structs.replace(FULL, samples=tuple(each for each in both().samples if each.slo_class == "batch"))
    assert "In the limits (TTFT <= 100 ms)" in text_of(totals_table(summarise(only, limits=Limits(batch_ttft=0.1))))


def test_failures_are_shown_with_their_first_message() -> None:
    samples = [answered(i, error="overloaded" if i else None) for i in range(4)]
    samples[1:] = [msgspec.structs.replace(each, message=f"message {i}") for i, each in enumerate(samples[1:], 1)]
    jobs = (msgspec.structs.replace(TRAINED, error="queue_full"),)
    summary = summarise(msgspec.structs.replace(FULL, samples=tuple(samples), jobs=jobs))
    assert list(failure_lines(summary)) == ["failed: overloaded 3: message 1", "failed: queue_full (jobs) 1"]


def test_names_and_messages_are_no_markup() -> None:
    samples = [msgspec.structs.replace(answered(i), adapter=f"{i}[/b][red]") for i in range(2)]
    assert "1[/b][red]" in text_of(adapter_table(summarise(msgspec.structs.replace(FULL, samples=tuple(samples)))))
