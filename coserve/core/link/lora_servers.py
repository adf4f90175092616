"""LoRA servers that several engines use: their settings, and where they listen."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from coserve.core.logs.setup import LogSettings

REFUSED = 2
"""Exit status of a server whose settings do not fit this machine."""


class ListenerSettings(Struct, frozen=True, kw_only=True):
    """The settings of one server."""

    index: int = 0
    servers: int
    """Servers of the folder."""
    device: str
    """auto, cuda or cpu."""
    logs: LogSettings


def socket_path(folder: Path, index: int) -> Path:
    """Return the path of the socket at which a server listens."""
    return folder / str(index)
