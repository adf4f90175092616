"""The routes of aliases: names for an adapter version, which may send a fraction of their requests to a second version
(the canary)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from coserve.api.adapters.catalog import refuse_base_name
from coserve.api.http.parsing import ref_from_path
from coserve.api.http.route import Route
from coserve.api.node import Node
from coserve.core.errors import AdapterNotFound, InvalidRequest
from coserve.core.names import split_ref
from coserve.core.schemas.adapters import Alias, AliasList, AliasRequest
from coserve.core.types import AdapterRef
from coserve.state.registry.records import AliasRecord
from coserve.state.registry.registry import Registry


class AliasApi:
    """All aliases of the registry. Methods raise `AdapterNotFound` for an unknown alias or version."""

    def __init__(self, node: Node) -> None:
        self._registry, self._engine = node.registry, node.engine

    @Route("GET", "/aliases", "List aliases of adapters")
    async def list_aliases(self) -> AliasList:
        return AliasList(data=[_view(each) for each in await self._registry.read(lambda registry: registry.aliases())])

    @Route("GET", "/aliases/{id}", "Show an alias")
    async def get_alias(self, id: str) -> Alias:
        name = _name(id)
        return _view(await self._registry.read(lambda registry: registry.alias(name)))

    @Route(
        "PUT",
        "/aliases/{id}",
        "Let a name mean a version of an adapter, and give a share of its requests to another one",
        errors=(409, 507),
    )
    async def put_alias(self, id: str, body: AliasRequest) -> Alias:
        """Create or move an alias. Raises `NameTaken` for an adapter's name, `InvalidRequest` for the base's,
        `EngineUnavailable`."""
        name = _name(id)
        refuse_base_name(name, self._engine.spec, field="name")
        if (body.canary is None) != (body.weight == 0.0):
            raise InvalidRequest("expected a weight above 0 with a canary, and none without one", field="weight")

        def set_alias(registry: Registry) -> AliasRecord:
            before = registry.find_alias(name)
            record = AliasRecord(
                name=name,
                target=_version(registry, body.target, "target"),
                updated_at=time.time(),
                canary=None if body.canary is None else _version(registry, body.canary, "canary"),
                weight=body.weight,
            )
            if before is not None:
                previous = before.previous if before.target == record.target else before.target
                record = msgspec.structs.replace(record, previous=previous)
            return registry.set_alias(record)

        return _view(await self._registry(set_alias))

    @Route("POST", "/aliases/{id}/promote", "Give all requests of an alias to its canary", errors=(507,))
    async def promote_alias(self, id: str) -> Alias:
        return await self._change(_name(id), _promoted)

    @Route(
        "POST",
        "/aliases/{id}/rollback",
        "Take an alias's requests from its canary, or return to the version that it meant before",
        errors=(507,),
    )
    async def roll_back_alias(self, id: str) -> Alias:
        return await self._change(_name(id), _rolled_back)

    @Route("DELETE", "/aliases/{id}", "Delete an alias; the adapter stays", errors=(507,))
    async def delete_alias(self, id: str) -> Alias:
        name = _name(id)
        return _view(await self._registry.with_reserve(lambda registry: registry.delete_alias(name)))

    async def _change(self, name: str, change: Callable[[AliasRecord], AliasRecord]) -> Alias:
        return _view(await self._registry(lambda registry: registry.set_alias(change(registry.alias(name)))))


def _name(id: str) -> str:
    name, version = ref_from_path(id)
    if version is not None:
        raise InvalidRequest("expected a name without a version", field="id")
    return name


def _promoted(record: AliasRecord) -> AliasRecord:
    if record.canary is None:
        raise InvalidRequest(f"alias {record.name!r} has no canary to promote", field="name")
    return AliasRecord(name=record.name, target=record.canary, updated_at=time.time(), previous=record.target)


def _rolled_back(record: AliasRecord) -> AliasRecord:
    """Remove the canary; without one, return to the previous target. Raises `InvalidRequest` if there is neither."""
    now = time.time()
    if record.canary is not None:
        return msgspec.structs.replace(record, canary=None, weight=0.0, updated_at=now)
    if record.previous is None:
        raise InvalidRequest(f"alias {record.name!r} never meant another version", field="name")
    return AliasRecord(name=record.name, target=record.previous, updated_at=now, previous=record.target)


def _version(registry: Registry, text: str, field: str) -> AdapterRef:
    """Return the version that `name@version` names; without a version, the current one. Raises `AdapterNotFound`, which
    names `field`."""
    try:
        return registry.adapter(*split_ref(text)).ref
    except AdapterNotFound as error:
        error.field = field
        raise


def _view(record: AliasRecord) -> Alias:
    return Alias(
        name=record.name,
        target=str(record.target),
        canary=None if record.canary is None else str(record.canary),
        weight=record.weight,
        previous=None if record.previous is None else str(record.previous),
        updated_at=record.updated_at,
    )
