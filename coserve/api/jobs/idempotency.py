"""Requests with the same `Idempotency-Key`: they are handled one after the other, and short digests of a request's
fields, kept with its job, tell whether a later one is the same request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from coserve.api.jobs.sources import UploadedRows
from coserve.core.errors import IdempotencyMismatch, QueueFull
from coserve.core.schemas.jobs import FinetuneRequest
from coserve.state.registry.records import JobRecord


class IdempotencyKeys:
    """Locks by `Idempotency-Key`. If a client repeats a request while its first one is still handled, the second waits,
    and then finds the first one's job. If the first one failed or its client has left, the second is handled itself."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds that a request waits for the one before it."""
        self._patience = patience
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks that a request holds or waits for."""

    @asynccontextmanager
    async def alone(self, key: str | None) -> AsyncIterator[None]:
        """Hold the key's lock inside the block; no lock without a key. Raises `QueueFull` after `patience` seconds."""
        if key is None:
            yield
            return
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(self._patience):
                await lock.acquire()
        except TimeoutError:
            why = f"a request with the Idempotency-Key {key!r} is being handled; try again later"
            raise QueueFull(why, retry_after=10) from None
        try:
            yield
        finally:
            lock.release()


LENGTH = 16
"""Hexadecimal digits of a digest."""
KEY = "Idempotency-Key"


def request_digests(request: FinetuneRequest, uploaded: UploadedRows) -> dict[str, str]:
    """Return a digest of each field that is not its default, by dotted path; fields of lora and training are listed one
    by one. `data` is the digest of the rows, also if they are in an uploaded file."""
    found = {name: _digest([msgspec.json.encode(value, order="sorted")]) for name, value in _given(request)}
    if request.data is not None:
        found["data"] = _digest(msgspec.json.encode(row, order="sorted") + b"\n" for row in request.data)
    elif uploaded.corpus is not None:
        found["data"] = _file_digest(uploaded.corpus)
    if uploaded.validation is not None:
        found["validation"] = _file_digest(uploaded.validation)
    return found


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]


def check_same_request(job: JobRecord, given: Mapping[str, str]) -> None:
    """Raise `IdempotencyMismatch`, with the differing fields, if a request with digests `given` is not the one that
    made `job`."""
    first = job.request_digests or {**given, "adapter": _digest([msgspec.json.encode(job.spec.adapter)])}
    different = sorted(name for name in {*first, *given} if first.get(name) != given.get(name))
    if different:
        raise IdempotencyMismatch(
            f"expected the request that the key was first used for, which made job {job.spec.id}, got one with another "
            f"{' and '.join(different)}; use another key for another job",
            field=KEY,
        )


def _given(value: msgspec.Struct, parent: str = "") -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(value):
        name, found = field.name, getattr(value, field.name)
        if isinstance(found, msgspec.Struct) and not parent:
            yield from _given(found, f"{name}.")
        elif parent + name != "data" and found != _default(field):
            yield parent + name, found


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _digest(pieces: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()[:LENGTH]
