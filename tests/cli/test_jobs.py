"""What `coserve finetune` asks for, and what `coserve jobs watch` leaves for the shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli import common
from coserve.cli.app import app, run
from coserve.cli.failures import USAGE
from coserve.cli.finetuning import command
from coserve.core.schemas import JobEvent, Sample
from coserve.core.training.jobs import JobState
from tests.support.sdk import job


@pytest.mark.parametrize(("state", "status"), [(JobState.SUCCEEDED, 0), (JobState.CANCELLED, 1)])
def test_a_job_that_left_no_adapter_is_a_failure_to_the_shell(
    state: JobState, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = SimpleNamespace(id="job-1", info=job(), wait=lambda: job(state))
    client = nullcontext(SimpleNamespace(job=lambda _: handle))
    monkeypatch.setattr(common, "connect", lambda *_: client)
    result = CliRunner().invoke(app, ["jobs", "watch", "job-1"])
    assert result.exit_code == status, result.output
    assert state.value in result.output


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        (["--targets", "q_proj, v_proj"], ["q_proj", "v_proj"]),
        (["--targets", "q_proj", "--targets", "k_proj,v_proj"], ["q_proj", "k_proj", "v_proj"]),
        (["--targets", ","], []),
        ([], None),
    ],
)
def test_targets_are_names_between_commas(
    options: list[str], targets: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def finetune(name: str, **given: object) -> SimpleNamespace:
        asked.append(given["lora"])
        return SimpleNamespace(info=job())

    monkeypatch.setattr(command, "connect", lambda *_: nullcontext(SimpleNamespace(finetune=finetune)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    result = CliRunner().invoke(app, ["finetune", "name", str(rows), "--rank", "4", "--detach", *options])
    assert result.exit_code == 0, result.output
    assert asked == [{"r": 4} if targets is None else {"r": 4, "targets": targets}]


@pytest.mark.parametrize(
    ("options", "training"),
    [
        (["--dpo-beta", "0.2"], {"loss": {"type": "dpo", "beta": 0.2}}),
        (["--optimizer", "lion_8bit"], {"optimizer": "lion_8bit"}),
        (["--learning-rate", "1e-4", "--lora-plus-ratio", "16"], {"learning_rate": 1e-4, "lora_plus_ratio": 16.0}),
        (["--neftune-alpha", "5"], {"neftune_alpha": 5.0}),
        (
            ["--sample-prompt", "Ahoy, ", "--sample-prompt", "Who?", "--sample-steps", "5", "--sample-max-tokens", "9"],
            {"sample_prompts": ["Ahoy, ", "Who?"], "sample_steps": 5, "sample_max_tokens": 9},
        ),
    ],
)
def test_options_become_training_settings(
    options: list[str], training: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def finetune(name: str, **given: object) -> SimpleNamespace:
        asked.append(given["training"])
        return SimpleNamespace(info=job())

    monkeypatch.setattr(command, "connect", lambda *_: nullcontext(SimpleNamespace(finetune=finetune)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = CliRunner().invoke(app, ["finetune", "name", str(rows), "--detach", *options])
    assert result.exit_code == 0, result.output
    assert asked == [training]


SAMPLES = [
    Sample(step=step, prompt=0, text=text, finish_reason="stop") for step, text in ((2, "a\x1b[31m\nb"), (4, "c"))
]


def sample_events() -> Iterator[JobEvent]:
    """Live ones: nothing may be read after the last sample."""
    for seq, sample in enumerate(SAMPLES):
        yield JobEvent(seq=seq, job="job-1", created_at=1.0, level="info", type="sample", message="", sample=sample)
    raise AssertionError("the job has no more samples")


def test_the_samples_of_a_job_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    info = job(JobState.RUNNING, samples=SAMPLES[1:])
    client = SimpleNamespace(job=lambda _: SimpleNamespace(info=info, events=sample_events))
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    shown = CliRunner().invoke(app, ["jobs", "samples", "job-1"])
    assert shown.output == "step 2, sample 0:\n  a [31m\n  b\nstep 4, sample 0:\n  c\n"
    listed = CliRunner().invoke(app, ["jobs", "samples", "job-1", "--json"])
    assert [msgspec.json.decode(line, type=Sample) for line in listed.output.splitlines()] == SAMPLES


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adamw_torch", "paged_lion_8bit, got 'adamw_torch'; did you mean 'adamw'?"),
        ("adamw_bnb_8bit", "did you mean 'adamw_8bit'?"),
        ("paged_adamw_32bit", "did you mean 'paged_adamw'?"),
        (
            "sgd",
            (
                "expected one of adamw, adamw_8bit, lion, lion_8bit, paged_adamw, paged_adamw_8bit, paged_lion, "
                "paged_lion_8bit, got 'sgd'"
            ),
        ),
    ],
)
def test_another_librarys_name_of_an_optimizer_is_answered_with_ours(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    assert run(["finetune", "name", str(rows), "--optimizer", name]) == USAGE
    said = capsys.readouterr().err
    assert says in said and "--optimizer" in said


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (["--columns", "prompt=question, completion=the answer"], {"prompt": "question", "completion": "the answer"}),
        (["--columns", "prompt=q", "--columns", "completion=a=b"], {"prompt": "q", "completion": "a=b"}),
        (["--set", 'columns={"prompt": "a,b"}'], {"prompt": "a,b"}),
    ],
)
def test_columns_are_named_by_field(
    options: list[str], columns: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def finetune(name: str, **given: object) -> SimpleNamespace:
        asked.append(given["columns"])
        return SimpleNamespace(info=job())

    monkeypatch.setattr(command, "connect", lambda *_: nullcontext(SimpleNamespace(finetune=finetune)))
    (tmp_path / "rows.csv").write_text("q,a\n1,2\n")
    result = CliRunner().invoke(app, ["finetune", "name", str(tmp_path / "rows.csv"), "--detach", *options])
    assert result.exit_code == 0, result.output
    assert asked == [columns]


@pytest.mark.parametrize("text", ["prompt", "prompt=", "=question", "prompt=q,,completion=a"])
def test_columns_that_name_nothing(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("q,a\n1,2\n")
    assert run(["finetune", "name", str(tmp_path / "rows.csv"), "--columns", text]) == USAGE
    assert "expected FIELD=COLUMN,..." in capsys.readouterr().err
