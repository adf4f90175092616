"""Schemathesis on the whole OpenAPI file of a real daemon: answers are what the file says. The benchmark
`clients/openapi_cases.py` sends far more cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clients.openapi_cases import daemon, make_records, run, wrong_answers
from tests.support.examples import on_days

pytest.importorskip("schemathesis")


@on_days(4)
def test_random_requests_get_answers_that_the_file_describes(tmp_path: Path) -> None:
    with daemon(tmp_path) as url:
        report, statuses = run(url, 2, tmp_path, make_records(url, tmp_path), phases="fuzzing")
    assert report["operations"]["tested"] > 90
    assert not wrong_answers(report, statuses), (tmp_path / "schemathesis.log").read_text()
