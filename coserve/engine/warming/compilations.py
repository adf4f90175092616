"""Listeners that count the Triton kernels compiled in this process."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from coserve.kernels.gpu.device import interpreted

log = logging.getLogger(__name__)


class Compilations:
    """Triton's compilation listener in the engine: logs each kernel, since a step waited for it. Cache hits do not count."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        """Names of the kernels that were compiled, in order."""

    def __call__(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401 - Triton's own types
        if cache_hit:
            return
        name = str(metadata.get("name", getattr(src, "name", "a kernel")))
        seconds = getattr(times, "total", 0) / 1e6
        if name in self.kernels:
            log.debug("compiled %s again in %.1f s", name, seconds)
        else:
            log.warning("the kernel %s was compiled in the engine's process, in %.1f s: no cache had it", name, seconds)
        self.kernels.append(name)


class CompilationTime:
    """Triton's compilation listener in a warm-up worker: sums the time."""

    def __init__(self) -> None:
        self.kernels, self.seconds = 0, 0.0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401 - Triton's own types
        if not cache_hit:
            self.kernels += 1
            self.seconds += getattr(times, "total", 0) / 1e6


def measure_compilations() -> CompilationTime:
    """Sum the time that Triton compiles from now on; stays 0 if this Triton has no listeners."""
    found = CompilationTime()
    with suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = found
    return found


def watch_compilations() -> Compilations | None:
    """Log what Triton compiles from now on; None if this Triton has no listeners."""
    if interpreted():
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    found = Compilations()
    knobs.compilation.listener = found
    return found
