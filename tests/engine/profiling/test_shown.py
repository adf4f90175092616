"""A profile as tables, JSON and a figure; `coserve profile` over a stand-in for its process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from coserve.cli.app import app, run
from coserve.cli.gpu import profile as command
from coserve.core.errors import UnsupportedBase
from coserve.engine.profile_request.messages import Step
from coserve.engine.profile_request.presets import Preset, preset_request
from coserve.engine.profile_request.report import Point, ProfileReport, Readings, Series, components_of, lines_of
from coserve.engine.profile_request.request import Backend, Kind, ProfileRequest, Workload
from coserve.engine.profile_request.table import notes, series_table, source_text

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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProfileRequest]:
    """The requests that the command makes; the process answers with `report`."""
    found: list[ProfileRequest] = []

    def run_profile(request: ProfileRequest, progress: Callable[[Step], None]) -> ProfileReport:
        found.append(request)
        progress(Step(done=0, total=1, text="tiny"))
        return report()

    monkeypatch.setattr(command, "run_profile", run_profile)
    return found


def test_the_command_prints_and_saves(asked: list[ProfileRequest], tmp_path: Path) -> None:
    out, figure = tmp_path / "profile.json", tmp_path / "profile.png"
    arguments = ["profile", "bundled", "--ranks", "8,32", "--targets", "q_proj,v_proj", "--targets", "all"]
    arguments += ["--batches", "4,1,4", "--lengths", "16,64", "--out", str(out), "--figure", str(figure), "--no-full"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "PREDICTED, not measured" in done.output
    assert "M_backward" in done.output
    (request,) = asked
    assert (request.batches, request.lengths) == ((1, 4), (16, 64))
    lora = [(one.rank, one.targets) for one in request.workloads if one.kind is Kind.LORA]
    assert lora == [(8, ("q_proj", "v_proj")), (32, ("q_proj", "v_proj")), (8, None), (32, None)]
    saved = msgspec.json.decode(out.read_bytes())
    assert saved["measured"] is False
    assert saved["series"][1]["points"][1]["components"] == {
        "weights": 100 * MIB,
        "no_grad": 8 * MIB,
        "act": 24 * MIB,
        "backward": 2 * MIB,
    }
    assert msgspec.json.decode(out.read_bytes(), type=ProfileReport) == report()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_preset_stands_for_a_model(asked: list[ProfileRequest]) -> None:
    done = CliRunner().invoke(app, ["profile", "--preset", "figure-4.1", "--backend", "peft", "--backend", "coserve"])
    assert done.exit_code == 0, done.output
    expected = preset_request(Preset.FIGURE_4_1)
    assert asked == [msgspec.structs.replace(expected, backends=(Backend.PEFT, Backend.COSERVE))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder: ./nowhere"),
        (["bundled", "--ranks", "8,0"], "expected ranks from 1 to 1024, got 0"),
        (["bundled", "--batches", "1,two"], "batches: expected whole numbers separated by commas, got '1,two'"),
        (["bundled", "--batches", "0"], "batches: expected numbers from 1 up, got 0"),
        (["bundled", "--lengths", ""], "lengths: expected at least one number, got none"),
        (["bundled", "--targets", ","], "targets: expected at least one target, got none"),
        (["bundled", "--dtype", "int4"], "dtype: expected one of float32, bfloat16, float16, got 'int4'"),
        (["bundled", "--out", "/nowhere/profile.json"], "no such folder: /nowhere"),
        (["bundled", "--out", "/tmp"], "expected a file, got a folder: /tmp"),
        (["bundled", "--ranks", ""], "ranks: expected at least one number, got none"),
        (
            ["bundled", "--batches", "99999999999999"],
            "batches: expected at most 16777216 tokens a batch, got 51199999999999488",
        ),
        (["--preset", "figure-4.1", "--ranks", "3"], "the preset says it: expected no --ranks"),
        (["--preset", "figure-4.1", "--no-full"], "the preset says it: expected no --full"),
        ([], "expected a MODEL, or --preset"),
        (["bundled", "--preset", "figure-4.1"], "expected a MODEL, or --preset"),
    ],
)
def test_mistakes_end_with_one_line_before_anything_runs(
    arguments: list[str], message: str, asked: list[ProfileRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert not asked


def test_an_error_of_the_process_is_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_profile(request: ProfileRequest, progress: Callable[[Step], None]) -> ProfileReport:
        raise UnsupportedBase("tiny: quantized weights are not supported")

    monkeypatch.setattr(command, "run_profile", run_profile)
    assert run(["profile", "bundled"]) == 2
    assert capsys.readouterr().err == "coserve: tiny: quantized weights are not supported\n"
