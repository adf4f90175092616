"""A profile as tables, JSON and a figure."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.memory.profile.figure import save_figure
from benchmarks.memory.profile.report import Point, ProfileReport, Readings, Series, components_of, lines_of
from benchmarks.memory.profile.request import Backend, Kind, Workload
from benchmarks.memory.profile.table import notes, series_table, source_text

MIB = 1 << 20


def series(kind: Kind = Kind.LORA, ended: str | None = None) -> Series:
    """100 MiB of weights; 2 MiB a row without gradients, 8 MiB with; 6 MiB of gradients less 1 MiB a row."""

    def point(rows: int) -> Point:
        no_grad, forward = 100 + 2 * rows, 100 + 8 * rows
        sizes = [100, no_grad, forward, forward + max(0, 6 - rows)][: 2 if kind is Kind.INFERENCE else 4]
        readings = _readings([size * MIB for size in sizes])
        return Point(batch=rows, readings=readings, components=components_of(readings))

    points = (point(1), point(4), point(10))
    return Series(
        backend=Backend.COSERVE,
        workload=Workload(kind=kind, rank=8 if kind is Kind.LORA else None),
        length=16,
        points=points,
        lines=lines_of(points, 16),
        ended=ended,
        optimizer=3 * MIB,
        kv_per_token=2048,
    )


def _readings(sizes: list[int]) -> Readings:
    names = ("weights", "no_grad", "forward", "forward_backward")
    return Readings(**dict(zip(names, sizes, strict=False)))


def report(*found: Series, measured: bool = False) -> ProfileReport:
    return ProfileReport(
        measured=measured,
        how="fake tensors",
        device="NVIDIA H200" if measured else "none",
        model="tiny",
        family="llama",
        parameters=1_500_000_000,
        dtype="bfloat16",
        recompute=False,
        versions={"torch": "2.11"},
        series=found or (series(Kind.INFERENCE), series()),
    )


def text(of: Series) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as shown:
        console.print(series_table(of))
    return shown.get()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


def test_the_table_has_a_line_for_each_size_and_the_fitted_ones() -> None:
    rows = {cells(line)[0]: cells(line)[1:] for line in text(series()).splitlines() if "│" in line or "┃" in line}
    assert rows["rows"] == ["M_weights", "M_no_grad", "M_act", "M_backward", "total"]
    assert rows["4"] == ["100.0", "8.0", "24.0", "2.0", "134.0"]
    assert rows["10"] == ["100.0", "20.0", "60.0", "0.0", "180.0"]
    assert rows["KiB a row"][1:3] == ["2048.0", "6144.0"]
    assert rows["KiB a token"][1:3] == ["128.00", "384.00"]
    assert rows["R²"][1:3] == ["1.00000", "1.00000"]
    assert rows["worst error"][1:3] == ["0.0%", "0.0%"]
    assert float(rows["R²"][3]) < 0.95, "gradients less activations are no line"


def test_inference_has_two_components() -> None:
    rows = [cells(line) for line in text(series(Kind.INFERENCE)).splitlines() if "│" in line]
    assert rows[0] == ["1", "100.0", "2.0", "-", "-", "102.0"]


def test_it_is_said_whether_numbers_were_measured() -> None:
    assert source_text(report()).startswith("tiny, 1.50 billion parameters, bfloat16: PREDICTED, not measured")
    assert "measured on NVIDIA H200" in source_text(report(measured=True))
    assert "PREDICTED" not in source_text(report(measured=True))


def test_what_readings_leave_out_is_told() -> None:
    assert notes(series(ended="out of memory at 16 rows; 10 rows fitted")) == [
        "out of memory at 16 rows; 10 rows fitted",
        "besides: optimizer and gradient sums 3.0 MiB, KV pages 2.0 KiB a token",
    ]


def test_a_report_is_saved_as_json_and_as_a_figure(tmp_path: Path) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report()), type=ProfileReport) == report()
    save_figure(tmp_path / "profile.png", report())
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
