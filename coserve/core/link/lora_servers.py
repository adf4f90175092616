"""LoRA servers that several engines use: their settings, where they listen, and what both ends say first."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from coserve import __version__
from coserve.core.logs.setup import LogSettings

PROTOCOL = 2
"""Number of the messages between an engine and a LoRA server, and of the way their tensors go. Raise it with every
change of these: versions of coserve that are not released have one name."""
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


class Hello(Struct, frozen=True, kw_only=True):
    """The first frame of either end. Its form stays the same in all versions, so that they understand each other so
    far."""

    version: str = __version__
    protocol: int = PROTOCOL

    def __str__(self) -> str:
        return f"coserve {self.version}, protocol {self.protocol}"


def socket_path(folder: Path, index: int) -> Path:
    """Return the path of the socket at which a server listens."""
    return folder / str(index)
