"""The processes of one run, one a GPU: started once, given many calls, ended by the first that fails or is late."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

STACKS_SECONDS = 1.0
"""For the stacks of late processes to be written, before they are killed."""


class RankFailed(Exception):
    """A rank raised, ended or was late; the message has its traceback."""


class RankProcesses:
    """A context manager, which kills its processes whatever happens."""

    def __init__(self, size: int, folder: Path, *, tiny: bool) -> None:
        """`folder`: for the choices of GEMMs. `tiny`: on the CPU, over gloo; else each on its GPU, over NCCL."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        address = f"file://{Path(self._folder.name) / 'ranks'}"
        self._processes, self._pipes = [], list[Connection]()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, address, folder, tiny))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def call(self, name: str, *args: object, limit: float, only: Sequence[int] | None = None) -> dict[str, Any]:
        """`Worker.name(*args)` on every rank, or on the ranks `only`, at once; the first one's result.

        Raises `RankFailed` as soon as one of them raises or ends, and after `limit` seconds.
        """
        called = range(self.size) if only is None else only
        for rank in called:
            self._send(rank, (name, args))
        deadline, results = time.monotonic() + limit, dict[int, dict[str, Any]]()
        while len(results) < len(called):
            missing = {self._pipes[rank]: rank for rank in called if rank not in results}
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show_stacks()
                raise RankFailed(f"{name}{args}: no answer of ranks {sorted(missing.values())} in {limit:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[missing[pipe]] = self._receive(pipe, missing[pipe])
        return results[called[0]]

    def _send(self, rank: int, message: object) -> None:
        try:
            self._pipes[rank].send(message)
        except OSError as error:
            raise RankFailed(f"rank {rank} has ended, exit code {self._processes[rank].exitcode}") from error

    def _receive(self, pipe: Connection, rank: int) -> dict[str, Any]:
        try:
            error, result = pipe.recv()
        except (EOFError, OSError) as gone:
            self._processes[rank].join(1.0)
            raise RankFailed(f"rank {rank} has ended, exit code {self._processes[rank].exitcode}") from gone
        if error is not None:
            raise RankFailed(f"rank {rank}:\n{error}")
        found: dict[str, Any] = result
        return found

    def _show_stacks(self) -> None:
        """Every process writes the stacks of its threads to stderr."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)


def _serve(pipe: Connection, rank: int, size: int, address: str, folder: Path, tiny: bool) -> None:
    """One rank, until the pipe is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        from benchmarks.bdlora.worker import Worker

        worker = Worker.joining(rank, size, address, folder, tiny=tiny)
        while True:
            name, args = pipe.recv()
            pipe.send((None, getattr(worker, name)(*args)))
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 - the parent prints it and ends all
        pipe.send((traceback.format_exc(), None))
        sys.stdout.flush()
        time.sleep(60.0)  # the parent kills this process: leaving a group whose ranks wait may hang
