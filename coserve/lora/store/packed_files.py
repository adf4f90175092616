"""Packed files: read into the host tier as they are, and written after the first read of PEFT's files."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from coserve.core.errors import AdapterError, StorageBusy, StorageError
from coserve.core.processes import usable_cores
from coserve.core.types import AdapterDigests, LoraSettings
from coserve.kernels.lora.types import VECTOR, LoraPair
from coserve.lora.files.packed_header import (
    PACKED_FILE,
    PackedHeader,
    PackedSite,
    Stamp,
    encode_header,
    read_header,
    stamps,
)
from coserve.lora.files.tensorfile import open_regular
from coserve.lora.store.packing import PackedLayout, PackedSites, SitePlace
from coserve.lora.store.reads import LoadTimes
from coserve.model.lora import LoraWeights
from coserve.state.durable import disk_errors, write_errors

log = logging.getLogger(__name__)

FILLERS = 4
"""Threads that read adapters' bytes: one thread copies from the page cache at a fraction of the memory's bandwidth."""
PIECE = 4 << 20
"""Most bytes that a thread reads at once."""
LAYOUTS = 64
"""Cached layouts, which adapters of the same sites and ranks share."""
MAX_WAITING = 256 << 20
"""Most bytes of adapters that wait in memory to be written to packed files, unless there is only one; others are packed
after a later read."""


@dataclass(frozen=True)
class PackedForm:
    """How an engine holds adapters on the host. `fingerprint`: that of its base; `for_kernels`: see `packed`."""

    fingerprint: str
    dtype: torch.dtype
    for_kernels: bool

    @property
    def vector(self) -> int:
        return VECTOR if self.for_kernels else 1


class PackedFiles:
    """The packed files of an engine's adapters."""

    def __init__(self, form: PackedForm, times: LoadTimes, max_waiting: int = MAX_WAITING) -> None:
        self._form, self._times, self._max_waiting = form, times, max_waiting
        self._writer, self._lock, self._waiting = ThreadPoolExecutor(1, "pack"), Lock(), 0
        self._fillers = ThreadPoolExecutor(min(FILLERS, usable_cores()), "adapter-bytes")
        self._refused: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why packed files cannot be written; for /health."""
        return () if self._refused is None else (f"adapters are read slowly again and again: {self._refused}",)

    def close(self) -> None:
        """Wait until every file is written."""
        self._writer.shutdown()
        self._fillers.shutdown(wait=False)

    def load(
        self, folder: Path, digests: AdapterDigests | None, read: Callable[[], LoraWeights]
    ) -> PackedFile | LoraWeights:
        """Return the adapter of a folder: its packed file, if that was made from these files for this base. Otherwise
        return the result of `read`, and write the packed file in the background. Raises as `read`."""
        if digests is None or not digests.config:
            return read()
        found, sources = self._find(folder, digests)
        if found is not None:
            return found
        weights = read()
        if sources and isinstance(weights.sites, PackedSites) and self._may_wait(weights.sites.layout.bytes):
            self._writer.submit(self._write, folder, sources, digests, weights, weights.sites)
        return weights

    def _may_wait(self, size: int) -> bool:
        """Count an adapter as waiting to be written, if there is room for it."""
        with self._lock:
            fits = not self._waiting or self._waiting + size <= self._max_waiting
            self._waiting += size if fits else 0
        return fits

    def open(self, folder: Path, digests: AdapterDigests | None) -> PackedFile | None:
        """Return the packed file of a folder's adapter; None: there is none of the right form."""
        return None if digests is None or not digests.config else self._find(folder, digests)[0]

    def _find(self, folder: Path, digests: AdapterDigests) -> tuple[PackedFile | None, tuple[Stamp, ...]]:
        """Return the packed file, if there is one of the right form, and the stamps of PEFT's files; None and () if one
        of these is missing."""
        try:
            with disk_errors():
                sources = stamps(folder)
                return self._open(folder, sources, digests), sources
        except (OSError, AdapterError):  # whoever reads PEFT's files raises the error
            return None, ()

    def _open(self, folder: Path, sources: tuple[Stamp, ...], digests: AdapterDigests) -> PackedFile | None:
        form, began = self._form, time.perf_counter()
        if not (folder / PACKED_FILE).exists():
            return None
        with os.fdopen(open_regular(folder, PACKED_FILE), "rb", buffering=0) as file:
            if (found := read_header(file)) is None:
                return None
            header, at = found
            made_of = header.sources, header.digests, header.fingerprint, header.dtype, header.vector
            if made_of != (sources, _pair(digests), form.fingerprint, str(form.dtype), form.vector):
                return None
            layout = _layout(header.sites, form.dtype, form.vector)
            if layout.bytes != header.bytes or os.fstat(file.fileno()).st_size < at + header.bytes:
                return None  # the file was cut off, or is of another version
            own = PackedFile(folder, os.dup(file.fileno()), at, header.settings, layout, self._fillers, self._times)
        own.seconds = time.perf_counter() - began
        return own

    def _write(
        self,
        folder: Path,
        sources: tuple[Stamp, ...],
        digests: AdapterDigests,
        weights: LoraWeights,
        sites: PackedSites,
    ) -> None:
        temporary = folder.parent / f".tmp-{folder.name}-{PACKED_FILE}"  # where `DataFolder.sweep` looks
        try:
            with self._times.during("write"), write_errors():
                _write(temporary, _header(self._form, sources, digests, weights, sites), sites)
                temporary.replace(folder / PACKED_FILE)
            self._refused = None
        except StorageError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if folder.exists():  # else the adapter was deleted meanwhile
                if self._refused is None:
                    log.warning("the packed file of an adapter cannot be written: %s", error)
                self._refused = error.message
        finally:
            with self._lock:
                self._waiting -= sites.layout.bytes


class PackedFile:
    """An open packed file of the right adapter and form: `Unread`. It is closed when the object is gone."""

    def __init__(
        self,
        folder: Path,
        fd: int,
        begins: int,
        settings: LoraSettings,
        layout: PackedLayout,
        threads: Executor,
        times: LoadTimes,
    ) -> None:
        """`begins`: where the bytes begin. `threads` read them."""
        self.settings, self.layout = settings, layout
        self._folder, self._fd, self._begins, self._threads, self._times = folder, fd, begins, threads, times
        self.seconds = 0.0
        """Seconds of opening it."""
        weakref.finalize(self, os.close, fd)

    def write(self, parts: Sequence[Tensor]) -> None:
        """See `Unread`. Raises as `read`."""
        began = time.perf_counter()
        self.read(parts, [0, *accumulate(map(len, parts[:-1]))])
        self._times.add("read", self.seconds + time.perf_counter() - began)

    def read(self, parts: Sequence[Tensor], starts: Sequence[int]) -> None:
        """Fill parts (uint8) with the layout's bytes from these offsets on. A file that cannot be read is deleted, and
        `StorageBusy` raised: the next attempt reads PEFT's files."""
        reads = list[Future[None]]()
        for part, start in zip(parts, starts, strict=True):
            for first in range(0, len(part), PIECE):
                piece, at = part[first : first + PIECE], self._begins + start + first
                reads.append(self._threads.submit(self._read, piece, at))
        wait(reads)
        for each in reads:
            if (error := each.exception()) is not None:
                with suppress(OSError):
                    (self._folder / PACKED_FILE).unlink()
                raise StorageBusy(f"the packed file of an adapter cannot be read: {error}") from error

    def _read(self, piece: Tensor, at: int) -> None:
        view = piece.numpy().data
        while view:
            if not (got := os.preadv(self._fd, [view], at)):
                raise OSError(errno.EIO, "it was cut off")
            view, at = view[got:], at + got


def _pair(digests: AdapterDigests) -> tuple[str, str]:
    return digests.weights, digests.config


def _header(
    form: PackedForm, sources: tuple[Stamp, ...], digests: AdapterDigests, weights: LoraWeights, sites: PackedSites
) -> PackedHeader:
    return PackedHeader(
        sources=sources,
        digests=_pair(digests),
        fingerprint=form.fingerprint,
        dtype=str(form.dtype),
        vector=form.vector,
        settings=weights.settings,
        sites=tuple(_site(name, place) for name, place in sites.layout.places.items()),
        bytes=sites.layout.bytes,
        sha256=hashlib.sha256(sites.memory_N.numpy().data).hexdigest(),
    )


def _site(name: str, place: SitePlace) -> PackedSite:
    like = place.like
    return PackedSite(name, place.a_shape, place.b_shape, like.scaling, like.a_blocks, like.b_blocks, like.experts)


def _write(path: Path, header: PackedHeader, sites: PackedSites) -> None:
    with path.open("wb") as file:
        file.write(encode_header(header))
        file.write(sites.memory_N.numpy().data)
        file.flush()
        os.fsync(file.fileno())


@lru_cache(maxsize=LAYOUTS)
def _layout(sites: tuple[PackedSite, ...], dtype: torch.dtype, vector: int) -> PackedLayout:
    """Adapters of the same sites and ranks share one layout, whose hundreds of objects take milliseconds to make."""

    def empty(shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pairs = {
        site.name: LoraPair(
            empty(site.a),
            empty(site.b),
            site.scaling,
            a_blocks=site.a_blocks,
            b_blocks=site.b_blocks,
            experts=site.experts,
        )
        for site in sites
    }
    return PackedLayout(pairs, vector)
