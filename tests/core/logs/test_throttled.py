"""A storm is one line a minute."""

from __future__ import annotations

import logging

import pytest

from coserve.core.logs.throttled import ThrottledLog


def test_a_storm_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    storm = ThrottledLog(logging.getLogger(__name__), "no room", lambda: now)
    for now in (0.0, 0.1, 30.0, 61.0, 62.0):  # noqa: B007  # the clock reads it
        storm.warn(": 3 of 3")
    assert [record.getMessage() for record in caplog.records] == [
        "no room: 3 of 3",
        "no room: 3 of 3 (2 times more since the last warning)",
    ]
