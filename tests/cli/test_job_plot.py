"""`coserve jobs plot`: the steps that it draws, and the file that it leaves."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli import jobs
from coserve.cli.app import app
from coserve.cli.job_plot import collect_steps, learned_curves
from coserve.core.schemas import JobEvent
from coserve.core.step_metrics import Rewards
from coserve.core.training.jobs import JobState
from tests.support.examples import sample
from tests.support.fake_engine import metrics
from tests.support.sdk import job


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


@pytest.mark.parametrize("accuracy", sample([False, True], True))  # not known of a job of an earlier release
def test_a_picture_of_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: bool) -> None:
    info = msgspec.structs.replace(job(JobState.SUCCEEDED), step=2)
    first = event(1, 1)
    assert first.metrics is not None
    counted = msgspec.structs.replace(first.metrics, token_accuracy=0.5, valid_token_accuracy=0.25, valid_loss=1.0)
    events = [msgspec.structs.replace(first, metrics=counted if accuracy else first.metrics), event(2, 2)]
    events.append(event(3, state=JobState.SUCCEEDED))
    handle = SimpleNamespace(id="job-1", info=info, events=lambda: (each for each in events))
    monkeypatch.setattr(jobs, "connect", lambda *_: nullcontext(SimpleNamespace(job=lambda _: handle)))
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
