"""Logging as both processes set it up: one handler on standard error, for the libraries' records too."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Literal

from coserve.config import Config
from coserve.logs.format import JsonFormatter, TextFormatter

ACCESS = "coserve.access"


def set_up_logging(process: Literal["api", "engine"], config: Config) -> None:
    """Call it after the imports: handlers that libraries gave themselves go."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if config.log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and any(isinstance(h, logging.StreamHandler) for h in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    logging.getLogger(ACCESS).setLevel(logging.INFO if config.access_log else logging.CRITICAL)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("coserve").critical("the process ends by a fault", exc_info=(kind, error, traceback))
