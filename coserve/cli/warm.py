"""The command `coserve warm`: fills the caches of compiled kernels ahead of a daemon, for example while building an
image."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coserve.cli.daemon.start_warnings import start_warnings
from coserve.cli.failures import FAILED
from coserve.cli.settings_options import settings_command
from coserve.config import load_config
from coserve.core.health import Warming, warming_line
from coserve.engine.warmup.key import SHAPE_SETTINGS

log = logging.getLogger(__name__)

SETTINGS = (
    *SHAPE_SETTINGS,
    "policy",
    "inference_batch_size",
    "training_sm_share",
    "data_dir",
    "device",
    "cache_dir",
    "load_format",
    "log_level",
    "log_format",
    "config",
)
"""Settings that decide which kernels a daemon needs, or where they are stored."""


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGTERM, which stops the build of an image, so that the compiling processes end
    too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warm(given: dict[str, object]) -> None:
    """Compile all kernels that `coserve serve` will need for MODEL with the same settings, and keep them in the cache
    folder. Needs the GPU that will serve. Settings also come from COSERVE_<NAME> and from the TOML file of --config.
    """
    config = load_config(given)
    from coserve.core.logs import set_up_logging
    from coserve.engine.warmup import launch

    set_up_logging("warm", config.logs)
    for warning in start_warnings(config, given):
        log.warning("%s", warning)
    with WarmProgress() as progress, _terminated_as_interrupted():
        launch.compile_ahead(config, progress.show)
    print(progress.summary())
    if not progress.full:
        raise typer.Exit(FAILED)


warm = settings_command(_warm, SETTINGS, argument="model")


COMPILES = "compiling kernels"
REPEAT = 5.0
"""Seconds between two lines if standard error is not a terminal."""


class WarmProgress:
    """Shows the progress on standard error: a bar on a terminal, a line every few seconds elsewhere. `show` is called,
    on any thread, with the number of finished warm-up parts and their total."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or Console(stderr=True), clock
        self._lock = threading.Lock()
        self._began = clock()
        self._first: tuple[float, int] | None = None
        """Time of the first report, and the parts that were already done then."""
        self._printed: float | None = None
        self.done = self.total = 0
        self._bar = Progress(
            TextColumn(COMPILES),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        with self._lock:
            self.done, self.total = done, total
            now = self._clock()
            if self._first is None:
                self._first = now, done
            left = self._left(now)
            if self._console.is_terminal:
                text = "" if left is None else f"about {left:.0f} s left"
                self._bar.update(self._task, completed=done, total=total, left=text)
            elif self._printed is None or now - self._printed >= REPEAT:
                self._printed = now
                line = warming_line(Warming(done=done, total=total, seconds_left=left, what=COMPILES))
                self._console.print(line, highlight=False, soft_wrap=True)

    def _left(self, now: float) -> float | None:
        """Return the estimated seconds left at the pace so far; None before anything was compiled."""
        assert self._first is not None
        since, before = self._first
        if self.done == before:
            return None
        return (now - since) / (self.done - before) * (self.total - self.done)

    @property
    def full(self) -> bool:
        return self.done == self.total

    def summary(self) -> str:
        """Return the result in one line."""
        return f"warm: {self.done} of {self.total} in {self._clock() - self._began:.0f} s"
