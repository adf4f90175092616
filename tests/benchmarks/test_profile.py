"""Memory profiles: what can be asked, lines through sizes, and how they are shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.memory.profile.figure import save_figure
from benchmarks.memory.profile.lines import fit_line
from benchmarks.memory.profile.report import Components, Point, ProfileReport, Readings, Series, components_of, lines_of
from benchmarks.memory.profile.request import Backend, Kind, Workload, figure_4_1, make_workloads
from benchmarks.memory.profile.table import notes, series_table, source_text


@given(fixed=st.integers(0, 1 << 34), slope=st.integers(0, 1 << 24), length=st.integers(1, 512))
def test_a_line_is_found_again(fixed: int, slope: int, length: int) -> None:
    line = fit_line([(rows, fixed + slope * rows) for rows in (3, 70, 1000)], length)
    assert line is not None
    assert line.per_row == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert line.per_token == pytest.approx(slope / length, rel=1e-6, abs=1e-3)
    assert line.at(500) == pytest.approx(fixed + 500 * slope, rel=1e-6, abs=1)
    assert line.worst_error is None or line.worst_error < 1e-4


def test_errors_of_what_is_no_line() -> None:
    """Through (1, 10), (2, 20) and (3, 60) goes y = 25 x - 20: off by 5, 10 and 5."""
    line = fit_line([(1, 10), (2, 20), (3, 60)], 5)
    assert line is not None
    assert (line.fixed, line.per_row, line.per_token) == pytest.approx((-20, 25, 5))
    assert line.r2 == pytest.approx(1 - 150 / 1400)
    assert line.worst_error == pytest.approx(0.5)


def test_readings_of_nothing_have_no_relative_error() -> None:
    line = fit_line([(1, 0), (2, 0)], 1)
    assert line is not None
    assert (line.per_row, line.r2, line.worst_error) == (0, 1, None)


@pytest.mark.parametrize("samples", [[], [(4, 100)], [(4, 100), (4, 101)]])
def test_one_size_is_no_line(samples: list[tuple[int, int]]) -> None:
    assert fit_line(samples, 8) is None


def test_components_are_differences_of_readings() -> None:
    """Section 4.2.2: (1), (2) - (1), (3) - (2), (4) - (3)."""
    found = components_of(Readings(weights=100, no_grad=130, forward=200, forward_backward=210))
    assert found == Components(weights=100, no_grad=30, act=70, backward=10)
    assert found.total == 210
    inference = components_of(Readings(weights=100, no_grad=130))
    assert (inference.act, inference.backward, inference.total) == (None, None, 130)


def test_lines_of_the_components_that_there_are() -> None:
    def point(batch: int) -> Point:
        readings = Readings(weights=100, no_grad=100 + 7 * batch)
        return Point(batch=batch, readings=readings, components=components_of(readings))

    lines = lines_of([point(1), point(5), point(9)], 7)
    assert set(lines) == {"no_grad", "total"}
    assert lines["no_grad"].per_token == pytest.approx(1)
    assert lines["total"].fixed == pytest.approx(100)


def test_every_rank_on_every_set_of_targets() -> None:
    found = make_workloads((8, 32), (None, ("q_proj", "v_proj")))
    assert found[0] == Workload(kind=Kind.INFERENCE)
    assert found[-1] == Workload(kind=Kind.FULL)
    assert [(one.rank, one.targets) for one in found[1:-1]] == [
        (8, None),
        (32, None),
        (8, ("q_proj", "v_proj")),
        (32, ("q_proj", "v_proj")),
    ]
    assert found[-2].name == "LoRA rank 32, q_proj,v_proj"
    assert Kind.FULL not in {one.kind for one in make_workloads(full=False)}


def test_the_papers_figure() -> None:
    """Section 4.2.3: GPT-2 XL, 11 tokens, batches of 3 to 1000, rank 32 on c_attn and c_proj."""
    found = figure_4_1()
    assert found.config is not None
    assert [found.config[name] for name in ("n_embd", "n_layer", "n_head")] == [1600, 48, 25]
    assert found.lengths == (11,)
    assert (found.batches[0], found.batches[-1]) == (3, 1000)
    assert list(found.batches) == sorted(found.batches)
    assert found.workloads[1] == Workload(kind=Kind.LORA, rank=32, targets=("c_attn", "c_proj"))
    assert [one.kind for one in found.workloads] == list(Kind)


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
