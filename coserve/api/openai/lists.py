"""Query parameters of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Literal, Protocol, Self, TypeVar

from coserve.api.http.parsing import page
from coserve.core.errors import InvalidRequest, NotFound
from coserve.core.limits import PAGE_LIMIT, PAGE_SIZE
from coserve.core.types import Wire


class Listed(Protocol):
    """Something with an id."""

    @property
    def id(self) -> str: ...


L = TypeVar("L", bound=Listed)


class ListPage(Wire, Generic[L], frozen=True, kw_only=True):
    """A page of a list, with the ids of its first and last entry."""

    object: Literal["list"] = "list"
    data: list[L]
    first_id: str | None
    last_id: str | None
    has_more: bool = False

    @classmethod
    def of(cls, data: list[L], *, has_more: bool = False) -> Self:
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=has_more)


def list_query(
    query: Mapping[str, str], others: Sequence[str] = (), size: int = PAGE_SIZE, most: int = PAGE_LIMIT
) -> tuple[str | None, int]:
    """Return `after` and `limit`, `size` if it was left out. A limit above `most` means `most`: clients ask for the
    next page by `has_more`. `others`: further parameters that are accepted."""
    after, limit = page(query, others, size=size, most=None)
    return after or None, min(limit, most)


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
