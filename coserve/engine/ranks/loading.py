"""Detects that a process compiles or loads code, so that a command, especially the first of its kind, may take long."""

from __future__ import annotations

import sys
from pathlib import Path

COMPILERS = ("triton.compiler", "importlib")
"""Packages on the stack of a thread that compiles a Triton kernel, loads it from disk, or imports a module."""
IO = Path("/proc/self/io")


def compiles(thread: int | None) -> bool:
    """Return whether the given thread compiles or loads a Triton kernel, or imports a module. torch.compile is not
    detected here, as its frames are also on the stack while compiled code runs: see `compilations.watch_layers`."""
    frame = None if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False


def loaded(io: Path = IO) -> int:
    """A counter that grows while modules are imported or files, such as libraries, are read from disk."""
    try:
        counters = dict(line.split(": ", 1) for line in io.read_text().splitlines())
        read = int(counters["read_bytes"])
    except (OSError, ValueError, KeyError):  # not Linux
        read = 0
    return read + len(sys.modules)
