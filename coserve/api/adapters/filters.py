"""The filters of a list of adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.names import ADAPTER_SOURCES
from coserve.core.types import AdapterRef
from coserve.state.registry.records import AdapterRecord

FILTERS: Final = ("search", "base", "source", "resident", "tag")


class AdapterFilter(msgspec.Struct, frozen=True):
    """Accepts adapters that match every given field."""

    search: str = ""
    """Part of the name, in any case."""
    base: str | None = None
    """Name of the base."""
    source: str | None = None
    """First part of `AdapterRecord.source`."""
    resident: bool | None = None
    """Whether the version is in memory."""
    tag: str | None = None
    """A tag of the name."""

    def accepts(self, record: AdapterRecord, resident: Collection[AdapterRef], tags: Collection[str]) -> bool:
        """Return whether the record matches `base`, `source`, `resident` and `tag`; the registry compares `search`."""
        return (
            self.base in (None, record.base_name)
            and self.source in (None, record.source.partition(":")[0])
            and self.resident in (None, record.ref in resident)
            and (self.tag is None or self.tag in tags)
        )


EVERY: Final = AdapterFilter()


def adapter_filter(query: Mapping[str, str]) -> AdapterFilter:
    """Return the filter of a list request. Raises `InvalidRequest`."""
    source, resident = query.get("source"), query.get("resident")
    if source not in (None, *ADAPTER_SOURCES):
        raise InvalidRequest(f"expected one of {', '.join(ADAPTER_SOURCES)}, got {source[:80]!r}", field="source")
    if resident not in (None, "true", "false"):
        raise InvalidRequest(f"expected true or false, got {resident[:80]!r}", field="resident")
    return AdapterFilter(
        query.get("search", ""),
        query.get("base"),
        source,
        None if resident is None else resident == "true",
        query.get("tag"),
    )
