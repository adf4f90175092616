"""Checks the key, the scope and the quota of a request before its body is read. Also the routes below `/admin`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from functools import partial

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from coserve.api.access.keys import KeyRing, key_view
from coserve.api.access.quotas import Quotas
from coserve.api.access.scopes import scopes_of
from coserve.api.engine_client import EngineClient
from coserve.api.http.body_quota import BODY_QUOTA, BodyQuota, stop_counting
from coserve.api.http.route import Route
from coserve.api.http.security import Handler
from coserve.api.metrics.traces import PARENT, parent
from coserve.core.access.principal import Principal, Scope, act_as
from coserve.core.access.schemas import ApiKey, CreateKey, KeyList, LogLevel, NewKey, Quota, QuotaList, QuotaUse
from coserve.core.cancellation import uncancelled
from coserve.core.errors import EngineUnavailable, MissingScope, NotFound
from coserve.core.logs import log_event
from coserve.core.names import NAME_RULE, is_name
from coserve.state.files import FileStore
from coserve.state.registry.access import KeyRecord
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread

NOBODY = Principal("", frozenset())
"""Principal of a request that needs no key. It sees nothing."""


class Access:
    """Keys and quotas in memory, always equal to those in the registry."""

    def __init__(self, api_key: str | None, registry: RegistryThread, files: FileStore, engine: EngineClient) -> None:
        self._registry, self._files, self._engine = registry, files, engine
        self.keys, self.quotas = KeyRing(api_key), Quotas()
        self._open: defaultdict[str, set[asyncio.Transport]] = defaultdict(set)
        """Connections of requests in progress, by the id of their key; public routes left out."""
        self._arriving: Counter[str] = Counter()
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()
        self._closed: EngineUnavailable | None = None

    async def load(self) -> None:
        """Read keys and quotas, before the first request."""

        def read(registry: Registry) -> tuple[list[KeyRecord], dict[str, Quota]]:
            return registry.api_keys(), registry.quotas()

        records, quotas = await self._registry(read)
        self.keys.load(records)
        for project, quota in quotas.items():
            self.quotas.set(project, quota)

    def close(self, error: EngineUnavailable) -> None:
        """Refuse every later request with `error`, except on public routes."""
        self._closed = error

    @property
    def notes(self) -> tuple[str, ...]:
        """For /health: that the daemon waits for requests before it stops."""
        count = sum(map(len, self._open.values()))
        return () if self._closed is None else (f"stopping; requests in progress: {count}",)

    # ---- requests

    def identify(self, request: web.Request, public: bool) -> None:
        """Set the request's principal; `public`: the route needs no key. Raises `Unauthorized`, `MissingScope`,
        `EngineUnavailable` once closed."""
        if self._closed is not None and not public:
            raise self._closed
        found = NOBODY if public else self.keys.principal_of(_authorization(request))
        resource = request.match_info.route.resource
        if not public and resource is not None:
            needed = scopes_of(request.method, resource.canonical)
            if needed and not any(found.may(scope) for scope in needed):
                names = " or ".join(sorted(needed))
                raise MissingScope(f"expected an API key with the scope {names}", field="Authorization")
        request[PRINCIPAL] = found
        if request.transport is not None and not public:
            self.idle.clear()
            self._open[found.key].add(request.transport)  # a revocation of the key closes it
        act_as(found)
        parent.set(request.headers.get(PARENT))

    async def admit(self, request: web.Request) -> None:
        """Raise `QuotaExceeded` or `StorageQuotaExceeded` if the quota of the request's project is used up. Only POST
        requests count, except those to `/admin`."""
        project, resource = request[PRINCIPAL].project, request.match_info.route.resource
        if request.method != "POST" or resource is None or resource.canonical.startswith("/admin/"):
            return
        self.quotas.admit(project)
        limit = self.quotas.of(project).bytes
        if limit is None or Scope.TRAIN not in scopes_of(request.method, resource.canonical):
            return
        quota = request[BODY_QUOTA] = BodyQuota(project, limit, partial(self._used, project), self._arriving)
        await quota.check(request.content_length or 0)

    async def _used(self, project: str) -> int:
        """Bytes of a project's adapters and files."""
        adapters = await self._registry.read(lambda registry: registry.adapter_bytes(project))
        return adapters + self._files.bytes_of(project)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Forget requests that have ended."""
        transport = request.transport
        try:
            return await handler(request)
        finally:
            stop_counting(request)
            if (found := request.get(PRINCIPAL)) is not None and transport is not None:
                self._open[found.key].discard(transport)
                if not self._open[found.key]:
                    del self._open[found.key]
                if not self._open:
                    self.idle.set()

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: tell what is left of the quota before a response's headers are sent."""
        if (found := request.get(PRINCIPAL)) is not None:
            response.headers.update(self.quotas.headers(found.project))

    # ---- routes, for keys with the scope admin: keys, quotas, and settings that change while the daemon runs

    @Route("POST", "/admin/keys", "Create an API key", status=201, errors=(422, 507))
    async def create_key(self, body: CreateKey) -> NewKey:
        """Make a key; durable when this returns. Raises `InvalidRequest`."""
        record, secret = self.keys.make(body)
        await asyncio.shield(self._store(record))
        return NewKey(key=key_view(record), secret=secret)

    async def _store(self, record: KeyRecord) -> None:
        await self._registry(lambda registry: registry.add_key(record))
        self.keys.load([record])

    @Route("GET", "/admin/keys", "List API keys, revoked ones too, oldest first")
    async def list_keys(self) -> KeyList:
        return KeyList(data=self.keys.views())

    @Route("DELETE", "/admin/keys/{id}", "Revoke an API key; its requests in progress are cut off", errors=(507,))
    async def revoke_key(self, id: str) -> ApiKey:
        """Revoke a key: later requests get 401, and connections of those in progress are closed. Raises `NotFound`,
        `InvalidRequest` for the last administrator's key."""
        return key_view(await asyncio.shield(self._revoke(id)))

    async def _revoke(self, id: str) -> KeyRecord:
        record = await self._registry(lambda registry: registry.revoke_key(id, last_admin=self.keys.has_own))
        self.keys.load([record])
        for transport in tuple(self._open.get(id, ())):
            transport.abort()
        return record

    @Route("GET", "/admin/quotas", "List the quotas of projects, and what they use")
    async def list_quotas(self) -> QuotaList:
        quotas = dict(self.quotas.all)
        jobs = await self._registry.read(lambda registry: {each: registry.unfinished_of(each) for each in quotas})
        used = {each: QuotaUse(jobs=count, bytes=await self._used(each)) for each, count in jobs.items()}
        return QuotaList(data=quotas, used=used)

    @Route("PUT", "/admin/quotas/{id}", "Replace the quota of a project", errors=(422, 507))
    async def set_quota(self, id: str, body: Quota) -> Quota:
        if not is_name(id):
            raise NotFound(f"expected {NAME_RULE}", field="id")
        await uncancelled(asyncio.create_task(self._set_quota(id, body)))
        return body

    async def _set_quota(self, project: str, quota: Quota) -> None:
        await self._registry(lambda registry: registry.set_quota(project, quota))
        self.quotas.set(project, quota)

    @Route("PUT", "/admin/log-level", "Change the log level until the daemon ends", errors=(422,))
    async def set_log_level(self, body: LogLevel) -> LogLevel:
        logging.getLogger().setLevel(body.level.upper())
        self._engine.set_log_level(body.level)
        return body


def _authorization(request: web.Request) -> str:
    """Return the request's `Authorization`. Tinker's SDK sends the key as `X-API-Key`, with a prefix `tml-` that is
    removed here."""
    key = request.headers.get("X-API-Key")
    return request.headers.get("Authorization", "") if key is None else f"Bearer {key.removeprefix('tml-')}"


PRINCIPAL = web.RequestKey("principal", Principal)
"""The principal of the request, set by the gate."""


class AccessLogger(AbstractAccessLogger):
    """Logs one record per response, after its last byte: method, path without query, status, bytes, seconds, peer, the
    response's `X-Request-Id`, and the project and the id of the API key if the request had one."""

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
