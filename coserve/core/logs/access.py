"""The access log: one record per response, written after its last byte."""

from __future__ import annotations

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from coserve.core.access.principal import Principal
from coserve.core.logs.format import log_event

PRINCIPAL = web.RequestKey("principal", Principal)
"""The principal of the request, set by the gate."""


class AccessLogger(AbstractAccessLogger):
    """Logs method, path without query, status, bytes, seconds, peer, the response's `X-Request-Id`, and the project and
    the id of the API key if the request had one."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        found = request.get(PRINCIPAL)
        key = None if found is None else found.key or None
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
            project=None if found is None or key is None else found.project,
            key=key,
        )
