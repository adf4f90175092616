"""`coserve jobs`: its tables, the picture of a job, its samples, and what `watch` leaves for the shell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli import common
from coserve.cli.app import app
from coserve.cli.common import json_text
from coserve.cli.job_plot import collect_steps, learned_curves, plot_title
from coserve.cli.job_table import age, chosen_line, cut_line, job_line, job_notes, job_table
from coserve.core.schemas.documents import DocumentJob, DocumentSettings
from coserve.core.schemas.jobs import Job, JobEvent, JobList, Preparing, Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.core.training.step_metrics import Rewards
from tests.support.examples import by_day
from tests.support.fake_engine import metrics
from tests.support.records import make_metrics
from tests.support.sdk import job

METRICS = msgspec.structs.replace(make_metrics(5, 20, 1.2345), token_accuracy=0.375, perplexity=3.4367)
JOB = job(
    JobState.RUNNING,
    adapter="poet",
    version=2,
    created_at=1000.0,
    started_at=1001.0,
    step=5,
    total_steps=20,
    progress=0.25,
    eta=65.4,
    loss=1.2345,
    metrics=METRICS,
    trained_tokens=50,
    rows=30,
    tokens=900,
    target_tokens=900,
    training=TrainingSettings(epochs=12, batch_tokens=64, learning_rate=0.004),
    rows_cut=3,
    auto=["batch_tokens", "epochs", "learning_rate"],
)
FAILED = msgspec.structs.replace(
    JOB,
    id="job-2",
    state=JobState.FAILED,
    eta=None,
    loss=None,
    metrics=None,
    rows_cut=0,
    auto=[],
    error=ErrorInfo(code="non_finite_loss", message="x"),
)
QUEUED = msgspec.structs.replace(FAILED, id="job-3", state=JobState.QUEUED, queue_position=4, error=None)


def test_columns() -> None:
    header, running, failed, queued = job_table([JOB, FAILED, QUEUED], now=1000.0 + 7300)
    assert header.split() == ["ID", "ADAPTER", "STATE", "STEP", "LOSS", "AGE", "LEFT"]
    assert running.split() == ["job-1", "poet@2", "running", "5/20", "1.234", "2h", "1:05"]
    assert failed.split()[2] == "failed" and queued.split()[2] == "queued"
    assert len({line.index(word) for line, word in ((header, "AGE"), (running, "2h"), (failed, "2h"))}) == 1
    assert list(job_table([])) == ["  ".join(header.split())]


def test_a_document_shows_its_phase_until_it_is_trained() -> None:
    asking = DocumentJob(settings=DocumentSettings(), phase="answers", done=14, total=16)
    for document, step in ((asking, "answers 14/16"), (msgspec.structs.replace(asking, total=0), "5/20")):
        _, line = job_table([msgspec.structs.replace(JOB, document=document)], now=1300.0)
        assert f"running  {step}  " in line


def test_notes_are_below_their_jobs() -> None:
    noted = msgspec.structs.replace(JOB, notes=["it replaces version 1"], waiting="waiting for memory")
    lines = list(job_table([noted, FAILED, QUEUED], notes=True))
    assert [line.strip() for line in lines if line.startswith("    ")] == [
        "waiting for memory",
        "3 rows cut",
        "it replaces version 1",
        "non_finite_loss: x",
        "4 ahead",
    ]
    assert [line.split()[0] for line in lines if not line.startswith("    ")] == ["ID", "job-1", "job-2", "job-3"]


@pytest.mark.parametrize("name", ["poet", "support-tickets-of-the-second-quarter", "x" * 64])
def test_lines_fit_a_terminal(name: str) -> None:
    job = msgspec.structs.replace(JOB, id="job-0123456789abcdef", adapter=name, version=12, eta=36_000.0, step=12_000)
    lines = list(job_table([msgspec.structs.replace(job, total_steps=20_000), FAILED], width=80))
    assert max(map(len, lines)) <= 80 and "@12  running  12000/20000" in lines[1] and "poet@2" in lines[2]
    whole = list(job_table([job, FAILED]))
    assert f"{name}@12" in whole[1], "a pipe gets all of it"


def test_a_job_on_its_own() -> None:
    assert "  loss 1.234  perplexity 3.437  accuracy 37.5%" in job_line(JOB)
    evaluated = msgspec.structs.replace(JOB, metrics=msgspec.structs.replace(METRICS, valid_loss=2.5))
    assert "  loss 1.234  validation loss 2.500  perplexity 3.437" in job_line(evaluated)
    assert job_line(FAILED) == "job-2  poet@2  failed  step 5/20  non_finite_loss: x"


def test_a_job_that_stopped_early_says_so_and_which_step_it_has_published() -> None:
    best = msgspec.structs.replace(METRICS, valid_loss=0.032, best_valid_loss=0.014, best_step=3)
    running = msgspec.structs.replace(JOB, metrics=best)
    assert "  step 5/20  loss 1.234  validation loss 0.032 (best: 0.014 of step 3)  perplexity" in job_line(running)
    ended = msgspec.structs.replace(running, state=JobState.SUCCEEDED, stopped_early=True, published_step=3)
    assert "  step 5/20, stopped early  loss 1.234  validation loss 0.032 (published: 0.014 of step 3)" in job_line(
        ended
    )
    assert "stopped early, step 3 published" in job_notes(ended)
    assert plot_title(ended) == "poet@2  (job-1, succeeded, step 5/20, stopped early, step 3 published (dashed))"
    whole = msgspec.structs.replace(ended, stopped_early=False, published_step=5)
    assert plot_title(whole) == "poet@2  (job-1, succeeded, step 5/20)"


def test_a_dpo_job_shows_the_accuracy_of_its_pairs_not_of_tokens() -> None:
    rewards = Rewards(chosen=1.0, rejected=-1.25, margin=2.25, accuracy=0.5)
    job = msgspec.structs.replace(JOB, metrics=msgspec.structs.replace(METRICS, rewards=rewards, perplexity=None))
    assert job_line(job).endswith("  loss 1.234  reward accuracy 50.0%  reward margin 2.25")


@pytest.mark.parametrize(("seconds", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (200_000, "2d")])
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_what_was_chosen_and_what_was_cut() -> None:
    assert chosen_line(JOB) == "chosen for 30 rows of 900 tokens: 12 epochs, batches of 64 tokens, learning rate 0.004"
    assert chosen_line(FAILED) is None
    assert str(cut_line(JOB)).startswith("warning: 3 of 30 rows were too long")
    assert cut_line(FAILED) is None


def test_json_is_a_line_for_programs_and_indented_for_readers() -> None:
    line, shown = json_text(JOB, False), json_text(JOB, True)
    assert json.loads(line) == json.loads(shown)
    assert "\n" not in line and '\n  "id": "job-1",\n' in shown


def test_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, int | None]] = []

    def jobs(*, after: str | None, limit: int | None) -> JobList:
        asked.append((after, limit))
        preparing = [Preparing("novelist", 0.0, 41_000, 0.337)] if after is None else []
        return JobList(data=[JOB], has_more=True, preparing=preparing)

    client = SimpleNamespace(jobs=jobs, health=lambda: SimpleNamespace(status="ready"))
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(client))
    shown = CliRunner().invoke(app, ["jobs", "list", "--limit", "1", "--after", "job-9"])
    assert asked == [("job-9", 1)]
    assert "coserve jobs list --limit 1 --after job-1" in shown.stderr
    assert "preparing" not in shown.stdout
    first = CliRunner().invoke(app, ["jobs", "list"]).stdout.splitlines()
    assert first[0] == "preparing novelist: 41000 rows tokenised (34%)" and first[1].startswith("ID")
    as_json = CliRunner().invoke(app, ["jobs", "list", "--json"])
    assert msgspec.json.decode(as_json.stdout, type=Job) == JOB


def event(seq: int, step: int = 0, state: JobState | None = None) -> JobEvent:
    own = metrics(step, 4) if step else None
    kind = "state" if state is not None else "metrics"
    return JobEvent(seq=seq, job="job-1", created_at=1.0, level="info", type=kind, message="", metrics=own, state=state)


def test_of_a_job_that_trains_the_steps_so_far_and_each_once() -> None:
    events = iter([event(1, 1), event(2, 2), event(3, state=JobState.RUNNING), event(4, 2), event(5, 3), event(6, 4)])
    running = msgspec.structs.replace(job(JobState.RUNNING), step=3)
    assert [step.step for step in collect_steps(running, events)] == [1, 2, 3]
    assert next(events).seq == 6  # what comes later was not waited for
    assert collect_steps(msgspec.structs.replace(running, step=0), events) == []


@pytest.mark.parametrize("accuracy", by_day([False, True], True))  # not known of a job of an earlier release
def test_a_picture_of_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: bool) -> None:
    info = msgspec.structs.replace(job(JobState.SUCCEEDED), step=2)
    first = event(1, 1)
    assert first.metrics is not None
    counted = msgspec.structs.replace(first.metrics, token_accuracy=0.5, valid_token_accuracy=0.25, valid_loss=1.0)
    events = [msgspec.structs.replace(first, metrics=counted if accuracy else first.metrics), event(2, 2)]
    events.append(event(3, state=JobState.SUCCEEDED))
    handle = SimpleNamespace(id="job-1", info=info, events=lambda: (each for each in events))
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(job=lambda _: handle)))
    file = tmp_path / "curve.png"
    result = CliRunner().invoke(app, ["jobs", "plot", "job-1", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_dpo_job_has_curves_of_its_rewards_and_none_of_token_accuracy() -> None:
    plain = msgspec.structs.replace(metrics(1, 2), token_accuracy=0.5)
    pair = msgspec.structs.replace(plain, rewards=Rewards(chosen=1.0, rejected=-1.0, margin=2.0, accuracy=0.75))
    evaluated = msgspec.structs.replace(
        pair, step=2, valid_rewards=Rewards(chosen=0, rejected=-1, margin=1, accuracy=1)
    )
    assert learned_curves([pair, evaluated]) == {
        "reward margin": [(1, 2.0, None), (2, 2.0, 1.0)],
        "reward accuracy": [(1, 0.75, None), (2, 0.75, 1.0)],
    }
    assert learned_curves([plain]) == {"token accuracy": [(1, 0.5, None)]}
    assert learned_curves([metrics(1, 2)]) == {}


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
