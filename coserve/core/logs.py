"""Logging for all processes: one line per record on standard error, also for libraries, as text or as a JSON object.
Line breaks in users' text are escaped."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

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


ACCESS = "coserve.access"
"""Name of the access log's logger."""


@dataclass(frozen=True)
class LogSettings:
    """Log settings of a process (`Config.logs`)."""

    level: str = "info"
    format: str = "text"
    access: bool = False


def set_up_logging(process: str, settings: LogSettings) -> None:
    """Configure logging in this process. `process`: its name in the records (api, engine, rank-1, helper, warm). Call
    it after the imports, since it removes handlers that libraries installed."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(isinstance(h, logging.StreamHandler) for h in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.getLogger(ACCESS).setLevel(logging.INFO if settings.access else logging.CRITICAL)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("coserve").critical("the process ends by a fault", exc_info=(kind, error, traceback))


class ThrottledLog:
    """Logs the warning `what` to `log` at most once per `INTERVAL` seconds, with the number of warnings suppressed."""

    INTERVAL: Final = 60.0

    def __init__(self, log: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._what, self._clock = log, what, clock
        self._last: float | None = None
        self._unlogged = 0

    def warn(self, detail: str = "") -> None:
        """Log the warning if it is due. `detail` is appended to `what`."""
        now = self._clock()
        if self._last is not None and now - self._last < self.INTERVAL:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} times more since the last warning)" if self._unlogged else ""
        self._log.warning("%s%s%s", self._what, detail, more)
        self._last, self._unlogged = now, 0
