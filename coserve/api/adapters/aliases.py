"""Aliases: names for an adapter version, which may send a fraction of their requests to a second version (the
canary)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from coserve.api.adapters.catalog import refuse_base_name
from coserve.api.node import Node
from coserve.core.errors import AdapterNotFound, InvalidRequest
from coserve.core.names import split_ref
from coserve.core.schemas.adapters import Alias, AliasList, AliasRequest
from coserve.core.types import AdapterRef
from coserve.state.registry.records import AliasRecord
from coserve.state.registry.registry import Registry


class Aliases:
    """All aliases of the registry. Methods raise `AdapterNotFound` for an unknown alias or version."""

    def __init__(self, node: Node) -> None:
        self._registry, self._engine = node.registry, node.engine

    async def list(self) -> AliasList:
        return AliasList(data=[_view(each) for each in await self._registry.read(lambda registry: registry.aliases())])

    async def get(self, name: str) -> Alias:
        return _view(await self._registry.read(lambda registry: registry.alias(name)))

    async def put(self, name: str, request: AliasRequest) -> Alias:
        """Create or move an alias. Raises `NameTaken` for an adapter's name, `InvalidRequest` for the base's,
        `EngineUnavailable`."""
        refuse_base_name(name, self._engine.spec, field="name")
        if (request.canary is None) != (request.weight == 0.0):
            raise InvalidRequest("expected a weight above 0 with a canary, and none without one", field="weight")

        def set_alias(registry: Registry) -> AliasRecord:
            before = registry.find_alias(name)
            record = AliasRecord(
                name=name,
                target=_version(registry, request.target, "target"),
                updated_at=time.time(),
                canary=None if request.canary is None else _version(registry, request.canary, "canary"),
                weight=request.weight,
            )
            if before is not None:
                previous = before.previous if before.target == record.target else before.target
                record = msgspec.structs.replace(record, previous=previous)
            return registry.set_alias(record)

        return _view(await self._registry(set_alias))

    async def promote(self, name: str) -> Alias:
        """Give all requests to the canary. Raises `InvalidRequest` if there is none."""

        def promoted(record: AliasRecord) -> AliasRecord:
            if record.canary is None:
                raise InvalidRequest(f"alias {name!r} has no canary to promote", field="name")
            return AliasRecord(name=name, target=record.canary, updated_at=time.time(), previous=record.target)

        return await self._change(name, promoted)

    async def roll_back(self, name: str) -> Alias:
        """Remove the canary; if there is none, return to the previous target. Raises `InvalidRequest` if there is
        neither."""

        def rolled_back(record: AliasRecord) -> AliasRecord:
            now = time.time()
            if record.canary is not None:
                return msgspec.structs.replace(record, canary=None, weight=0.0, updated_at=now)
            if record.previous is None:
                raise InvalidRequest(f"alias {name!r} never meant another version", field="name")
            return AliasRecord(name=name, target=record.previous, updated_at=now, previous=record.target)

        return await self._change(name, rolled_back)

    async def delete(self, name: str) -> Alias:
        return _view(await self._registry.with_reserve(lambda registry: registry.delete_alias(name)))

    async def _change(self, name: str, change: Callable[[AliasRecord], AliasRecord]) -> Alias:
        return _view(await self._registry(lambda registry: registry.set_alias(change(registry.alias(name)))))


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
