"""Reads the base's weights into the page cache while the engine imports torch: from a cold disk, reading takes at least
as long as the import. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

READERS = 4
"""Files read at the same time: one reader does not fill a fast disk's queue."""
PIECE = 4 << 20
"""Bytes of one read."""
MEMORY_SHARE = 0.5
"""Largest weights to read ahead, as a fraction of the machine's memory. Larger ones would evict their own beginning
from the page cache."""


def weight_files(model: str, *, memory: int | None = None) -> list[Path]:
    """Return the weight files of a base in a folder, if they fit into `memory` (bytes; None: the machine's) with room
    to spare."""
    found = sorted(Path(model).glob("*.safetensors"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    return found if sum(_size(path) for path in found) <= MEMORY_SHARE * memory else []


def read_ahead(paths: Sequence[Path]) -> list[Thread]:
    """Read the files on daemon threads, which do not delay the process's end. Reads release the GIL. Errors are
    ignored: whoever loads the file reports them."""
    queue = SimpleQueue[Path]()
    for path in paths:
        queue.put(path)
    threads = [Thread(target=_read_all, args=(queue,), name="read-ahead", daemon=True) for _ in paths[:READERS]]
    for thread in threads:
        thread.start()
    return threads


def _read_all(queue: SimpleQueue[Path]) -> None:
    buffer = bytearray(PIECE)
    while True:
        try:
            path = queue.get_nowait()
        except Empty:
            return
        try:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        except OSError:
            continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
