"""What is about no single request: `GET /` and the end of a stream."""

from __future__ import annotations

from coserve.core.types import Wire


class Pointers(Wire, frozen=True):
    """The response of `GET /`: where to look."""

    version: str
    docs: dict[str, str]
    """Pages in the project's repository, and what they are about."""
    name: str = "coserve"
    health: str = "/health"
    openapi: str = "/openapi.json"


STREAM_END = "[DONE]"
