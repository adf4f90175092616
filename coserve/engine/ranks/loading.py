"""Signs that a process compiles or loads code: a command may take long then, the first of its kind above all."""

from __future__ import annotations

import sys
from pathlib import Path

COMPILERS = ("triton.compiler", "importlib")
"""Packages that are on the stack of a thread that compiles a kernel, loads it from disk, or imports a module."""
IO = Path("/proc/self/io")


def compiles(thread: int | None) -> bool:
    """Whether the thread of this number compiles or loads a Triton kernel, or imports a module. Frames that are on the
    stack while compiled code merely runs, those of torch.compile, say nothing: see `compilations.watch_layers`."""
    frame = None if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


def loaded(io: Path = IO) -> int:
    """A number that grows while modules are imported or files, such as libraries, are read from disk."""
    try:
        counters = dict(line.split(": ", 1) for line in io.read_text().splitlines())
        read = int(counters["read_bytes"])
    except (OSError, ValueError, KeyError):  # another system than Linux
        read = 0
    return read + len(sys.modules)
