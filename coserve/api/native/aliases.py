"""The routes of aliases."""

from __future__ import annotations

from coserve.api.http.parsing import ref_from_path
from coserve.api.http.route import Route
from coserve.api.service import Service
from coserve.core.errors import InvalidRequest
from coserve.core.schemas.adapters import Alias, AliasList, AliasRequest


class AliasApi:
    def __init__(self, service: Service) -> None:
        self._aliases = service.aliases

    @Route("GET", "/aliases", "List aliases of adapters")
    async def list_aliases(self) -> AliasList:
        return await self._aliases.list()

    @Route("GET", "/aliases/{id}", "Show an alias")
    async def get_alias(self, id: str) -> Alias:
        return await self._aliases.get(_name(id))

    @Route(
        "PUT",
        "/aliases/{id}",
        "Let a name mean a version of an adapter, and give a share of its requests to another one",
        errors=(409, 507),
    )
    async def put_alias(self, id: str, body: AliasRequest) -> Alias:
        return await self._aliases.put(_name(id), body)

    @Route("POST", "/aliases/{id}/promote", "Give all requests of an alias to its canary", errors=(507,))
    async def promote_alias(self, id: str) -> Alias:
        return await self._aliases.promote(_name(id))

    @Route(
        "POST",
        "/aliases/{id}/rollback",
        "Take an alias's requests from its canary, or return to the version that it meant before",
        errors=(507,),
    )
    async def roll_back_alias(self, id: str) -> Alias:
        return await self._aliases.roll_back(_name(id))

    @Route("DELETE", "/aliases/{id}", "Delete an alias; the adapter stays", errors=(507,))
    async def delete_alias(self, id: str) -> Alias:
        return await self._aliases.delete(_name(id))


def _name(id: str) -> str:
    name, version = ref_from_path(id)
    if version is not None:
        raise InvalidRequest("expected a name without a version", field="id")
    return name
