"""The routes of aliases."""

from __future__ import annotations

from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.parsing import ref_from_path
from coserve.api.http.responses import json_response
from coserve.api.http.route import Route
from coserve.api.service import Service
from coserve.core.errors import InvalidRequest
from coserve.core.schemas import Alias, AliasList, AliasRequest


class AliasApi:
    """One method per route."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._aliases, self._bodies = service.aliases, bodies

    @Route("GET", "/aliases", "List aliases of adapters", response=AliasList)
    async def list_aliases(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._aliases.list())

    @Route("GET", "/aliases/{id}", "Show an alias", response=Alias)
    async def get_alias(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._aliases.get(_name(request)))

    @Route(
        "PUT",
        "/aliases/{id}",
        "Let a name mean a version of an adapter, and give a share of its requests to another one",
        body=AliasRequest,
        response=Alias,
        errors=(409, 507),
    )
    async def put_alias(self, request: web.Request) -> web.StreamResponse:
        body = await self._bodies.read(request, AliasRequest)
        return json_response(await self._aliases.put(_name(request), body))

    @Route(
        "POST", "/aliases/{id}/promote", "Give all requests of an alias to its canary", response=Alias, errors=(507,)
    )
    async def promote_alias(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._aliases.promote(_name(request)))

    @Route(
        "POST",
        "/aliases/{id}/rollback",
        "Take an alias's requests from its canary, or return to the version that it meant before",
        response=Alias,
        errors=(507,),
    )
    async def roll_back_alias(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._aliases.roll_back(_name(request)))

    @Route("DELETE", "/aliases/{id}", "Delete an alias; the adapter stays", response=Alias, errors=(507,))
    async def delete_alias(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._aliases.delete(_name(request)))


def _name(request: web.Request) -> str:
    name, version = ref_from_path(request.match_info["id"])
    if version is not None:
        raise InvalidRequest("expected a name without a version", field="id")
    return name
