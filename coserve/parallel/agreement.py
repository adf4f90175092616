"""Work that each rank does by itself, and that all ranks give up if one of them cannot do it."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

import torch

from coserve.errors import UnsupportedBase
from coserve.parallel.mesh import Mesh

FAILED = -1
"""What a rank sends whose work raised."""

T = TypeVar("T")


def on_all_ranks(
    mesh: Mesh | None, device: torch.device, work: Callable[[], T], summary: Callable[[T], str] = lambda _: ""
) -> T:
    """What `work` returns, which begins no collective. All ranks call this at once, and all of them raise or none does.

    `mesh` None: there is one rank. Raises what `work` raised on this rank; `UnsupportedBase` where it raised on another one, or where the
    `summary` of its result is not the same on all ranks.
    """
    if mesh is None or mesh.size == 1:
        return work()
    failure: Exception | None = None
    try:
        found = work()
        own = int.from_bytes(blake2b(summary(found).encode(), digest_size=7).digest(), "big")
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure, own = error, FAILED
    theirs = mesh.all_gather_parts(torch.tensor([own], device=device)).view(-1).tolist()
    if failure is not None:
        raise failure
    if FAILED in theirs:
        raise UnsupportedBase(f"they cannot be compiled on rank {theirs.index(FAILED)}")
    if len(set(theirs)) > 1:
        raise UnsupportedBase("they are not compiled alike on all ranks")
    return found
