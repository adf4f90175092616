"""Schemas that belong to no single request: `GET /` and the end of a stream."""

from __future__ import annotations

from coserve.core.types import Wire


class Pointers(Wire, frozen=True):
    """The response of `GET /`: links to the documentation."""

    version: str
    docs: dict[str, str]
    """Maps pages in the project's repository to what they are about."""
    name: str = "coserve"
    health: str = "/health"
    openapi: str = "/openapi.json"


STREAM_END = "[DONE]"
