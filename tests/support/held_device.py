"""A device whose training slices take time on a thread: as long as they are held, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from coserve.engine.spatial.slices_in_flight import Marks
from coserve.engine.spatial.training_stream import TrainingStream


class HeldDevice:
    """Stands for a stream of a GPU. `held` slices do not end; others end `seconds` after their launch or the slice
    before."""

    def __init__(self, *, held: bool = False, seconds: float = 0.0) -> None:
        self._thread, self._free, self._seconds = ThreadPoolExecutor(1), threading.Event(), seconds
        self._error: Exception | None = None
        self.marks, self.launched = list[Future[None]](), threading.Event()
        self.entered = 0
        """Times that the stream was entered."""
        if not held:
            self._free.set()

    def mark(self) -> Future[None]:
        """See `Mark`."""
        self.marks.append(self._thread.submit(self._compute))
        self.launched.set()
        return self.marks[-1]

    def _compute(self) -> None:
        time.sleep(self._seconds)
        assert self._free.wait(240)
        if self._error is not None:
            raise self._error

    @property
    def busy(self) -> bool:
        """Whether a slice is in flight."""
        return any(not mark.done() for mark in self.marks)

    def release(self) -> None:
        """Slices in flight end, and later ones do."""
        self._free.set()

    def fail(self) -> None:
        """Slices in flight fail, as all calls of a GPU's driver do after an error."""
        self._error = RuntimeError("CUDA error: an illegal memory access was encountered")
        self._free.set()

    def stream(self) -> TrainingStream:
        return TrainingStream(self._enter, Marks(self.mark), "spatial: a stand-in")

    @contextmanager
    def _enter(self) -> Iterator[None]:
        self.entered += 1
        yield
