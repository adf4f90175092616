"""The engine's client of the warm-up's process: what has been compiled so far."""

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
from coserve.gpu_memory import TrainingCosts
from coserve.kernels.lora.types import StackedWeights
from coserve.memory.profile import load_layer_costs
from coserve.model.gemm_choice import GemmChoice, load_gemms
from coserve.warmup.key import GEMM_FOLDER
from coserve.warmup.launch import worker_bytes
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import GEMMS, STEP_PARTS, TRAINING_LAYERS, TRAINING_LEVELS, all_parts, graphs, training
from coserve.warmup.parts import blocks as blocks_part

log = logging.getLogger(__name__)

TIMEOUT = 300.0
"""Seconds without a line after which the process counts as hung. More than `warmup.worker_pool.REPORT_TIMEOUT`."""
GRACE = 0.5
"""Seconds for lines that came while the event loop was blocked."""
DIED = "warm-up: its process died or hangs; what is missing is compiled in the engine's process, which slows steps down"


def gemm_paths(task: WarmUpTask) -> list[Path]:
    """The files with the measured choice of GEMM kernels, one for each part of `GEMMS`."""
    return [Path(task.folder) / GEMM_FOLDER / f"{task.shape}-{name}.json" for name in GEMMS]


def layer_costs_path(task: WarmUpTask) -> Path:
    """The file with the memory of compiled training layers."""
    return Path(task.folder) / GEMM_FOLDER / f"{task.shape}-{TRAINING_LAYERS}.json"


def level_costs_path(task: WarmUpTask) -> Path:
    """The file with that, and with the memory and the times of layers that keep less."""
    return Path(task.folder) / GEMM_FOLDER / f"{task.shape}-{TRAINING_LEVELS}.json"


class KernelsOnDisk:
    """Implements `generate.execution.start.WarmKernels` once a warm-up has ended: for ranks that follow."""

    def __init__(self, task: WarmUpTask) -> None:
        self._task = task

    def graph_kernels_ready(self, rank: int) -> bool:
        """See `WarmKernels`."""
        return True

    def layers_ready(self) -> bool:
        """See `WarmKernels`."""
        return True

    def training_layers_ready(self) -> bool:
        """See `WarmKernels`."""
        return True

    def layer_costs(self) -> TrainingCosts | None:
        """See `WarmKernels`."""
        return load_layer_costs(layer_costs_path(self._task))

    def level_costs(self) -> TrainingCosts | None:
        """See `WarmKernels`."""
        return load_layer_costs(level_costs_path(self._task))

    def gemms(self, stacked: Sequence[StackedWeights], device: torch.device) -> GemmChoice | None:
        """See `WarmKernels`."""
        return load_gemms(gemm_paths(self._task), stacked, device)


class WarmUpClient:
    """Implements `generate.execution.start.WarmKernels`."""

    def __init__(self, task: WarmUpTask, *, timeout: float = TIMEOUT) -> None:
        """`timeout`: seconds without a line after which the process counts as hung."""
        self._task, self._timeout = task, timeout
        self._progress = Progress(0, sum(part.weight for part in all_parts()), [])
        self._died = False
        self._progressed, self._received = asyncio.Event(), asyncio.Event()
        self._changed: Callable[[], None] = lambda: None
        self._reader: asyncio.Task[None] | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Start to read the process's progress from the socket."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        self._reader = asyncio.create_task(self._read(reader, writer))
        self._reader.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Close the socket, which ends the process."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})

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
        """The process compiles nothing more."""
        return self._died or self._progress.ended

    @property
    def memory_bytes(self) -> int:
        """Estimated GPU memory of its workers; 0 once it has ended."""
        return 0 if self.ended else self._task.workers * worker_bytes(config_from_json(self._task.config.encode()))

    @property
    def notes(self) -> tuple[str, ...]:
        """Failures, for the operator."""
        return (*self._progress.notes, *((DIED,) if self._died else ()))

    async def wait_for_parts(self, parts: Collection[str]) -> bool:
        """Returns once each of these parts is complete or has failed: whether all are complete."""
        while not self._settled(parts):
            await self.next_progress()
        return self.complete(parts)

    async def catch_up(self) -> None:
        """Read what came while the event loop was blocked."""
        # The loop sees the socket, hands over its bytes, and wakes the reader, which takes all lines.
        for _ in range(4):
            await asyncio.sleep(0)

    async def checked(self) -> None:
        """Returns once it is known what the caches hold."""
        await self._received.wait()

    async def wait_until_ended(self) -> None:
        """Returns once the process compiles nothing more."""
        while not self.ended:
            await self.next_progress()

    def graph_kernels_ready(self, rank: int) -> bool:
        """See `WarmKernels`."""
        return self._settled(graphs(rank))

    def layers_ready(self) -> bool:
        """See `WarmKernels`."""
        return self.complete(STEP_PARTS)

    def training_kernels_ready(self, rank: int, *, blocks: bool = False) -> bool:
        """Whether the training kernels for adapters of `rank` are on disk, or never will be; `blocks`: for block-diagonal ones."""
        return self._settled((blocks_part(rank) if blocks else training(rank),))

    def training_layers_ready(self) -> bool:
        """Whether the compiled layers of training are on disk."""
        return self.complete((TRAINING_LAYERS,))

    def layer_costs(self) -> TrainingCosts | None:
        """See `WarmKernels`."""
        return load_layer_costs(layer_costs_path(self._task))

    def level_costs(self) -> TrainingCosts | None:
        """See `WarmKernels`."""
        return load_layer_costs(level_costs_path(self._task))

    def gemms(self, stacked: Sequence[StackedWeights], device: torch.device) -> GemmChoice | None:
        """See `WarmKernels`."""
        return load_gemms(gemm_paths(self._task), stacked, device)

    def complete(self, parts: Collection[str]) -> bool:
        """Whether all kernels of these parts are on disk."""
        return frozenset(parts) <= frozenset(self._progress.complete)

    def _settled(self, parts: Collection[str]) -> bool:
        """Whether each of these parts is complete or will never be."""
        return self.ended or frozenset(parts) <= frozenset((*self._progress.complete, *self._progress.failed))

    async def next_progress(self) -> None:
        """Returns once the progress has changed."""
        self._progressed.clear()
        await self._progressed.wait()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await self._line(reader):
                try:
                    self._progress = msgspec.json.decode(line, type=Progress)
                except msgspec.DecodeError:
                    break  # the process was killed while it wrote
                self._publish()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _stopped(self, reading: asyncio.Task[None]) -> None:
        """Nobody reads any more; unless the client was closed, whoever waits must know, whatever the reason is."""
        if not reading.cancelled() and not self._progress.ended:
            log.error("%s", DIED, exc_info=reading.exception())
            self._died = True
            self._publish()

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """The next line; empty if the process has ended or hangs, or the line is too long."""
        timeout = None if self._progress.ended or self._progress.waiting else self._timeout
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    return await reader.readline()
            # The event loop may have been blocked for that long, by the load of a base: lines have come meanwhile.
            async with asyncio.timeout(GRACE):
                return await reader.readline()
        except (TimeoutError, ConnectionError, ValueError):
            return b""

    def _publish(self) -> None:
        self._received.set()
        self._progressed.set()
        self._changed()
