"""Ranks that run one slice of work, such as one of training, abort it together if one of them fails, for example for
lack of memory.

A rank that returned early would let the others wait for ever in the collectives that it does not begin. So within a
slice each rank writes what it begins to a board in shared memory, ahead of each collective (of a CUDA graph's, ahead of
its launch), and looks whether another rank has failed.
A rank that fails, or sees that another one did, begins no further collective of its own accord (`abort`); then it runs
those that other ranks had begun already, with zeros (`finish_collectives`). Until one fails, a collective costs a few
writes to memory.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Literal

import torch

from coserve.core.errors import EngineFault
from coserve.core.ranks import BOARD_WORDS, board_bytes
from coserve.model.parallel.mesh import Collective, Mesh, Traffic

PAUSE = 0.0005
"""Seconds between two looks at the board of a rank that has aborted a slice."""
_SLICE, _COUNT, _STATE, _FIRST = range(4)
"""Words of a rank's part of the board: number of the slice, collectives begun in it, state, and the first of the
log."""
LOG = BOARD_WORDS - _FIRST
"""Most collectives of a slice: that of training ends with a micro-batch at the latest."""
_NAMES = ("all_reduce", "all_gather")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)

State = Literal[0, 1, 2]
RUNNING: State = 0
ABORTED: State = 1
"""It has failed, or seen that another rank has."""
ENDED: State = 2


class PeerFailed(Exception):
    """Another rank has failed in this slice."""


class Lockstep:
    """One rank's view of the board. All ranks run the same slices in the same order, none begins one before all ended
    the last."""

    def __init__(self, mesh: Mesh, board: int) -> None:
        """`board`: a file descriptor. From now on this is the mesh's guard, and its collectives inside of slices are
        written to the board."""
        self._mesh, self._slice, self._open, self._finishing = mesh, 0, False, False
        self._words = memoryview(mmap.mmap(board, board_bytes(mesh.size))).cast("Q")
        self._own = mesh.rank * BOARD_WORDS
        self._others = [rank * BOARD_WORDS for rank in range(mesh.size) if rank != mesh.rank]
        self._device = torch.device("cpu")
        mesh.traffic, mesh.guard = _AnnouncedTraffic(self), self

    def begin(self, device: torch.device) -> None:
        """A slice begins; its collectives are of tensors on this device."""
        self._slice, self._device, self._open = self._slice + 1, device, True
        self._words[self._own + _COUNT] = 0
        self._words[self._own + _STATE] = RUNNING
        self._words[self._own + _SLICE] = self._slice  # the others read the rest once this is there

    def check(self) -> None:
        """Raises `PeerFailed` if another rank has aborted the slice that is open: results of collectives may be wrong
        then."""
        words = self._words
        if self._open and any(
            words[at + _SLICE] == self._slice and words[at + _STATE] == ABORTED for at in self._others
        ):
            raise PeerFailed

    def end(self) -> None:
        """The slice is done, on the device too. Raises `PeerFailed`."""
        self.check()
        self._words[self._own + _STATE] = ENDED
        self._open = False

    def abort(self) -> None:
        """Tell the others that this rank has aborted the slice."""
        self._words[self._own + _STATE] = ABORTED

    def finish_collectives(self) -> None:
        """After `abort`, with the slice's memory freed: take part in what others have begun. Returns once all ranks
        have aborted or ended the slice. Raises `EngineFault`."""
        words, self._finishing = self._words, True
        try:
            while True:
                running = [at for at in self._others if not self._is_over(at)]
                begun = words[self._own + _COUNT]
                ahead = [at for at in self._others if words[at + _SLICE] == self._slice and words[at + _COUNT] > begun]
                if ahead:
                    self._run(words[ahead[0] + _FIRST + begun])
                elif not running:
                    break
                else:
                    time.sleep(PAUSE)  # nothing wakes this rank: the others may wait for it
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            raise EngineFault(
                "a rank could not end the collectives of a slice in which another one had failed"
            ) from error
        finally:
            self._finishing = self._open = False

    def announce(self, collectives: Sequence[Collective]) -> None:
        """Collectives of a slice are about to begin, all of them or none. Raises `PeerFailed`: none is announced."""
        if not self._open:
            return
        if not self._finishing:
            self.check()
        begun = self._words[self._own + _COUNT]
        if begun + len(collectives) > LOG:
            raise EngineFault(f"expected at most {LOG} collectives of a slice")
        for place, (name, numbers, dtype) in enumerate(collectives, self._own + _FIRST + begun):
            self._words[place] = (numbers * len(_NAMES) + _NAMES.index(name)) * len(_DTYPES) + _DTYPES.index(dtype)
        self._words[self._own + _COUNT] = begun + len(collectives)

    def _is_over(self, at: int) -> bool:
        return self._words[at + _SLICE] == self._slice and self._words[at + _STATE] != RUNNING

    def _run(self, entry: int) -> None:
        """A collective of a log's entry."""
        rest, dtype = divmod(entry, len(_DTYPES))
        size, name = divmod(rest, len(_NAMES))
        zeros = torch.zeros(size, dtype=_DTYPES[dtype], device=self._device)
        if _NAMES[name] == "all_reduce":
            self._mesh.all_reduce(zeros)
        else:
            self._mesh.all_gather(zeros, 0)


class _AnnouncedTraffic(Traffic):
    """Counts, after it announced."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__()
        self._lockstep = lockstep

    def begin(self, collectives: Sequence[Collective]) -> None:
        self._lockstep.announce(collectives)
        super().begin(collectives)
