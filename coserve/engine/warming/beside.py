"""The warm-up that runs beside an engine: what has been compiled so far, as its process tells."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import torch

from coserve.config import config_from_json
from coserve.kernels.lora.types import StackedWeights
from coserve.model.gemm_choice import GemmChoice, load_gemms
from coserve.warmup.fill import worker_bytes
from coserve.warmup.messages import Progress, Task
from coserve.warmup.parts import GEMMS, all_parts, graphs, training

log = logging.getLogger(__name__)

SILENT = 300.0
"""More than `warmup.crew.HANGS`: a worker that hangs is told."""
DIED = "warm-up: its process died or hangs; what is missing is compiled in the engine's process, which slows steps down"


def gemm_paths(task: Task) -> list[Path]:
    """The files of the measured choice of GEMM kernels, one for each part of `GEMMS`."""
    return [Path(task.folder) / "gemms" / f"{task.shape}-{name}.json" for name in GEMMS]


class WarmUp:
    """Implements `generate.execution.start.WarmKernels`."""

    def __init__(self, task: Task, *, silent: float = SILENT) -> None:
        """`silent`: seconds without a line after which the process is taken to hang."""
        self._task, self._silent = task, silent
        self._progress = Progress(0, sum(part.weight for part in all_parts()), [])
        self._died = False
        self._turn = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self._listening: asyncio.Task[None] | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Start to hear the process at the other end of the socket."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        self._listening = asyncio.create_task(self._hear(reader, writer))

    async def close(self) -> None:
        """Hear no more: the process ends."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})

    def notify(self, changed: Callable[[], None]) -> None:
        """`changed` is called after each change."""
        self._changed = changed

    @property
    def done(self) -> int:
        return self._progress.total if self.ended else self._progress.done

    @property
    def total(self) -> int:
        return self._progress.total

    @property
    def ended(self) -> bool:
        """Nothing more will be compiled beside."""
        return self._died or self._progress.ended

    @property
    def memory_bytes(self) -> int:
        """About what its workers may take of the GPU's memory now."""
        return 0 if self.ended else self._task.workers * worker_bytes(config_from_json(self._task.config.encode()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong."""
        return (*self._progress.notes, *((DIED,) if self._died else ()))

    async def until(self, parts: Collection[str] | None = None) -> bool:
        """Returns once each of these parts (None: all) is complete or has failed. Whether they are complete."""
        while not (self.ended if parts is None else self._settled(parts)):
            self._turn.clear()
            await self._turn.wait()
        return parts is None or self.complete(parts)

    def ready(self, rank: int) -> bool:
        """See `WarmKernels`."""
        return self._settled(graphs(rank))

    def trains(self, rank: int) -> bool:
        """Whether the kernels of jobs with adapters of `rank` are on disk, or will never be."""
        return self._settled((training(rank),))

    def gemms(self, stacked: Sequence[StackedWeights], device: torch.device) -> GemmChoice | None:
        """See `WarmKernels`."""
        return load_gemms(gemm_paths(self._task), stacked, device)

    def complete(self, parts: Collection[str]) -> bool:
        """Whether all kernels of these parts are on disk."""
        return frozenset(parts) <= frozenset(self._progress.complete)

    def _settled(self, parts: Collection[str]) -> bool:
        return self.ended or frozenset(parts) <= frozenset((*self._progress.complete, *self._progress.failed))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await self._line(reader):
                try:
                    self._progress = msgspec.json.decode(line, type=Progress)
                except msgspec.DecodeError:
                    break  # the end of a process that was killed
                self._tell()
            if not self._progress.ended:
                self._lose()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """Empty where the process has ended, or says nothing for too long."""
        try:
            async with asyncio.timeout(None if self.ended else self._silent):
                return await reader.readline()
        except (TimeoutError, ConnectionError):
            return b""

    def _lose(self) -> None:
        if not self._died:
            log.error("%s", DIED)
            self._died = True
            self._tell()

    def _tell(self) -> None:
        self._turn.set()
        self._changed()
