"""coserve: fine-tune and serve many LoRA adapters from one copy of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coserve.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> object:
    """The SDK loads when it is asked for: `import coserve` alone stays light."""
    if name not in ("AsyncClient", "Client"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from coserve import client

    return getattr(client, name)


def __dir__() -> list[str]:
    """Return the public names, including those that are not loaded yet."""
    return sorted(__all__)
