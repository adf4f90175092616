"""Messages about the engine and its adapters; those to the engine come first."""

from __future__ import annotations

from coserve.core.gpu_memory import MemoryModel, PoolShape
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec, Message

ALIVE = 10.0
"""Maximum seconds between two messages of an engine that has work, unless a single step or slice takes longer."""


class DropAdapter(Message, frozen=True):
    """Drop an adapter version from memory, for its files will be deleted. Requests that use it keep it to their end."""

    ref: AdapterRef


class PrefetchAdapter(Message, frozen=True):
    """Read an adapter version into host memory. `pinned`: True: also pin it there; False: only unpin it, without
    reading; None: leave the pin as it is."""

    ref: AdapterRef
    digests: AdapterDigests
    pinned: bool | None = None


class SetLogLevel(Message, frozen=True):
    """Log from this level on: debug, info, warning or error."""

    level: str


class Shutdown(Message, frozen=True):
    """Finish the current tick, checkpoint running jobs, send `EngineStopped`, exit."""


class EngineReady(Message, frozen=True):
    spec: BaseSpec
    kv_tokens: int
    pool: PoolShape
    lora_backend: str
    memory: MemoryModel | None = None
    """None: memory is not planned, so jobs are admitted without a memory check."""
    host_adapter_limit: int = 0
    notes: tuple[str, ...] = ()
    """Notes for the operator, shown in /health: what runs slower than it could, and why."""


class EngineNotes(Message, frozen=True):
    """Replaces the notes of `EngineReady`."""

    notes: tuple[str, ...]


class EngineWarming(Message, frozen=True):
    """Progress of an engine's start. Sent any number of times before `EngineReady`, never after it."""

    what: str
    """The current activity, such as "compiling kernels"."""
    done: int
    total: int
    seconds_left: float | None
    """Estimate; None: unknown."""


class EngineRefused(Message, frozen=True):
    """The engine cannot start with these settings. `code` is that of a `StartupError`."""

    code: str
    message: str


class EngineStopped(Message, frozen=True):
    pass
