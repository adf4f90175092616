"""Reads a LoRA server's part of an adapter onto its device, so that the first layers are there while others are read.

A packed file, which an engine writes after its first read of the adapter, holds the matrices as they are needed; PEFT's
files are read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from coserve.core.errors import AdapterNotFound
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec
from coserve.engine.lora_server.placement import ServerPart
from coserve.kernels.lora.experts.slot_terms import kernel_layout
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.files import load_adapter
from coserve.lora.store.packed_files import PackedFile, PackedFiles, PackedForm
from coserve.lora.store.packing import SitePlace
from coserve.lora.store.reads import LoadTimes
from coserve.memory.buffer import aligned
from coserve.state.folder import DataFolder


@dataclass(frozen=True)
class PairsRuns:
    """A server's part of an adapter, read a few layers at a time."""

    bytes: int
    rank: int
    """Largest rank of an expert's pair; 0: the adapter changes no experts of the part."""
    runs: Iterator[Mapping[str, LoraPair]]
    """Pairs by parameter, complete on the device, in the order of their layers: each run has one layer or several.
    Raises `StorageError` where a file cannot be read."""
    kept: object = None
    """To be kept as long as the pairs are: other readers share them meanwhile."""


ReadPairs = Callable[[AdapterRef, AdapterDigests | None], PairsRuns]
"""Reads a server's part of an adapter."""


class PairsReader:
    """Reads adapters of a data folder. May be called on any thread."""

    def __init__(self, part: ServerPart, spec: BaseSpec, folder: DataFolder, device: torch.device) -> None:
        self._part, self._spec, self._folder, self._device = part, spec, folder, device
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        form = PackedForm(spec.fingerprint, self._dtype, for_kernels=device.type == "cuda")
        self._packed = PackedFiles(form, LoadTimes())
        self.form: Hashable = spec.fingerprint, spec.dtype, (*part.sites,), part.first, part.experts
        """All that the pairs depend on besides an adapter's files."""

    def __call__(self, ref: AdapterRef, digests: AdapterDigests | None) -> PairsRuns:
        """Return the server's part of an adapter. Raises as `load_adapter` does, and `AdapterNotFound`."""
        path = self._folder.adapter(ref)
        if not path.is_dir():
            raise AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
        file = self._packed.open(path, digests)
        return self._of_peft(path, digests) if file is None else self._of_packed(file)

    def _of_peft(self, path: Path, digests: AdapterDigests | None) -> PairsRuns:
        weights = load_adapter(path, self._spec, dtype=self._dtype, digests=digests)
        own = {name: self._share(pair) for name, pair in weights.experts.items() if name in self._part.sites}
        size = sum(matrix.nbytes for pair in own.values() for matrix in (pair.a_RD, pair.b_OR))
        runs = (self._placed({name: own[name] for name in run}) for run in self._runs([*own]))
        return PairsRuns(size, max((pair.rank for pair in own.values()), default=0), runs)

    def _placed(self, pairs: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
        """Copy pairs to the device, as its kernels need them."""
        found = {name: pair.to(self._device) for name, pair in pairs.items()}
        if self._device.type == "cuda":
            found = {name: kernel_layout(pair) for name, pair in found.items()}
            torch.cuda.current_stream(self._device).synchronize()  # steps read them on other streams
        return found

    def _share(self, pair: LoraPair) -> LoraPair:
        """Return the part's experts of a pair; a copy, so that the others' memory is freed."""
        part, (a_ERD, b_EOR) = self._part, (x.view(pair.experts, -1, x.shape[1]) for x in (pair.a_RD, pair.b_OR))
        if part.experts == pair.experts:
            return pair
        a_RD, b_OR = (x[part.first : part.first + part.experts].flatten(0, 1).clone() for x in (a_ERD, b_EOR))
        return replace(pair, a_RD=a_RD, b_OR=b_OR, experts=part.experts)

    def _of_packed(self, file: PackedFile) -> PairsRuns:
        places = {name: place for name, place in file.layout.places.items() if name in self._part.sites}
        size = sum(end - first for place in places.values() for first, end in self._spans(file, place))
        runs = (self._read(file, {name: places[name] for name in run}) for run in self._runs([*places]))
        return PairsRuns(size, max((place.rank for place in places.values()), default=0), runs)

    def _spans(self, file: PackedFile, place: SitePlace) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the bytes of the part's experts in the file's layout, of A and of B."""
        item, part, experts = file.layout.dtype.itemsize, self._part, place.like.experts
        a, b = (place.a_shape[0] * place.a_shape[1], place.b_shape[0] * place.columns)
        first, end = part.first, part.first + part.experts
        return (
            (place.a_at + item * a * first // experts, place.a_at + item * a * end // experts),
            (place.b_at + item * b * first // experts, place.b_at + item * b * end // experts),
        )

    def _read(self, file: PackedFile, places: Mapping[str, SitePlace]) -> dict[str, LoraPair]:
        """Read some parameters: into host memory, which is pinned for a GPU, and from there in one copy."""
        spans = [span for place in places.values() for span in self._spans(file, place)]
        sizes = [end - first for first, end in spans]
        *starts, total = accumulate(map(aligned, sizes), initial=0)
        host_N = torch.empty(total, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        file.read([host_N[part] for part in parts], [first for first, _ in spans])
        memory_N, found = host_N.to(self._device), dict[str, LoraPair]()
        matrices = iter([memory_N[part].view(file.layout.dtype) for part in parts])
        for name, place in places.items():
            a_RD = next(matrices).view(-1, place.a_shape[1])
            b_OR = next(matrices).view(-1, place.columns)[:, : place.b_shape[1]]
            found[name] = replace(place.like, a_RD=a_RD, b_OR=b_OR, experts=self._part.experts)
        return found

    def _runs(self, names: Sequence[str]) -> list[list[str]]:
        """Cut parameters into runs of 1, 2, 4 and so on layers."""
        by_layer = dict[int, list[str]]()
        for name in names:
            by_layer.setdefault(self._part.sites[name].layer, []).append(name)
        layers, found, first = sorted(by_layer), list[list[str]](), 0
        while first < len(layers):
            own = layers[first : 2 * first + 1]
            found.append([name for layer in own for name in by_layer[layer]])
            first += len(own)
        return found
