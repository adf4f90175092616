"""What `coserve jobs watch` leaves for the shell."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coserve.cli import jobs
from coserve.cli.app import app
from coserve.types import JobState
from tests.support.sdk import job


@pytest.mark.parametrize(("state", "status"), [(JobState.SUCCEEDED, 0), (JobState.CANCELLED, 1)])
def test_a_job_that_left_no_adapter_is_a_failure_to_the_shell(
    state: JobState, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = SimpleNamespace(id="job-1", info=job(), wait=lambda: job(state))
    client = nullcontext(SimpleNamespace(job=lambda _: handle))
    monkeypatch.setattr(jobs, "connect", lambda *_: client)
    result = CliRunner().invoke(app, ["jobs", "watch", "job-1"])
    assert result.exit_code == status, result.output
    assert state.value in result.output
