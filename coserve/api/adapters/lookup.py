"""Finds the adapter version that a request names."""

from __future__ import annotations

from coserve.core.errors import AdapterNotFound, BaseMismatch
from coserve.core.types import BaseSpec
from coserve.state.registry.records import AdapterRecord
from coserve.state.thread import RegistryThread


async def find_adapter(
    registry: RegistryThread,
    name: str,
    version: int | None,
    base: BaseSpec,
    *,
    field: str,
    key: str = "",
    of_base: str = "leave the field out",
) -> AdapterRecord:
    """Return version `version` of `name`, or the current one (None). `name` may be an alias. Raises `AdapterNotFound`
    and `BaseMismatch`, which name `field`.

    `key`: the request's id, by which an alias chooses between its target and its canary. `of_base`: error text for a
    user who gave the base's own name.
    """
    try:
        record = await registry.read(lambda registry: registry.resolve(name, version, key))
    except AdapterNotFound as error:
        is_base = name.casefold() == base.name.casefold()
        message = f"{name!r} is the base itself: {of_base}" if is_base else error.message
        raise AdapterNotFound(message, field=field) from None
    if record.base_fingerprint != base.fingerprint:
        raise BaseMismatch(f"adapter {record.ref} belongs to another base, {record.base_name!r}", field=field)
    return record
