"""Query parameters of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from coserve.core.errors import InvalidRequest, NotFound, UnknownField
from coserve.core.limits import PAGE_LIMIT, PAGE_SIZE


class Listed(Protocol):
    """Something with an id."""

    @property
    def id(self) -> str: ...


L = TypeVar("L", bound=Listed)


def list_query(
    query: Mapping[str, str], others: Sequence[str] = (), size: int = PAGE_SIZE, most: int = PAGE_LIMIT
) -> tuple[str | None, int]:
    """Return `after` and `limit`, `size` if it was left out. A limit above `most` means `most`: clients ask for the
    next page by `has_more`. `others`: further parameters that are accepted."""
    for name in query:
        if name not in ("after", "limit", *others):
            raise UnknownField(f"unknown parameter {name[:80]!r}", field=name[:200])
    text = query.get("limit", str(size))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise InvalidRequest(f"expected at least 1, got {text[:80]!r}", field="limit")
    return query.get("after") or None, min(int(text), most)


def in_order(records: list[L], query: Mapping[str, str]) -> list[L]:
    """Return the records, which are oldest first, newest first unless `order` is `asc`. Raises `InvalidRequest`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"expected asc or desc, got {order[:80]!r}", field="order")
    return records if order == "asc" else records[::-1]


def behind(records: list[L], after: str | None) -> list[L]:
    """Return the records behind the one with id `after`; None: all. Raises `NotFound`."""
    if after is None:
        return records
    found = next((place for place, record in enumerate(records, 1) if record.id == after), None)
    if found is None:
        raise NotFound(f"there is no {after[:80]!r}", field="after")
    return records[found:]
