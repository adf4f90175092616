"""Query parameters of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coserve.core.errors import InvalidRequest, UnknownField
from coserve.core.limits import PAGE_LIMIT, PAGE_SIZE


def list_query(query: Mapping[str, str], others: Sequence[str] = (), size: int = PAGE_SIZE) -> tuple[str | None, int]:
    """Return `after` and `limit`, `size` if it was left out. A limit above `PAGE_LIMIT` means `PAGE_LIMIT`: clients go
    on by `has_more`. `others`: further parameters that are accepted."""
    for name in query:
        if name not in ("after", "limit", *others):
            raise UnknownField(f"unknown parameter {name[:80]!r}", field=name[:200])
    text = query.get("limit", str(size))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise InvalidRequest(f"expected at least 1, got {text[:80]!r}", field="limit")
    return query.get("after") or None, min(int(text), PAGE_LIMIT)
