"""`/admin`, for keys with the scope admin: API keys, quotas, and settings that change while the daemon runs."""

from __future__ import annotations

import logging

from aiohttp import web

from coserve.api.access.access import Access
from coserve.api.access.keys import key_view
from coserve.api.engine_client import EngineClient
from coserve.api.http.bodies import BodyReader
from coserve.api.http.route import Route
from coserve.core.access.schemas import ApiKey, CreateKey, KeyList, LogLevel, NewKey, Quota, QuotaList
from coserve.core.errors import NotFound
from coserve.core.names import NAME_RULE, is_name


class AdminApi:
    def __init__(self, access: Access, engine: EngineClient, bodies: BodyReader) -> None:
        self._access, self._engine, self._bodies = access, engine, bodies

    @Route("POST", "/admin/keys", "Create an API key", status=201, errors=(422, 507))
    async def create_key(self, body: CreateKey) -> NewKey:
        return await self._access.create_key(body)

    @Route("GET", "/admin/keys", "List API keys, revoked ones too, oldest first")
    async def list_keys(self) -> KeyList:
        return KeyList(data=self._access.keys.views())

    @Route("DELETE", "/admin/keys/{id}", "Revoke an API key; its requests in progress are cut off", errors=(507,))
    async def revoke_key(self, id: str) -> ApiKey:
        return key_view(await self._access.revoke_key(id))

    @Route("GET", "/admin/quotas", "List the quotas of projects")
    async def list_quotas(self) -> QuotaList:
        return QuotaList(data=dict(self._access.quotas.all))

    @Route("PUT", "/admin/quotas/{id}", "Replace the quota of a project", body=Quota, errors=(422, 507))
    async def set_quota(self, request: web.Request, id: str) -> Quota:
        if not is_name(id):
            raise NotFound(f"expected {NAME_RULE}", field="id")
        quota = await self._bodies.read(request, Quota)
        await self._access.set_quota(id, quota)
        return quota

    @Route("PUT", "/admin/log-level", "Change the log level until the daemon ends", errors=(422,))
    async def set_log_level(self, body: LogLevel) -> LogLevel:
        logging.getLogger().setLevel(body.level.upper())
        self._engine.set_log_level(body.level)
        return body
