"""`coserve adapters convert --distill`: what it asks for, what it prints, and what it refuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli import common
from coserve.cli.app import app
from coserve.core.errors import AdapterBusy, InvalidRequest
from coserve.core.schemas.adapters import ConvertedAdapter
from coserve.core.schemas.jobs import Job
from coserve.core.training.jobs import JobState
from tests.support.records import make_adapter_info, make_metrics
from tests.support.sdk import job

COMMAND = ["adapters", "convert", "poet@2", "--bd-blocks", "4"]


@dataclass
class Daemon:
    """A client's calls. `after`: the output errors that distillation leaves at each rank; conversion alone leaves 0.5,
    none from rank 64 on."""

    after: dict[int, float]
    calls: list[Any] = field(default_factory=list)
    state: JobState = JobState.SUCCEEDED
    deleted: list[str] = field(default_factory=list)
    busy: str | None = None

    def adapter(self, ref: str) -> Any:
        return SimpleNamespace(rank=14)

    def generate(self, prompt: str, **options: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(text=" once"), SimpleNamespace(text=" ")])

    def delete_adapter(self, ref: str) -> None:
        if ref == self.busy:
            raise AdapterBusy(f"adapter {ref} is in use", field="id")
        self.deleted.append(ref)

    def convert_adapter(self, source: str, blocks: int, **options: Any) -> ConvertedAdapter:
        rank = options["rank"] or 8
        self.calls.append(("convert", rank))
        made = make_adapter_info("bard", 2 * len(self.calls), rank=rank, source="convert:poet@2", bd_blocks=blocks)
        error = 0.3 if rank < 64 else 0.0
        return ConvertedAdapter(
            adapter=made, rank=rank, error=error, site_errors={}, max_error=0.05, smallest_rank=64, errors={rank: error}
        )

    def finetune(self, adapter: str, data: Any, **options: Any) -> Any:
        self.calls.append(("finetune", adapter, data, options))
        rank, version = self.calls[-2][1], 2 * len(self.calls) - 1
        metrics = make_metrics(
            9, 9, 0.1, valid_loss=self.after[rank] + 0.1, valid_loss_before=0.5, best_valid_loss=self.after[rank]
        )
        ended: Job = msgspec.structs.replace(
            job(self.state),
            adapter=adapter,
            version=version,
            result=f"{adapter}@{version}",
            metrics=metrics,
            teacher=options["teacher"],
            continue_from=options["continue_from"],
        )
        return SimpleNamespace(id="job-1", info=ended, wait=lambda: ended)


def invoke(monkeypatch: pytest.MonkeyPatch, daemon: Daemon, *options: str) -> Any:
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(daemon))
    return CliRunner().invoke(app, [*COMMAND, *options])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b"}\n')
    return path


def test_the_converted_adapter_learns_from_its_source(monkeypatch: pytest.MonkeyPatch, rows: Path) -> None:
    daemon = Daemon({8: 0.1})
    result = invoke(monkeypatch, daemon, "--distill", str(rows))
    (_, asked) = daemon.calls
    assert asked == (
        "finetune",
        "bard",
        None,
        {
            "file": rows,
            "continue_from": "bard@2",
            "teacher": "poet@2",
            "training": {"validation_split": 0.1, "early_stopping_patience": 3},
        },
    )
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "bard@3  output error 0.5 before, 0.1 after (nats a token, from poet@2)"


def test_a_distillation_without_improvement_says_that_the_weights_are_those_before(
    monkeypatch: pytest.MonkeyPatch, rows: Path
) -> None:
    result = invoke(monkeypatch, Daemon({8: 0.5}), "--distill", str(rows))
    assert result.output.splitlines()[-1] == "no improvement: bard@3 has the weights of bard@2"


def test_rows_that_are_refused_leave_no_adapter_behind(monkeypatch: pytest.MonkeyPatch, rows: Path) -> None:
    daemon = Daemon({8: 0.1})

    def refuse(*args: Any, **options: Any) -> None:
        raise InvalidRequest("line 1: expected a completion", field="rows")

    monkeypatch.setattr(daemon, "finetune", refuse)
    result = invoke(monkeypatch, daemon, "--distill", str(rows))
    assert result.exit_code != 0
    assert daemon.deleted == ["bard@2"]


def test_a_conversion_that_loses_nothing_says_that_it_is_not_distilled(
    monkeypatch: pytest.MonkeyPatch, rows: Path
) -> None:
    daemon = Daemon({})
    result = invoke(monkeypatch, daemon, "--distill", str(rows), "--rank", "64")
    assert result.exit_code == 0
    assert f"nothing was lost: not distilled, {rows} is not used" in result.stderr
    assert [call[0] for call in daemon.calls] == ["convert"]


def test_generations_are_the_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon({8: 0.1})
    asked: list[Any] = []
    answer = daemon.generate
    monkeypatch.setattr(daemon, "generate", lambda *a, **options: asked.append((a, options)) or answer(*a, **options))
    assert invoke(monkeypatch, daemon, "--distill", "generations").exit_code == 0
    data = daemon.calls[1][2]
    assert len(data) == len(asked) > 8 and all(row["completion"] == " once" for row in data)
    assert {row["prompt"] for row in data} == {prompt for (prompt,), _ in asked}
    assert all("adapter" not in options for _, options in asked)
    assert len({options["seed"] for _, options in asked}) == len(asked)


@pytest.mark.parametrize(
    ("after", "bound", "ranks"),
    [
        ({16: 0.2, 32: 0.05}, 0.1, [16, 32]),
        ({16: 0.1}, 0.1, [16]),
        ({16: 0.3, 32: 0.2}, 0.1, [16, 32, 64]),  # where nothing is lost, nothing is trained
    ],
)
def test_the_rank_is_doubled_until_the_bound_is_kept(
    monkeypatch: pytest.MonkeyPatch, rows: Path, after: dict[int, float], bound: float, ranks: list[int]
) -> None:
    daemon = Daemon(after)
    result = invoke(monkeypatch, daemon, "--distill", str(rows), "--max-output-error", str(bound))
    assert result.exit_code == 0, result.output
    assert [call[1] for call in daemon.calls if call[0] == "convert"] == ranks
    assert len([call for call in daemon.calls if call[0] == "finetune"]) == len(after)


@pytest.mark.parametrize(("busy", "deleted"), [(None, ["bard@2", "bard@3"]), ("bard@3", ["bard@2"])])
def test_versions_that_miss_the_bound_are_deleted_once_one_keeps_it(
    monkeypatch: pytest.MonkeyPatch, rows: Path, busy: str | None, deleted: list[str]
) -> None:
    daemon = Daemon({16: 0.2, 32: 0.05}, busy=busy)
    result = invoke(monkeypatch, daemon, "--distill", str(rows), "--max-output-error", "0.1")
    assert result.exit_code == 0, result.output
    assert daemon.deleted == deleted
    assert result.output.splitlines()[-1] == f"deleted {', '.join(deleted)}: beyond --max-output-error"


def test_json_has_the_conversion_and_the_job(monkeypatch: pytest.MonkeyPatch, rows: Path) -> None:
    result = invoke(monkeypatch, Daemon({8: 0.1}), "--distill", str(rows), "--json")
    done, ended = map(json.loads, result.output.splitlines())
    assert (done["rank"], ended["metrics"]["valid_loss_before"], ended["metrics"]["best_valid_loss"]) == (8, 0.5, 0.1)


def test_a_cancelled_distillation_is_a_failure_to_the_shell(monkeypatch: pytest.MonkeyPatch, rows: Path) -> None:
    result = invoke(monkeypatch, Daemon({8: 0.1}, state=JobState.CANCELLED), "--distill", str(rows))
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--distill", "nothing-there.jsonl"),
        ("--max-output-error", "0.1"),
        ("--distill", "generations", "--max-output-error", "0.1", "--max-error", "0.1"),
    ],
)
def test_what_is_refused_converts_nothing(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    daemon = Daemon({})
    assert invoke(monkeypatch, daemon, *options).exit_code == 2
    assert daemon.calls == []
