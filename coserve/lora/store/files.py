"""Reads and writes adapters in PEFT's file format, cartridges as pairs of keys and values.

Letters of cartridges: P tokens, L layers, W numbers of a token's keys (all heads) in a layer, and as many of its
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from coserve.core.errors import CorruptAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, is_prefix, is_rows
from coserve.core.types import AdapterDigests, BaseSpec
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.bdlora import blocks_at
from coserve.lora.files.cartridge import EMBEDDINGS, read_alone
from coserve.lora.files.ends import peft_name
from coserve.lora.files.experts import peft_module
from coserve.lora.files.gate import Configs, read_configs
from coserve.lora.files.peft import FINGERPRINT, QUANTIZATION, check_base, config_file, read_layout
from coserve.lora.files.tensorfile import TensorEntry, TensorFile, check_digest, digest_file
from coserve.lora.store.packing import packed
from coserve.lora.store.reading import DTYPES, in_parts, read_sites
from coserve.lora.store.reads import LoadTimes
from coserve.lora.store.tensor_writer import TensorsOnDemand, write_tensors
from coserve.model.lora import LoraWeights

Part = Callable[[LoraWeights], LoraWeights]
"""Returns what is kept of some sites of an adapter."""
FILLERS = 2
"""Threads that read one adapter's matrices while another one hashes its file. SHA-256 is sequential and takes longer
than they do."""


def load_adapter(
    folder: Path,
    base: BaseSpec,
    *,
    dtype: torch.dtype,
    digests: AdapterDigests | None = None,
    part: Part | None = None,
) -> LoraWeights:
    """Load the adapter of a PEFT folder, in `dtype` on the CPU. Block-diagonal matrices (BD-LoRA) stay packed.

    `digests`: the registry's digests of the files; None: the files are not compared. `part`: returns what is kept of
    some sites, such as a rank's shards, so that the whole adapter is never in memory; None: all is kept.

    Raises:
        AdapterError: as `peft.inspect_adapter`; `CorruptAdapter` for values that are not finite in `dtype`, and for
            files that do not match `digests`.
        StorageError: the machine cannot read the files now.
    """
    with _opened(folder, digests, LoadTimes()) as (configs, file, threads):
        tensors = read_layout(configs.lora_alone(), file, base, None if digests is None else digests.alphas)
        if part is None:
            return LoraWeights(
                tensors.settings, dict(read_sites(file, tensors, base, dtype, threads, for_kernels=False))
            )
        settings, found = tensors.settings, dict[str, LoraPair]()
        for some in in_parts(tensors, base, dtype):
            own = part(LoraWeights(settings, read_sites(file, some, base, dtype, threads, for_kernels=False)))
            found |= {name: pair.to("cpu", copy=True) for name, pair in own.sites.items()}
    return LoraWeights(own.settings, found)


def load_packed(
    folder: Path,
    base: BaseSpec,
    *,
    dtype: torch.dtype,
    digests: AdapterDigests | None = None,
    for_kernels: bool = True,
    times: LoadTimes | None = None,
) -> LoraWeights:
    """Load as `load_adapter` does, into new host memory in the layout of `packed`; DoRA's in another one, as
    their scales are to be computed (`Base.served`)."""
    times = times or LoadTimes()
    with times.during("pack"):
        with _opened(folder, digests, times) as (configs, file, threads):
            if configs.lora is None:
                return packed(read_prefixes(configs.cartridge or {}, file, base, dtype), for_kernels=for_kernels)
            alphas = None if digests is None else digests.alphas
            tensors = read_layout(configs.lora, file, base, alphas, configs.cartridge)
            dense = all(max(shape.a_blocks, shape.b_blocks) == 1 for shape in tensors.sites.values())
            dense = dense and not tensors.magnitudes and for_kernels
            found: Mapping[str, LoraPair] = read_sites(file, tensors, base, dtype, threads, for_kernels=dense)
            if configs.cartridge is not None:
                embeddings_PN = _finite(file, file.entries[EMBEDDINGS], dtype)
                found = {**found, **prefix_pairs(base, embeddings_PN)}
        weights = LoraWeights(tensors.settings, found)
        return weights if tensors.magnitudes else packed(weights, for_kernels=for_kernels)


@contextmanager
def _opened(
    folder: Path, digests: AdapterDigests | None, times: LoadTimes
) -> Iterator[tuple[Configs, TensorFile, Executor]]:
    """Open the weights' file; yield the configs, the file, and threads to read it, which meanwhile hash it.

    If the hash is not the registered one, `CorruptAdapter` about that takes precedence over any other error, and
    nothing that was read is used.
    """
    if digests is not None and digests.config:
        check_digest(digest_file(folder, ADAPTER_CONFIG), digests.config, ADAPTER_CONFIG)
    configs = read_configs(folder)
    with (
        TensorFile(folder, ADAPTER_WEIGHTS) as file,
        ThreadPoolExecutor(1 + FILLERS, "adapter-file") as threads,
    ):
        digest = None if digests is None else threads.submit(_timed_hash, file, times)
        try:
            yield configs, file, threads
        finally:
            if digests is not None and digest is not None:
                check_digest(digest.result(), digests.weights, ADAPTER_WEIGHTS)


def _timed_hash(file: TensorFile, times: LoadTimes) -> str:
    with times.during("hash"):
        return file.sha256()


def save_adapter(folder: Path, weights: LoraWeights, base: BaseSpec) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (float32) into an existing folder.

    Plain writes: the caller makes them durable and atomic. The metadata records the base's fingerprint and how it
    was quantised. Equal adapters get equal bytes, hence equal digests. One pair is read at a time, and not kept.
    """
    like, sites = dict[str, Tensor](), dict[str, str]()
    if weights.prefix:
        like[EMBEDDINGS] = embeddings(weights).to("meta")
    for site in weights.sites:
        for name, tensor in _stored(site, weights.sites[site].to("meta"), weights, base):
            like[name], sites[name] = tensor, site

    def read(name: str) -> Tensor:
        if name == EMBEDDINGS:
            return embeddings(weights)
        found = _stored(sites[name], weights.sites[sites[name]], weights, base)
        return next(tensor for each, tensor in found if each == name).detach().float().cpu().contiguous()

    metadata = {"format": "pt", FINGERPRINT: base.fingerprint}
    if base.quantization != "none":
        metadata[QUANTIZATION] = base.quantization
    write_tensors(folder / ADAPTER_WEIGHTS, TensorsOnDemand(like, read), metadata)
    (folder / ADAPTER_CONFIG).write_text(config_file(weights.settings, base, weights.sites))


def _stored(site: str, pair: LoraPair, weights: LoraWeights, base: BaseSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield a site's tensors as PEFT's file has them, in any dtype and on any device; none of a KV prefix."""
    if is_prefix(site):
        return
    if is_rows(site):
        yield PEFT_PREFIX + peft_name(site, weights.sites), pair.a_RD
        return
    assert (pair.a_blocks, pair.b_blocks) == blocks_at(weights.settings, site), f"{site} is not as its settings say"
    name = PEFT_PREFIX + (peft_module(site, weights.sites, base) if pair.experts > 1 else site)
    embeds = site in base.ends and base.ends[site].layer < 0
    a, b = ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A.weight", "lora_B.weight")
    yield f"{name}.{a}", pair.a_RD
    b_OR = pair.b_OR
    if pair.experts > 1:
        b_OR = b_OR.view(pair.experts, -1, pair.rank).permute(1, 2, 0).flatten(1)  # PEFT's is expert-minor
    yield f"{name}.{b}", b_OR
    if pair.magnitude_O is not None:
        yield f"{PEFT_PREFIX}{site}.lora_magnitude_vector", pair.magnitude_O


def read_prefixes(config: dict[str, object], file: TensorFile, base: BaseSpec, dtype: torch.dtype) -> LoraWeights:
    """Read the cartridge of an open file: on the CPU, in `dtype`. Raises `BaseMismatch`, `CorruptAdapter`,
    `ShapeMismatch`, `StorageError`."""
    check_base(file, base)
    settings, entry = read_alone(config, file, base)
    return LoraWeights(settings, prefix_pairs(base, _finite(file, entry, dtype)))


def _finite(file: TensorFile, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """Read a cartridge's tensor (P, 2 L W). Raises `CorruptAdapter`, `StorageError`."""
    found = torch.frombuffer(file.read(entry), dtype=DTYPES[entry.dtype]).reshape(entry.shape).to(dtype)
    if not bool(torch.isfinite(found).all()):
        raise CorruptAdapter(f"the cartridge is not finite in {str(dtype).removeprefix('torch.')}")
    return found


def prefix_pairs(base: BaseSpec, embeddings_PN: Tensor) -> dict[str, LoraPair]:
    """Return the pairs of a cartridge's tensor (P, 2 L W)."""
    parts = embeddings_PN.chunk(2 * base.layers, 1)
    return {
        name: LoraPair(keys_PW.contiguous(), values_PW.T.contiguous(), 1.0)
        for name, keys_PW, values_PW in zip(base.prefixes, parts[::2], parts[1::2], strict=True)
    }


def embeddings(weights: LoraWeights) -> Tensor:
    """Return the tensor of an adapter's KV prefix: fp32 on the CPU, (P, 2 L W)."""
    parts = [part for pair in weights.prefix for part in (pair.a_RD, pair.b_OR.T)]
    return torch.cat([part.detach().float().cpu() for part in parts], 1)
