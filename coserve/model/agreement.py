"""Runs work on all tensor-parallel ranks; if it fails on one, all abort it and raise the same error. For all work
outside of training's slices.

The work may have collectives. A rank that fails aborts the slice in which the work runs (`parallel.lockstep`), so that
no rank waits for it. Then the ranks exchange reports and raise the same error.
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
"""Bytes of a rank's report: the message's length in two bytes (big endian), then one msgpack message."""
MESSAGE = 400
"""Most bytes of the report's text."""

T = TypeVar("T")


class FailedTogether(Exception):
    """Work of all ranks failed on one of them; raised on all ranks with the same message."""


class MemoryTogether(FailedTogether, MemoryOfRank):
    """`FailedTogether` for lack of memory; `out_of_memory` recognises it on all ranks."""


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of the work on one rank."""

    kind: Literal["done", "memory", "failed", "aborted"]
    """`aborted`: because another rank failed."""
    text: str = ""
    """If done, a digest of the summary that all ranks must share; otherwise the error's text."""


def on_all_ranks(
    mesh: Mesh | None, device: torch.device, work: Callable[[], T], summary: Callable[[T], str] = lambda _: ""
) -> T:
    """Run `work` on all ranks and return its result, or raise on all ranks.

    All ranks call this at the same time. If it fails, the work must leave nothing behind in which the ranks differ. Its
    collectives, if any, are of tensors on `device`. Without other ranks (`mesh` None or of one rank), it just calls
    `work`.

    Raises:
        FailedTogether: `work` raised on a rank, or the ranks' `summary` of its result differ.
        EngineFault: `work` raised it. Raised only here, as this rank must end.
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
    # The traceback is dropped by now, and with it the tensors that it held.
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
    """Exchange reports; return those of all ranks, by rank."""
    text = report.text.encode()[:MESSAGE].decode(errors="ignore")
    body = msgspec.msgpack.encode(msgspec.structs.replace(report, text=text))
    data = bytearray((len(body).to_bytes(2, "big") + body).ljust(REPORT))
    parts = mesh.all_gather_parts(torch.frombuffer(data, dtype=torch.uint8).to(device)).tolist()
    return [msgspec.msgpack.decode(bytes(one[2 : 2 + (one[0] << 8) + one[1]]), type=_Report) for one in parts]
