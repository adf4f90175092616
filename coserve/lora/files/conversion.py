"""Converts an adapter's files: from LoRA to BD-LoRA, to other blocks or to another rank. NumPy, no torch.

Each shard of a site's update becomes the nearest one of rank r/N (`shard_svd`); nothing is trained. Errors are relative
Frobenius norms of the update: norm of the difference over norm of the original, of one site or of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_RANK
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from coserve.core.processes import usable_cores
from coserve.core.schemas.adapters import ConversionReport
from coserve.core.types import AdapterDigests, BaseSpec, LoraSettings
from coserve.lora.files.bdlora import ParallelStyle, blocks_at, check_blocks, packed_shapes, parallel_style
from coserve.lora.files.gate import read_configs
from coserve.lora.files.peft import FINGERPRINT, AdapterTensors, SiteShape, config_file, read_layout
from coserve.lora.files.shard_svd import Matrix, SiteShards, lost, shard_update
from coserve.lora.files.targets import alpha_of, exact, rank_and_scaling
from coserve.lora.files.tensorfile import TensorEntry, TensorFile, check_digest, digest_file
from coserve.lora.files.tensorfile_writer import write_arrays
from coserve.state.durable import disk_errors

MAX_ERROR = 0.05
"""Default bound of the relative error."""
_EXACT = 1e-6
"""Errors below this count as 0, since files hold float32."""
THREADS = max(1, min(8, usable_cores() // 4))
"""Number of sites that are converted in parallel."""

Found = TypeVar("Found")
Float32 = npt.NDArray[np.float32]


class ConversionOptions(msgspec.Struct, frozen=True):
    """Options of a conversion.

    `rank`: total rank over all blocks; None: the smallest one whose error is at most `max_error` (None: `MAX_ERROR`).
    """

    bd_blocks: int
    rank: int | None = None
    max_error: float | None = None


def convert_adapter(
    source: Path,
    target: Path,
    base: BaseSpec,
    options: ConversionOptions,
    digests: AdapterDigests,
    progress: Callable[[], None] = lambda: None,
    *,
    threads: int = THREADS,
) -> ConversionReport:
    """Write the converted adapter's files into the folder `target`.

    `digests`: the registry's digests of the source's files. `progress` is called for each site.

    Raises:
        InvalidRequest: blocks or a rank that do not fit the sites, or an error above the bound.
        AdapterError: as `peft.inspect_adapter`.
        StorageError: the machine cannot read or write the files now.
    """
    if digests.config:
        check_digest(digest_file(source, ADAPTER_CONFIG), digests.config, ADAPTER_CONFIG)
    config = read_configs(source).lora_alone()
    with TensorFile(source, ADAPTER_WEIGHTS) as file:
        check_digest(file.sha256(progress), digests.weights, ADAPTER_WEIGHTS)
        layout = read_layout(config, file, base, digests.alphas)
        _check(options, layout, base)

        def shards(site: str) -> SiteShards:
            shape = layout.sites[site]
            a_RD = _dense(_read(file, layout.a[site]), shape.a_blocks)
            b_OR = _dense(_read(file, layout.b[site]), shape.b_blocks)
            return shard_update(a_RD, b_OR, parallel_style(site) or ParallelStyle.COLUMN, options.bd_blocks)

        spectra = in_threads(lambda site: shards(site).spectra(), layout.sites, progress, threads)
        losses = {site: lost(found) * layout.sites[site].scaling ** 2 for site, found in spectra}
        report = _report(losses, options)
        settings = _settings(layout.settings, options.bd_blocks, report.rank, losses)
        with disk_errors():
            _write(target, shards, layout.sites, settings, base, progress, threads)
    return report


def in_threads(
    compute: Callable[[str], Found], sites: Iterable[str], progress: Callable[[], None], threads: int
) -> Iterator[tuple[str, Found]]:
    """Yield each site and its result, in order; at most one result per thread is held. `progress` is called after
    each."""
    with ThreadPoolExecutor(threads) as pool:
        names = iter(sites)
        while some := list(islice(names, threads)):
            for site, found in zip(some, pool.map(compute, some), strict=True):
                progress()
                yield site, found


def _check(options: ConversionOptions, layout: AdapterTensors, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for blocks that do not fit the sites or do not divide the rank."""
    blocks, rank = options.bd_blocks, options.rank
    if layout.experts:
        raise InvalidRequest("conversions of adapters of experts are not implemented", field="bd_blocks")
    if layout.rows or any(site in base.ends for site in layout.sites):
        raise InvalidRequest("conversions of adapters of embedding or head are not implemented", field="bd_blocks")
    if layout.settings.use_dora:
        raise InvalidRequest("expected an adapter without use_dora: PEFT has no block-diagonal DoRA", field="bd_blocks")
    try:
        check_blocks(LoraSettings(bd_blocks=blocks), base, dict.fromkeys(layout.sites, blocks))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field="bd_blocks") from None
    if rank is not None and (rank % blocks or not 1 <= rank <= MAX_RANK):
        raise InvalidRequest(f"expected a multiple of {blocks} up to {MAX_RANK}, got {rank}", field="rank")


def _report(losses: Mapping[str, Matrix], options: ConversionOptions) -> ConversionReport:
    """Choose the rank and report its error. Raises `InvalidRequest` for a bound that cannot be kept."""
    blocks, bound = options.bd_blocks, MAX_ERROR if options.max_error is None else options.max_error
    most = max(len(loss) for loss in losses.values()) - 1
    total = sum(np.pad(loss, (0, most + 1 - len(loss))) for loss in losses.values())
    errors = _relative(np.asarray(total, dtype=np.float64))
    smallest = blocks * max(1, int(np.argmax(errors <= max(bound, _EXACT))))
    rank = smallest if options.rank is None else min(options.rank, blocks * most)
    if rank > MAX_RANK:
        raise InvalidRequest(
            f"an error of at most {bound:g} takes rank {rank}: expected at most {MAX_RANK}; allow a larger error or "
            "give a rank",
            field="max_error",
        )
    error = float(errors[rank // blocks])
    if options.max_error is not None and error > max(bound, _EXACT):
        raise InvalidRequest(
            f"rank {rank} leaves an error of {error:.3g}: an error of at most {bound:g} takes rank {smallest}",
            field="rank",
        )
    shown = {blocks * min(1 << power, most) for power in range(most.bit_length() + 1)}
    return ConversionReport(
        rank=rank,
        error=error,
        site_errors={site: float(_relative(loss)[min(rank // blocks, len(loss) - 1)]) for site, loss in losses.items()},
        max_error=bound,
        smallest_rank=smallest,
        errors={each: float(errors[each // blocks]) for each in sorted(shown)},
    )


def _relative(loss: Matrix) -> Matrix:
    """Convert squared errors to relative ones; a site whose update is zero has error 0."""
    return np.sqrt(loss / loss[0]) if loss[0] > 0 else np.zeros_like(loss)


def _settings(old: LoraSettings, blocks: int, rank: int, losses: Mapping[str, Matrix]) -> LoraSettings:
    """Settings of the converted adapter, with the old scaling. A site of smaller rank gets a pattern of its own."""
    root = np.sqrt if old.rslora else float
    alpha = alpha_of(old) or float(root(old.r))
    smaller = {exact(site): most for site, loss in losses.items() if (most := blocks * (len(loss) - 1)) < rank}
    return msgspec.structs.replace(
        old,
        r=rank,
        alpha=float(alpha * root(rank) / root(old.r)),
        rank_pattern=smaller,
        alpha_pattern={},
        bd_blocks=blocks,
        targets_bd_a=None,
        targets_bd_b=None,
    )


def _write(
    folder: Path,
    shards: Callable[[str], SiteShards],
    sites: Mapping[str, SiteShape],
    settings: LoraSettings,
    base: BaseSpec,
    progress: Callable[[], None],
    threads: int,
) -> None:
    shapes = dict[str, tuple[int, ...]]()
    for site in sites:
        rank, _ = rank_and_scaling(settings, site)
        packed = packed_shapes(base.sites[site], rank, blocks_at(settings, site))
        shapes |= {_tensor(site, part): shape for part, shape in zip("AB", packed, strict=True)}

    def both(site: str) -> tuple[Float32, Float32]:
        rank, scaling = rank_and_scaling(settings, site)
        a_RD, b_OR = shards(site).truncated(rank // settings.bd_blocks, sites[site].scaling / scaling)
        return np.ascontiguousarray(a_RD, dtype=np.float32), np.ascontiguousarray(b_OR, dtype=np.float32)

    in_order = dict.fromkeys(name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in sorted(shapes))
    found = in_threads(both, in_order, progress, threads)  # A and B of a site are neighbours in the file
    matrices = iter(matrix for _, pair in found for matrix in pair)

    metadata = {"format": "pt", FINGERPRINT: base.fingerprint}
    write_arrays(folder / ADAPTER_WEIGHTS, shapes, lambda _: next(matrices), metadata)
    (folder / ADAPTER_CONFIG).write_text(config_file(settings, base, list(sites)))


def _tensor(site: str, part: str) -> str:
    return f"{PEFT_PREFIX}{site}.lora_{part}.weight"


def _read(file: TensorFile, entry: TensorEntry) -> Matrix:
    data = file.read(entry)
    if entry.dtype == "BF16":  # bfloat16 is the upper half of a float32
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, np.float32 if entry.dtype == "F32" else np.float16)
    return values.astype(np.float64).reshape(entry.shape)


def _dense(packed: Matrix, blocks: int) -> Matrix:
    """The matrix whose diagonal blocks are stacked in `packed`."""
    if blocks == 1:
        return packed
    rows, columns = packed.shape
    dense = np.zeros((blocks, rows // blocks, blocks, columns))
    for i, part in enumerate(np.split(packed, blocks)):
        dense[i, :, i] = part
    return dense.reshape(rows, blocks * columns)
