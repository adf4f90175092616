"""The client of a fork server (`engine.warming.worker_process`): the worker processes of a warm-up, whose imports are made once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import struct

import msgspec

from coserve.processes import signal_child, start_child
from coserve.warmup.messages import DoPart, PartReport, WarmUpTask

log = logging.getLogger(__name__)

MODULE = "coserve.engine.warming.worker_process"
PID = struct.Struct("!i")
"""What the fork server gets to end a process; 0 stands for a new one, whose socket comes with it."""
NEW = 0
ANSWER = struct.Struct("!i?")
"""The process's pid, and whether each imports everything itself."""
ANEW = "warm-up: an import initialises CUDA, so that each worker imports everything itself, which takes seconds"


class ProcessWorker:
    """Implements `worker_pool.Worker`: a process of the fork server, at the other end of a socket pair."""

    def __init__(
        self, server: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server, self._pid, self._reader, self._writer = server, pid, reader, writer

    def run_part(self, part: str) -> None:
        self._writer.write(msgspec.json.encode(DoPart(part)) + b"\n")

    async def next_report(self) -> PartReport | None:
        try:
            line = await self._reader.readline()
            return msgspec.json.decode(line, type=PartReport) if line.endswith(b"\n") else None
        except ConnectionError:  # it died before it read its part
            return None
        except ValueError as error:
            log.warning("warm-up: a worker's report cannot be read: %s", error)
            return None

    async def close(self) -> None:
        self._writer.close()
        await self._server.end(self._pid)


class ForkServer:
    """Its process starts with the first worker. If it dies, so do its workers, and the next worker starts another one."""

    def __init__(self, task: WarmUpTask, module: str = MODULE) -> None:
        self._task, self._module = task, module
        self._processes: list[asyncio.subprocess.Process] = []
        """The one at the other end of `_control`, and those before it."""
        self._control: socket.socket | None = None
        self._turn = asyncio.Lock()
        self.notes: list[str] = []
        """What makes workers slower than they could be, for the operator."""

    async def start_worker(self) -> ProcessWorker:
        """Raises `OSError`: no process could be started."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                pid = await self._ask(NEW, theirs)
        except BaseException:
            writer.close()
            raise
        writer.write(msgspec.json.encode(self._task) + b"\n")
        return ProcessWorker(self, pid, reader, writer)

    async def end(self, pid: int) -> None:
        """Kill a worker's process and wait for its end."""
        with contextlib.suppress(OSError):  # a server that has died has taken its workers with it
            await self._ask(pid)

    async def close(self) -> None:
        """End the server, and with it all workers that are left."""
        self._kill()
        for process in self._processes:
            await process.wait()

    def _kill(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()
        for process in self._processes:
            signal_child(process, signal.SIGKILL)

    async def _ask(self, pid: int, worker: socket.socket | None = None) -> int:
        """One answer after the other. Raises `OSError`: the server has died."""
        async with self._turn:
            if worker is not None and self._control is None:
                await self._start()
            if self._control is None:
                raise ConnectionResetError(errno.ECONNRESET, "the fork server has ended")
            answer = b""
            try:
                socket.send_fds(self._control, [PID.pack(pid)], [] if worker is None else [worker.fileno()])
                answer = await asyncio.get_running_loop().sock_recv(self._control, ANSWER.size)
            finally:
                if not answer:  # it has died; or nobody waits for its answer any more, which the next request would get
                    self._kill()
            if not answer:
                raise ConnectionResetError(errno.ECONNRESET, "the fork server died")
            pid, anew = ANSWER.unpack(answer)
            if anew and not self.notes:
                log.warning(ANEW)
                self.notes.append(ANEW)
            return int(pid)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._processes.append(await start_child(self._module, theirs, stdin=asyncio.subprocess.DEVNULL))
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._control = ours
