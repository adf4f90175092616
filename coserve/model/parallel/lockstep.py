"""Lets tensor-parallel ranks abort a slice of work together if one of them fails, for example for lack of memory.

If a rank simply returned early, the others would wait for ever in the collectives that it does not begin. So within a
slice each rank announces its collectives on a board in shared memory before it begins them (those of a CUDA graph
before its launch), and checks whether another rank has failed. A rank that fails, or sees that another one did, begins
no further collective of its own (`abort`). It then takes part, with zeros, in those that other ranks had begun already
(`finish_collectives`). While no rank fails, a collective costs a few writes to memory.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Literal

import torch

from coserve.core.errors import EngineFault
from coserve.core.ranks import BOARD_WORDS, board_bytes
from coserve.model.parallel.guard import SliceGuard
from coserve.model.parallel.mesh import Collective, Mesh, Traffic

PAUSE = 0.0005
"""Seconds between two reads of the board by a rank that has aborted a slice."""
_SLICE, _COUNT, _STATE, _FIRST = range(4)
"""Word offsets in a rank's section of the board: number of the slice, collectives begun in it, state, start of the
log."""
LOG = BOARD_WORDS - _FIRST
"""Collectives of one slice that a rank's section has room for. No slice is longer than a micro-batch."""
_NAMES = ("all_reduce", "all_gather")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)

State = Literal[0, 1, 2]
RUNNING: State = 0
ABORTED: State = 1
"""State of a rank that has failed, or seen that another rank has."""
ENDED: State = 2


class PeerFailed(Exception):
    """Another rank has failed in this slice."""


class Lockstep(SliceGuard):
    """One rank's view of the board. All ranks run the same slices in order, and none begins one before all have ended
    the previous one."""

    def __init__(self, mesh: Mesh, board: int) -> None:
        """`board`: a file descriptor. From now on this is the mesh's guard, and its collectives in slices are
        announced."""
        self._mesh, self._slice, self._open, self._finishing = mesh, 0, False, False
        self._words = memoryview(mmap.mmap(board, board_bytes(mesh.size))).cast("Q")
        self._own = mesh.rank * BOARD_WORDS
        self._others = [rank * BOARD_WORDS for rank in range(mesh.size) if rank != mesh.rank]
        self._device = torch.device("cpu")
        mesh.traffic, mesh.guard = _AnnouncedTraffic(self), self

    def begin(self, device: torch.device) -> None:
        """Begin a slice whose collectives are of tensors on this device."""
        self._slice, self._device, self._open = self._slice + 1, device, True
        self._words[self._own + _COUNT] = 0
        self._words[self._own + _STATE] = RUNNING
        self._words[self._own + _SLICE] = self._slice  # written last: the others read the rest once this is there

    def check(self) -> None:
        """Raise `PeerFailed` if another rank has aborted the open slice: results of collectives may be wrong then."""
        words = self._words
        if self._open and any(
            words[at + _SLICE] == self._slice and words[at + _STATE] == ABORTED for at in self._others
        ):
            raise PeerFailed

    def end(self) -> None:
        """End the slice after the device has finished it. Raises `PeerFailed`."""
        self.check()
        self._words[self._own + _STATE] = ENDED
        self._open = False

    def abort(self) -> None:
        """Tell the others that this rank has aborted the slice."""
        self._words[self._own + _STATE] = ABORTED

    def finish_collectives(self) -> None:
        """Take part in the collectives that others have begun, after `abort` and with the slice's memory freed.

        Returns once all ranks have aborted or ended the slice. Raises `EngineFault`.
        """
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
                    time.sleep(PAUSE)  # polls, as the other ranks may be blocked and cannot wake this one
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            raise EngineFault(
                "a rank could not end the collectives of a slice in which another one had failed"
            ) from error
        finally:
            self._finishing = self._open = False

    def announce(self, collectives: Sequence[Collective]) -> None:
        """Announce collectives of a slice before they begin, all of them or none. Raises `PeerFailed` if another rank
        has failed; then none is announced."""
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
        """Run the collective of a log entry."""
        rest, dtype = divmod(entry, len(_DTYPES))
        size, name = divmod(rest, len(_NAMES))
        zeros = torch.zeros(size, dtype=_DTYPES[dtype], device=self._device)
        if _NAMES[name] == "all_reduce":
            self._mesh.all_reduce(zeros)
        else:
            self._mesh.all_gather(zeros, 0)


class _AnnouncedTraffic(Traffic):
    """`Traffic` that announces collectives before it counts them."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__()
        self._lockstep = lockstep

    def begin(self, collectives: Sequence[Collective]) -> None:
        self._lockstep.announce(collectives)
        super().begin(collectives)
