"""One line per record, as text or as a JSON object. Line breaks in users' text are escaped."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

Value = str | int | float | bool | None


def log_event(log: logging.Logger, message: str, /, **fields: Value) -> None:
    """Log an info record with fields: ids, counts, seconds. A field that is None is left out."""
    log.info(message, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def escaped(text: str) -> str:
    """Return the text with control and format characters, line ends included, as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    return getattr(record, "fields", {})


def _time(record: logging.LogRecord) -> str:
    """Return ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process


class TextFormatter(_Formatter):
    """Formats `TIME PROCESS LEVEL LOGGER: MESSAGE NAME=VALUE ...`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {self._process} {record.levelname} {record.name}: {escaped(record.getMessage())}"
        line = head + "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        traceback = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join([line, *(f"    {escaped(part)}" for part in traceback)])


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = escaped(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or " " in text or '"' in text else text


class JsonFormatter(_Formatter):
    """Formats one JSON object: `ts`, `level`, `process`, `logger`, `message`, the record's fields, and `traceback` if
    any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Value] = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        assert not entry.keys() & _fields(record).keys(), _fields(record)
        entry |= _fields(record)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
