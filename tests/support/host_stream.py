"""Ends of a mailbox in host memory, whose operations run at once: a wait blocks the thread."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch

from coserve.engine.lora_server.ipc import PAGE, TO_ENGINE, TO_SERVER, IpcTransport, Part, SharedPage

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


def mailbox_ends(there: int, back: int) -> tuple[IpcTransport, IpcTransport]:
    """The engine's end and the server's, for messages of so many bytes."""
    memory, file = torch.empty(there + back, dtype=torch.uint8), os.memfd_create("mailbox")
    os.truncate(file, PAGE)
    first = Part(memory.data_ptr(), there, TO_SERVER)
    second = Part(memory.data_ptr() + there, back, TO_ENGINE)

    class Stream(HostStream):
        held = memory

    ends = []
    for parts in ((first, second), (second, first)):
        page = SharedPage(file)
        ends.append(IpcTransport(Stream(), page, page.address, torch.device("cpu"), *parts))
    os.close(file)
    return ends[0], ends[1]
