"""The daemon tells a tracker of its jobs: beside them, later where it fails, on after a restart and a kill -9."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coserve.api.tracking.feed import Cursor, Cursors
from coserve.api.tracking.libraries import check_trackers
from coserve.api.tracking.points import run_of
from coserve.core.errors import ConfigError
from coserve.core.link.jobs import JobProgress, JobStarted
from tests.support.api_server import Api, serve_api
from tests.support.crash_oracle import STEPS, job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.event_files import read_curve
from tests.support.examples import on_days
from tests.support.fake_engine import metrics
from tests.support.model_folder import make_model_folder
from tests.support.records import make_job

pytest.importorskip("tensorboardX")


serve = partial(serve_api, tracker=("tensorboard",), closing=600.0)
"""A tracker's process may take longer to start than a daemon would wait."""
REQUEST = {"adapter": "poet", "data": [{"text": "one two three"}], "training": {"steps": 3}, "lora": {"r": 2}}
CURVE = [(1, 3.0), (2, 1.5), (3, 1.0)]


async def submit(api: Api) -> str:
    job = await api.answered(202, "POST", "/finetune", json=REQUEST)
    return str(job["id"])


async def until(true: Callable[[], Any]) -> None:
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never became true")


def curve(folder: Path, job: str) -> list[tuple[int, float]]:
    return read_curve(folder / "tensorboard" / f"poet@1-{job}")


def cursors(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tensorboard" / "cursors").glob("*")]


async def test_a_jobs_curve_is_in_event_files_soon_after_its_end(tmp_path: Path) -> None:
    async with serve(tmp_path / "data") as api:
        job = await submit(api)
        await api.job_until(job, "succeeded")
    assert curve(tmp_path / "data" / "tracking", job) == CURVE  # at the latest when the daemon stops
    assert cursors(tmp_path / "data" / "tracking") == []


@pytest.mark.slow
async def test_steps_that_an_engine_or_a_daemon_repeats_are_told_once(tmp_path: Path) -> None:
    tracking = tmp_path / "curves"
    async with serve(tmp_path / "data", tracking_dir=tracking) as api:
        api.engine.go_jobs.clear()
        job = await submit(api)
        await api.hear(JobStarted(id=job, total_steps=3))
        await api.hear(JobProgress(id=job, metrics=metrics(1, 3)))
        await api.hear(JobProgress(id=job, metrics=metrics(2, 3)))
        await until(lambda: len(curve(tracking, job)) == 2)
        await api.hear(JobStarted(id=job, total_steps=3, resumed_from=1))
        await api.hear(JobProgress(id=job, metrics=metrics(2, 3)))
    assert curve(tracking, job) == CURVE[:2]
    assert cursors(tracking) == [f"{job}.json"]
    async with serve(tmp_path / "data", tracking_dir=tracking) as api:
        await api.job_until(job, "succeeded")  # the new engine begins at step 1
    assert curve(tracking, job) == CURVE


def test_a_cursor_that_cannot_be_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All steps are sent again: the sink stores them once."""
    cursors = Cursors(tmp_path)
    cursors.write("job-1", Cursor(seq=7, step=2))
    assert cursors.read("job-1") == Cursor(seq=7, step=2) and not caplog.records
    (tmp_path / "job-1.json").write_text("no")
    assert cursors.read("job-1") == Cursor()
    assert "job-1.json cannot be read" in caplog.text


@pytest.mark.slow
async def test_a_tracker_that_fails_is_in_the_health_and_disturbs_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = tmp_path / "curves"
    tracking.mkdir()
    (tracking / "tensorboard").write_text("no folder")
    async with serve(tmp_path / "data", tracking_dir=tracking) as api:
        job = await submit(api)
        done = await api.job_until(job, "succeeded")
        assert done["result"] == "poet@1"
        await until(lambda: api.service.health().notes[-1].startswith("tracker tensorboard: "))
        (tracking / "tensorboard").unlink()
        await until(lambda: tracking.joinpath("tensorboard").is_dir() and curve(tracking, job) == CURVE)
        await until(lambda: not [note for note in api.service.health().notes if "tracker" in note])
    assert len([record for record in caplog.records if record.message.endswith("trying again")]) == 1


def test_a_run_has_the_settings_that_were_left_to_their_defaults() -> None:
    record = make_job()
    assert record.spec.lora.alpha is None
    settings = run_of(record).settings
    assert settings["lora.alpha"] == 2 * record.spec.lora.r
    assert settings["training.seed"] == record.spec.training.seed


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"tensorboardX, which is not installed: pip install 'coserve\[tensorboard\]'"
    ):
        check_trackers(("tensorboard",))
    check_trackers(())


@on_days(5)
def test_a_killed_daemon_leaves_a_curve_that_goes_on(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    options = ("--tracker", "tensorboard")
    slowly = "finetune.mid_step=delay:3s"
    with DaemonProcess(model, tmp_path / "data", failpoints=slowly, options=options) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("poet"))
        folder = tmp_path / "data" / "tracking" / "tensorboard" / f"poet@1-{job['id']}"
        for _ in range(600):
            if before := read_curve(folder):
                break
            time.sleep(0.1)
        assert daemon.end() == -9
    with DaemonProcess(model, tmp_path / "data", options=options) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert daemon.stop() == 0
    curve = read_curve(folder)
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))
    assert 0 < len(before) < STEPS
    assert before == curve[: len(before)]
    told = {event["metrics"]["step"]: event["metrics"]["loss"] for event in events if event["metrics"]}
    assert dict(curve) == pytest.approx(told)
