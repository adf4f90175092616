"""What is compiled in this process: each kernel is logged, since steps wait for it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from coserve.kernels.gpu.device import interpreted

log = logging.getLogger(__name__)


class Compilations:
    """Triton's listener of compilations. Kernels that are loaded from disk do not count."""

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
    """Triton's listener of compilations in a process that is there to compile."""

    def __init__(self) -> None:
        self.kernels, self.seconds = 0, 0.0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401 - Triton's own types
        if not cache_hit:
            self.kernels += 1
            self.seconds += getattr(times, "total", 0) / 1e6


def measure_compilations() -> CompilationTime:
    """Sums the time that Triton compiles in this process from now on; nothing where this Triton cannot tell."""
    found = CompilationTime()
    with suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = found
    return found


def watch_compilations() -> Compilations | None:
    """Counts what Triton compiles in this process from now on; None where this Triton cannot tell."""
    if interpreted():
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    found = Compilations()
    knobs.compilation.listener = found
    return found
