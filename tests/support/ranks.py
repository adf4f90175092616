"""Processes that form a mesh, started once and given many functions to run; the fixtures `two` and `ranks` share
them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch

from coserve.core.ranks import board_bytes
from coserve.model.parallel.join import join
from coserve.model.parallel.lockstep import Lockstep
from coserve.model.parallel.mesh import GroupMesh, Mesh, Traffic, fits_one_shot
from tests.support.triton_interpreter import make_faster

LIMIT = 240.0
"""Seconds for one function."""
PRELOADED = ["tests.support.ranks", "coserve.engine.worker"]
"""What ranks import is most of what they cost: seconds of CPU time each."""


class Ranks:
    """`size` processes; a context manager, which ends them whatever happens."""

    def __init__(self, size: int, *, cuda: bool = False, timeout: int = 60) -> None:
        """`cuda`: over NCCL, each on its GPU; else over gloo. `timeout`: seconds in which a rank waits for another."""
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn" if cuda else "forkserver")
        if not cuda:  # one process imports for all ranks of all meshes; once CUDA is in use, it could not be forked
            context.set_forkserver_preload(PRELOADED)
        address = f"file://{Path(self._folder.name) / 'store'}"
        self._processes, self._pipes = [], list[Connection]()
        self.usable = True
        """No function was left unanswered."""
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, address, cuda, timeout), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """`function(mesh, *args)` of each rank, a module's own function. What a rank raises fails the test."""
        self.usable = False
        board = Path(self._folder.name) / "board"
        board.unlink(missing_ok=True)  # a new one for each function: it numbers its slices from 1
        board.touch()
        os.truncate(board, board_bytes(len(self._pipes)))
        for pipe in self._pipes:
            pipe.send((function, args, str(board)))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) < len(self._pipes):
            missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(missing, timeout=LIMIT)
            assert ready, f"no answer of ranks {sorted(set(range(len(self._pipes))) - set(results))}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                error, result = pipe.recv()
                results[rank] = result
                if error is not None:
                    errors[rank] = error
        self.usable = True
        assert not errors, "\n".join(f"rank {rank}:\n{error}" for rank, error in errors.items())
        return [results[rank] for rank in range(len(self._pipes))]


def _serve(pipe: Connection, rank: int, size: int, address: str, cuda: bool, timeout: int) -> None:
    torch.set_num_threads(1)
    make_faster()
    if cuda:
        torch.cuda.set_device(rank)
    mesh = join(rank, size, address=address, device=torch.device("cuda" if cuda else "cpu"), timeout=timeout)
    while True:
        try:
            function, args, board = pipe.recv()
        except EOFError:
            return
        mesh.traffic = Traffic()  # a function may have put its own there
        with Path(board).open("r+b") as file:
            Lockstep(mesh, file.fileno())
        try:
            pipe.send((None, function(mesh, *args)))
        except Exception:  # noqa: BLE001 - reported to the test, which fails
            pipe.send((traceback.format_exc(), None))


class OneShotMesh(GroupMesh):
    """Says of small sums what a `SymmetricMesh` says."""

    def one_shot(self, size: int) -> bool:
        return fits_one_shot(size, self.size)


def rank_of(mesh: Mesh) -> tuple[int, int]:
    return mesh.rank, mesh.size
