"""Listeners for the Triton kernels and layers that this process compiles, or loads from a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._dynamo.callback import callback_handler

from coserve.kernels.gpu.device import interpreted

log = logging.getLogger(__name__)


class Compilations:
    """A Triton compilation listener. Kernels loaded from a cache count only in `loads`."""

    def __init__(self, level: int = logging.DEBUG) -> None:
        """`level`: log level of the first compilation of each kernel."""
        self._level = level
        self.kernels: list[str] = []
        """Names of the compiled kernels, in order."""
        self.seconds = 0.0
        self.loads = 0
        """Kernels that were compiled, or loaded from a cache."""

    def __call__(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401 - Triton's own types
        self.loads += 1
        if cache_hit:
            return
        name, seconds = str(metadata.get("name", getattr(src, "name", "a kernel"))), getattr(times, "total", 0) / 1e6
        level = logging.DEBUG if name in self.kernels else self._level
        log.log(
            level,
            "the kernel %s was compiled in this process, in %.1f s: no cache had it for %s",
            name,
            seconds,
            _constants(src),
        )
        self.add(name, seconds)

    def add(self, name: str, seconds: float) -> None:
        """Add a compiled kernel, possibly compiled by another process."""
        self.kernels.append(name)
        self.seconds += seconds


def _constants(src: Any) -> str:  # noqa: ANN401 - Triton's own type
    """Names and values of the constants that a kernel was compiled for."""
    names = getattr(getattr(src, "fn", None), "arg_names", ())
    values = {names[at[0]]: value for at, value in getattr(src, "constants", {}).items() if at[0] < len(names)}
    return " ".join(f"{name}={value}" for name, value in values.items()) or "its arguments"


def watch_compilations(level: int = logging.DEBUG) -> Compilations:
    """Install a listener. It is never called in interpreter mode, or by a Triton without listeners."""
    found = Compilations(level)
    if not interpreted():
        with suppress(ImportError):
            from triton import knobs

            knobs.compilation.listener = found
    return found


def watch_layers() -> Callable[[], bool]:
    """Listen to torch.compile; return a function that says whether this process is compiling, on any thread."""
    compiling = False

    def changed(now: bool) -> None:
        nonlocal compiling
        compiling = now

    callback_handler.register_start_callback(lambda _: changed(True))
    callback_handler.register_end_callback(lambda _: changed(False))
    return lambda: compiling
