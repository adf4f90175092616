"""Logging for all processes: one handler on standard error, also for libraries."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import TracebackType

from coserve.core.logs.format import JsonFormatter, TextFormatter

ACCESS = "coserve.access"


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
