"""Work of all ranks that all of them give up if one of them cannot do it: one mechanism for whatever runs outside of
training's slices.

Such work may have collectives in it. A rank that fails aborts the slice that the work is (`parallel.lockstep`), so that
nobody waits for it; then the ranks tell each other what came of the work, and raise the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal, TypeVar

import msgspec
import torch

from coserve.core.errors import CoserveError, EngineFault
from coserve.model.faults import MemoryOfRank, contained, memory_numbers, out_of_memory
from coserve.model.parallel.guard import aborting_on_error
from coserve.model.parallel.lockstep import PeerFailed
from coserve.model.parallel.mesh import LoneRank, Mesh

log = logging.getLogger(__name__)

REPORT = 512
"""Bytes of a rank's report: two of its length (big endian), one msgpack message."""
MESSAGE = 400
"""Most bytes of the text in it."""

T = TypeVar("T")


class FailedTogether(Exception):
    """Work of all ranks that one of them could not do: raised on all of them, with the same message."""


class MemoryTogether(FailedTogether, MemoryOfRank):
    """The same, for lack of memory: `out_of_memory` says so of it on all ranks."""


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What came of the work on a rank."""

    kind: Literal["done", "memory", "failed", "aborted"]
    """Aborted: as another rank failed."""
    text: str = ""
    """Done: a digest of what must be alike; else what is told of the error."""


def on_all_ranks(
    mesh: Mesh | None, device: torch.device, work: Callable[[], T], summary: Callable[[T], str] = lambda _: ""
) -> T:
    """What `work` returns. All ranks call this at once, and all of them raise or none does; so the work must leave
    nothing behind that the ranks would not have in common. Its collectives, if any, are of tensors on `device`.

    `mesh` None, or of a rank alone: `work` is called, and raises what it raises. Else raises `FailedTogether` where it
    raised on a rank, or where the `summary` of its result is not the same on all; and `EngineFault` alone, as `work`
    does: this rank must end.
    """
    if mesh is None or mesh.size == 1 or isinstance(mesh, LoneRank):
        return work()
    error: Exception | None = None
    mesh.guard.begin(device)
    try:
        with contained(device), aborting_on_error(mesh.guard):
            found = work()
            report = _Report("done", blake2b(summary(found).encode(), digest_size=16).hexdigest())
            mesh.guard.end()
    except EngineFault:
        raise
    except PeerFailed:
        report = _Report("aborted")
    except Exception as raised:  # noqa: BLE001 - raised below, once the other ranks know
        report, error = _failure(raised, mesh.rank, device), raised.with_traceback(None)
    # Here the traceback is gone, and with it the tensors that it held.
    if report.kind != "done":
        mesh.guard.finish_collectives()
    everyone = _exchange(mesh, device, report)
    for rank, one in enumerate(everyone):
        if one.kind in ("memory", "failed"):
            raise (MemoryTogether if one.kind == "memory" else FailedTogether)(f"rank {rank}: {one.text}") from error
    if len({one.text for one in everyone}) > 1:
        raise FailedTogether("the ranks came to different results")
    return found


def _failure(error: Exception, rank: int, device: torch.device) -> _Report:
    if out_of_memory(error):
        return _Report("memory", memory_numbers(error, device))
    if isinstance(error, CoserveError):
        return _Report("failed", error.message)
    log.warning("work of all ranks has failed on rank %d", rank, exc_info=error)
    return _Report("failed", f"{type(error).__name__}: {error}")


def _exchange(mesh: Mesh, device: torch.device, report: _Report) -> list[_Report]:
    """All ranks' reports, by rank."""
    text = report.text.encode()[:MESSAGE].decode(errors="ignore")
    body = msgspec.msgpack.encode(msgspec.structs.replace(report, text=text))
    data = bytearray((len(body).to_bytes(2, "big") + body).ljust(REPORT))
    parts = mesh.all_gather_parts(torch.frombuffer(data, dtype=torch.uint8).to(device)).tolist()
    return [msgspec.msgpack.decode(bytes(one[2 : 2 + (one[0] << 8) + one[1]]), type=_Report) for one in parts]
