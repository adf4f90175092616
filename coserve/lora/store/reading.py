"""Reads an adapter's matrices from an open file into their final host memory, on several threads. Reads and large
operations release the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace

import torch
from torch import Tensor

from coserve.core.errors import CorruptAdapter
from coserve.core.types import BaseSpec, SiteSpec
from coserve.kernels.lora.types import VECTOR, LoraPair
from coserve.lora.files.experts import ALL, ExpertTensors, Matrices
from coserve.lora.files.finite import all_finite
from coserve.lora.files.peft import AdapterTensors
from coserve.lora.files.tensorfile import TensorEntry, TensorFile
from coserve.lora.store.packing import PackedLayout, PackedSites
from coserve.model.adapters.end_sites import replaced

Read = Callable[[TensorEntry], Tensor]

RUN = 8 << 20
"""Bytes of the sites that one thread reads and checks at a time."""
PART = 64 << 20
"""Bytes of an adapter that is not wanted as a whole: what is read of it before a rank's shards are taken."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


def read_sites(
    file: TensorFile,
    tensors: AdapterTensors,
    base: BaseSpec,
    dtype: torch.dtype,
    threads: Executor,
    *,
    for_kernels: bool,
) -> PackedSites:
    """Read all pairs in `dtype` into new host memory. `threads` fill it, each some sites at a time.

    `for_kernels`: use the layout of `packed`; only for adapters without block-diagonal pairs. Raises `StorageError`, or
    `CorruptAdapter` for values that are not finite in `dtype`; if several sites are wrong, the first one's error.
    """
    layout = _layout(tensors, base, dtype, VECTOR if for_kernels else 1)
    memory_N, filled = torch.empty(layout.bytes, dtype=torch.uint8), list[Future[None]]()
    for names in _runs(layout):
        filled.append(threads.submit(_fill, file, tensors, base, layout, names, memory_N))
    for each in filled:
        each.result()
    return PackedSites(memory_N, layout)


def in_parts(tensors: AdapterTensors, base: BaseSpec, dtype: torch.dtype) -> Iterator[AdapterTensors]:
    """Divide an adapter into parts of about `PART` bytes in `dtype`, in order; all replaced rows are the last one."""
    linear = replace(tensors, rows={})
    for names in _runs(_layout(linear, base, dtype, 1), PART):
        yield replace(linear, sites={name: tensors.sites[name] for name in names})
    if tensors.rows:
        yield replace(tensors, sites={})


def _runs(layout: PackedLayout, size: int = RUN) -> list[list[str]]:
    """The sites in order, in runs of about `size` bytes."""
    runs = dict[int, list[str]]()
    for name, place in layout.places.items():
        runs.setdefault(place.first // size, []).append(name)
    return list(runs.values())


def _layout(tensors: AdapterTensors, base: BaseSpec, dtype: torch.dtype, vector: int) -> PackedLayout:
    def empty(entry: TensorEntry) -> Tensor:
        return torch.empty(entry.shape, dtype=dtype, device="meta")

    def shaped(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    pairs = {
        name: LoraPair(
            shaped(shape.experts * shape.rank, base.experts[name].in_features),
            shaped(shape.experts * base.experts[name].out_features, shape.rank),
            shape.scaling,
            experts=shape.experts,
        )
        if shape.experts > 1
        else LoraPair(
            empty(tensors.a[name]),
            empty(tensors.b[name]),
            shape.scaling,
            a_blocks=shape.a_blocks,
            b_blocks=shape.b_blocks,
            magnitude_O=torch.empty(tensors.magnitudes[name].shape, device="meta") if tensors.magnitudes else None,
        )
        for name, shape in tensors.sites.items()
    }
    pairs |= {name: LoraPair(empty(entry), shaped(0, entry.shape[0]), 1.0) for name, entry in tensors.rows.items()}
    return PackedLayout(pairs, vector)


def _fill(
    file: TensorFile,
    tensors: AdapterTensors,
    base: BaseSpec,
    layout: PackedLayout,
    names: Sequence[str],
    memory_N: Tensor,
) -> None:
    """Read these sites, which are neighbours, into the layout's memory. Raises as `read_sites`."""
    memory = memory_N.numpy().data
    buffers = tuple[memoryview, ...]()
    linear = [name for name in names if name in tensors.a]
    for name in names:
        if name in tensors.rows:
            rows_KD = _tensor(file, tensors.rows[name], _buffer(tensors.rows[name]))
            layout.copy(name, replaced(rows_KD), memory_N)
            continue
        if name in tensors.experts:
            own, spec = tensors.experts[name], base.experts[name]
            a_RD, b_OR = expert_matrices(own, spec, lambda entry: _tensor(file, entry, _buffer(entry)))
            layout.copy(name, replace(layout.places[name].like, a_RD=a_RD, b_OR=b_OR), memory_N)
            continue
        place, both = layout.places[name], (tensors.a[name], tensors.b[name])
        as_stored = all(DTYPES[entry.dtype] is layout.dtype for entry in both) and place.columns == place.b_shape[1]
        if as_stored and name not in tensors.magnitudes:
            for entry, at in zip(both, (place.a_at, place.b_at), strict=True):
                file.read_into(entry, memory[at : at + entry.end - entry.start])
        else:
            buffers = buffers or tuple(_buffer(*(of[name] for name in linear)) for of in (tensors.a, tensors.b))
            a_RD, b_OR = (_tensor(file, entry, buffer) for entry, buffer in zip(both, buffers, strict=True))
            pair = replace(place.like, a_RD=a_RD, b_OR=b_OR)
            if name in tensors.magnitudes:
                entry = tensors.magnitudes[name]
                pair = replace(pair, magnitude_O=_tensor(file, entry, _buffer(entry)))
            layout.copy(name, pair, memory_N)
    kind = _KINDS[layout.dtype]
    own_N = memory_N[layout.places[names[0]].first : layout.places[names[-1]].end]
    if all_finite(own_N.numpy(), kind):
        return
    for name in names:  # find the wrong one; maybe only the uninitialised gaps between matrices are not finite
        pair = layout.pair(name, memory_N)
        matrices = [own for own in (pair.a_RD, pair.b_OR, pair.magnitude_O) if own is not None]
        if not all(bool(torch.isfinite(matrix).all()) for matrix in matrices):
            raise CorruptAdapter(f"{name}: its weights are not finite in {str(layout.dtype).removeprefix('torch.')}")


def _buffer(*entries: TensorEntry) -> memoryview:
    """Allocate one buffer for all these tensors' bytes: allocating for each one takes as long as converting it."""
    return memoryview(bytearray(max(entry.end - entry.start for entry in entries)))


def _tensor(file: TensorFile, entry: TensorEntry, buffer: memoryview) -> Tensor:
    data = buffer[: entry.end - entry.start]
    file.read_into(entry, data)
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def expert_matrices(own: ExpertTensors, spec: SiteSpec, read: Read) -> tuple[Tensor, Tensor]:
    """Return one parameter's a_RD (E R, D) and b_OR (E O, R), in the file's dtype."""
    if own.fused:
        part = own.parts[0]
        a_ERD = read(part.a[ALL]).view(spec.experts, part.rank, -1)
        b_EOR = read(part.b[ALL]).view(-1, part.rank, spec.experts).permute(2, 0, 1)
        if own.swapped:
            a_ERD, b_EOR = b_EOR.mT, a_ERD.mT
        return a_ERD.flatten(0, 1), b_EOR.flatten(0, 1)
    halves = [[_stacked(one, spec.experts, read) for one in (part.a, part.b)] for part in own.parts]
    a_ERD = torch.cat([a for a, _ in halves], 1)
    b_EOR = torch.zeros(spec.experts, spec.out_features, own.rank, dtype=a_ERD.dtype)
    first = 0
    for part, (_, b_EHR) in zip(own.parts, halves, strict=True):
        rows = slice(None)
        if part.half is not None and spec.halves == "interleaved":
            rows = slice(part.half, None, 2)
        elif part.half is not None:
            rows = slice(part.half * b_EHR.shape[1], (part.half + 1) * b_EHR.shape[1])
        b_EOR[:, rows, first : first + part.rank] = b_EHR
        first += part.rank
    return a_ERD.flatten(0, 1), b_EOR.flatten(0, 1)


def _stacked(own: Matrices, experts: int, read: Read) -> Tensor:
    """Return matrices by expert; those that the file leaves out are zeros."""
    if ALL in own:
        whole = read(own[ALL])
        return whole.expand(experts, *whole.shape[-2:])
    some = read(next(iter(own.values())))
    found = torch.zeros(experts, *some.shape, dtype=some.dtype)
    for expert, entry in own.items():
        found[expert] = read(entry)
    return found
