"""`coserve bench --save`: no file is lost, and a file that cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.cli.app import run as command_line
from coserve.workloads.opening import open_workload
from coserve.workloads.trace import save_trace

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,8,4,12,API\n"


def test_a_trace_saved_over_itself_stays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    save_trace(open_workload({"duration": 1.0}), path)
    before = path.read_text()
    assert command_line(["bench", "--trace", str(path), "--no-run", "--save", str(path)]) == 0
    assert path.read_text() == before
    assert command_line(["bench", "--trace", str(path), "--slo-ttft", "2", "--no-run", "--save", str(path)]) == 0
    assert path.read_text().splitlines()[1:] == before.splitlines()[1:] and '"slo_ttft":2.0' in path.read_text()


def test_a_recording_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    assert command_line(["bench", "--trace", str(path), "--no-run", "--save", str(path)]) == 2
    assert "save: expected another file than the recording of --trace" in capsys.readouterr().err
    assert path.read_text() == BURSTGPT


@pytest.mark.parametrize("content", ['{"type":"workload","version":2,"scenario":{}}\n', "hello\n"])
def test_a_file_of_another_version_or_format_is_named(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    assert command_line(["bench", "--trace", str(path), "--no-run", "--save", str(tmp_path / "saved")]) == 2
    said = capsys.readouterr().err
    assert "trace.jsonl, line 1: expected a" in said and len(said.splitlines()) == 1
