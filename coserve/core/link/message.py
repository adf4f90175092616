"""The base of the messages between the API process and the engine."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message."""
