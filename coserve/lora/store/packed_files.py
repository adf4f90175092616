"""Packed files: read into host memory as they are, and written after the first read of PEFT's files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore

import torch

from coserve.core.errors import AdapterError, StorageError
from coserve.core.types import AdapterDigests
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
from coserve.lora.store.packing import PackedLayout, PackedSites, SitePlace, host_piece
from coserve.lora.store.times import LoadTimes
from coserve.model.lora import LoraWeights
from coserve.state.durable import disk_errors, write_errors

log = logging.getLogger(__name__)

MAX_WRITES = 4
"""Most packed files that wait to be written; an adapter beyond them is packed after a later read."""


@dataclass(frozen=True)
class PackedForm:
    """How an engine holds adapters on the host. `fingerprint`: that of its base; `for_kernels`: see `packed`."""

    fingerprint: str
    dtype: torch.dtype
    for_kernels: bool
    pinned: bool

    @property
    def vector(self) -> int:
        return VECTOR if self.for_kernels else 1


class PackedFiles:
    """The packed files of an engine's adapters."""

    def __init__(self, form: PackedForm, times: LoadTimes) -> None:
        self._form, self._times = form, times
        self._writer, self._places = ThreadPoolExecutor(1, "pack"), BoundedSemaphore(MAX_WRITES)
        self._refused: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why packed files cannot be written; for /health."""
        return () if self._refused is None else (f"adapters are read slowly again and again: {self._refused}",)

    def close(self) -> None:
        """Wait until every file is written."""
        self._writer.shutdown()

    def load(self, folder: Path, digests: AdapterDigests | None, read: Callable[[], LoraWeights]) -> LoraWeights:
        """Return the adapter of a folder: from its packed file, or by `read` if that is missing, or was made of other
        files or for another base; then it is written in the background. Raises as `read`."""
        if digests is None or not digests.config:
            return read()
        try:
            with disk_errors():
                sources = stamps(folder)
                with self._times.during("read"):
                    found = self._read(folder, sources, digests)
        except (OSError, AdapterError):  # one of PEFT's files is missing: `read` says so
            found, sources = None, ()
        if found is not None:
            return found
        weights = read()
        if sources and isinstance(weights.sites, PackedSites) and self._places.acquire(blocking=False):
            self._writer.submit(self._write, folder, sources, digests, weights, weights.sites)
        return weights

    def _read(self, folder: Path, sources: tuple[Stamp, ...], digests: AdapterDigests) -> LoraWeights | None:
        form = self._form
        if not (folder / PACKED_FILE).exists():
            return None
        with os.fdopen(open_regular(folder, PACKED_FILE), "rb", buffering=0) as file:
            if (found := read_header(file)) is None:
                return None
            header, at = found
            made_of = header.sources, header.digests, header.fingerprint, header.dtype, header.vector
            if made_of != (sources, _pair(digests), form.fingerprint, str(form.dtype), form.vector):
                return None
            layout, pieces = _layout(header, form.dtype), list[torch.Tensor]()
            if layout.bytes != header.bytes:
                return None
            for size in layout.pieces:
                pieces.append(host_piece(size, pinned=form.pinned))
                view = pieces[-1].numpy().data
                while view:
                    if not (got := os.preadv(file.fileno(), [view], at)):
                        return None  # it was cut off
                    view, at = view[got:], at + got
        return LoraWeights(header.settings, PackedSites(pieces, layout))

    def _write(
        self,
        folder: Path,
        sources: tuple[Stamp, ...],
        digests: AdapterDigests,
        weights: LoraWeights,
        sites: PackedSites,
    ) -> None:
        temporary = folder / f".tmp-{PACKED_FILE}"
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
            self._places.release()


def _pair(digests: AdapterDigests) -> tuple[str, str]:
    return digests.weights, digests.config


def _header(
    form: PackedForm, sources: tuple[Stamp, ...], digests: AdapterDigests, weights: LoraWeights, sites: PackedSites
) -> PackedHeader:
    sha256 = hashlib.sha256()
    for piece in sites.pieces:
        sha256.update(piece.numpy().data)
    return PackedHeader(
        sources=sources,
        digests=_pair(digests),
        fingerprint=form.fingerprint,
        dtype=str(form.dtype),
        vector=form.vector,
        settings=weights.settings,
        sites=tuple(_site(name, place) for name, place in sites.layout.places.items()),
        bytes=sites.layout.bytes,
        sha256=sha256.hexdigest(),
    )


def _site(name: str, place: SitePlace) -> PackedSite:
    like = place.like
    return PackedSite(name, place.a_shape, place.b_shape, like.scaling, like.a_blocks, like.b_blocks, like.experts)


def _write(path: Path, header: PackedHeader, sites: PackedSites) -> None:
    with path.open("wb") as file:
        file.write(encode_header(header))
        for piece in sites.pieces:
            file.write(piece.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _layout(header: PackedHeader, dtype: torch.dtype) -> PackedLayout:
    def empty(shape: tuple[int, int]) -> torch.Tensor:
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
        for site in header.sites
    }
    return PackedLayout(LoraWeights(header.settings, pairs), vector=header.vector)
