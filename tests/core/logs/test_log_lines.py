"""A record is one line, whatever text users sent, and a storm one line a minute; changes are logged once committed."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coserve.core.errors import StorageFull
from coserve.core.logs import JsonFormatter, TextFormatter, ThrottledLog, log_event
from coserve.state.failpoints import armed
from coserve.state.registry.registry import Registry
from tests.support.records import import_adapter, make_adapter, make_job

FORMATTERS = (TextFormatter("api"), JsonFormatter("api"))


def record(message: str, fields: dict[str, object] | None = None, *, error: bool = False) -> logging.LogRecord:
    made = logging.LogRecord("coserve.test", logging.INFO, "x.py", 1, message, None, sys.exc_info() if error else None)
    made.fields = fields or {}
    return made


@example("\x1b[2J\r\n2026-11-22 api INFO forged\u202e\x00\x85\u2028")
@given(st.text())
def test_users_text_stays_on_its_line_and_controls_nothing(text: str) -> None:
    for formatter in FORMATTERS:
        line = formatter.format(record(f"said {text}", {"name": text}))
        assert len(line.splitlines()) == 1
        assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")]


@given(st.text())
def test_json_gives_back_what_was_logged(text: str) -> None:
    entry = json.loads(FORMATTERS[1].format(record(text, {"job": text, "seconds": 1.5, "rows": 3})))
    assert (entry["message"], entry["job"], entry["seconds"], entry["rows"]) == (text, text, 1.5, 3)
    assert (entry["level"], entry["process"], entry["logger"]) == ("info", "api", "coserve.test")
    assert entry["ts"].endswith("Z")


def test_no_line_of_a_traceback_looks_like_a_record() -> None:
    try:
        raise ValueError("bad\n2026-11-22T00:00:00.000Z api INFO forged: \x1b[1m")
    except ValueError:
        text, whole = (formatter.format(record("failed", error=True)) for formatter in FORMATTERS)
    head, *rest = text.splitlines()
    assert head.endswith("failed")
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in text
    assert "ValueError" in json.loads(whole)["traceback"]


def test_text_shows_fields_as_name_and_value() -> None:
    line = FORMATTERS[0].format(record("job accepted", {"job": "j-1", "reason": "a b", "seconds": 0.5, "rows": 3}))
    assert line.endswith(' api INFO coserve.test: job accepted job=j-1 reason="a b" seconds=0.500 rows=3')


def test_fields_that_are_none_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(logging.getLogger("coserve.test"), "told", job="j", error=None)
    assert caplog.records[-1].fields == {"job": "j"}


def test_what_is_not_committed_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(tmp_path / "registry.sqlite")
    caplog.set_level(logging.INFO)
    with armed("registry.before_commit=ENOSPC@1"), pytest.raises(StorageFull):
        registry.create_job(make_job("j1"))
    assert caplog.messages == []
    registry.create_job(make_job("j1"))
    import_adapter(registry, make_adapter("imported"))
    registry.delete_adapter("imported")
    assert caplog.messages == ["job accepted", "adapter imported", "adapter deleted"]
    registry.close()


def test_a_storm_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    storm = ThrottledLog(logging.getLogger(__name__), "no room", lambda: now)
    for now in (0.0, 0.1, 30.0, 61.0, 62.0):  # noqa: B007  # the clock reads it
        storm.warn(": 3 of 3")
    assert [record.getMessage() for record in caplog.records] == [
        "no room: 3 of 3",
        "no room: 3 of 3 (2 times more since the last warning)",
    ]
