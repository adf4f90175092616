"""Ends of a mailbox in host memory, whose operations run at once: a wait blocks the thread."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch

from coserve.engine.lora_server.ipc import PAGE, TO_ENGINE, TO_SERVER, EngineEnd, Part, ServerEnd, SharedPage

LIMIT = 60.0
"""Seconds after which a wait fails."""


class HostStream:
    """Implements `StreamOps`."""

    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def write(self, word: int, value: int) -> None:
        ctypes.c_uint32.from_address(word).value = value

    def wait(self, word: int, value: int) -> None:
        until = time.monotonic() + LIMIT
        while ctypes.c_uint32.from_address(word).value < value:
            assert time.monotonic() < until, "nothing came"
            time.sleep(1e-4)

    def mark(self) -> Callable[[], None]:
        return lambda: None


class HostDriver(HostStream):
    """A GPU's driver with host memory in place of the GPU's, for ends in one process."""

    open_now = 0
    """Mailboxes that are open, of all instances."""

    def __init__(self, device: torch.device) -> None:
        self._memory, self._opened = dict[int, torch.Tensor](), 0

    def allocate(self, size: int) -> tuple[int, bytes]:
        memory = torch.zeros(size, dtype=torch.uint8)
        self._memory[memory.data_ptr()] = memory
        return memory.data_ptr(), memory.data_ptr().to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        HostDriver.open_now += 1
        self._opened += 1
        return int.from_bytes(handle, "little")

    def register(self, address: int, size: int) -> int:
        return address

    def finish(self) -> None: ...

    def close(self) -> None:
        HostDriver.open_now -= self._opened
        self._opened = 0
        self._memory.clear()


def mailbox_ends(there: int, back: int) -> tuple[EngineEnd, ServerEnd]:
    """The engine's end and the server's, for messages of so many bytes."""
    memory, file = torch.empty(there + back, dtype=torch.uint8), os.memfd_create("mailbox")
    os.truncate(file, PAGE)
    first = Part(memory.data_ptr(), there, TO_SERVER)
    second = Part(memory.data_ptr() + there, back, TO_ENGINE)

    class Driver(HostDriver):
        held = memory

    ours, theirs = (SharedPage(file) for _ in range(2))
    os.close(file)
    cpu = torch.device("cpu")
    return (
        EngineEnd(Driver(cpu), ours, ours.address, cpu, first, second),
        ServerEnd(Driver(cpu), theirs, theirs.address, cpu, second, first),
    )
