"""The access log: one record per response, written after its last byte."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from coserve.core.logs.format import log_event


class AccessLogger(AbstractAccessLogger):
    """Logs method, path without query, status, bytes, seconds, peer, and the response's `X-Request-Id`."""

    def __init__(self, logger: logging.Logger, log_format: str) -> None:
        super().__init__(logger, log_format)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        log_event(
            self.logger,
            "answered",
            method=request.method,
            path=request.path,
            status=response.status,
            bytes=response.body_length,
            seconds=round(time, 6),
            peer=request.remote,
            request=response.headers.get("X-Request-Id"),
        )
