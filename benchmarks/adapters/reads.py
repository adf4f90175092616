"""Milliseconds from an adapter's packed file in the page cache to host memory that a GPU copies from.

    python -m benchmarks.adapters.reads --out benchmarks/results [--only host,new,mapped,kept]

The Llama-3.1-8B shape: adapters on q, k, v, o of rank 8 and 24, and on all seven sites of rank 16 (84 MB), one at a
time and four at a time. `host`: the host tier (`lora/store/host_memory.py`), which is pinned once. `new`: one thread
reads into new blocks of 8 MiB, which on a GPU are pinned each, as the store did before. `mapped`: the host tier, but as
many threads copy from a new mapping of the file, and `kept`, from a mapping that stays. The floor is `numpy`'s copy of
as many bytes between two arrays. On a GPU another thread launches kernels meanwhile.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.adapters.fleet import llama_sites, write_adapter
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results
from benchmarks.serving.http_case import LLAMA_8B
from coserve.core.names import ADAPTER_CONFIG
from coserve.core.processes import usable_cores
from coserve.core.types import AdapterDigests, BaseSpec, LoraSettings
from coserve.lora.files.packed_header import PACKED_FILE, read_header
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_packed
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packed_files import FILLERS, PIECE, PackedFiles, PackedForm
from coserve.lora.store.packing import PackedLayout
from coserve.lora.store.reads import LoadTimes
from coserve.model.lora import LoraWeights

ADAPTERS = {"r8": (8, False), "r24": (24, False), "r16_all": (16, True)}
"""Rank, and whether also the MLP's sites."""
AT_ONCE, ROUNDS, BLOCK = (1, 4), 15, 8 << 20
Read = Callable[[], object]


def base_spec() -> BaseSpec:
    """The base, of which no weights are needed."""
    return BaseSpec(
        name="8b",
        fingerprint="0" * 64,
        family="llama",
        dtype="bfloat16",
        device="cpu",
        layers=LLAMA_8B["num_hidden_layers"],
        hidden=LLAMA_8B["hidden_size"],
        vocab=LLAMA_8B["vocab_size"],
        context=LLAMA_8B["max_position_embeddings"],
        eos_token_ids=(),
        default_targets=(),
        sites=llama_sites(LLAMA_8B, mlp=True),
    )


class Adapter:
    """An adapter's folder with its packed file."""

    def __init__(self, folder: Path, base: BaseSpec, form: PackedForm, rank: int, *, mlp: bool) -> None:
        write_adapter(folder, llama_sites(LLAMA_8B, mlp=mlp), rank, seed=0)
        found = inspect_adapter(folder, base)
        self._digests = AdapterDigests(found.sha256, digest_file(folder, ADAPTER_CONFIG), found.alphas)
        self._folder, self._base = folder, base
        self._mapping: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        writer = PackedFiles(form, LoadTimes())
        writer.load(folder, self._digests, self._first)
        writer.close()

    def _first(self) -> LoraWeights:
        return load_packed(self._folder, self._base, dtype=torch.bfloat16, digests=self._digests)

    @property
    def bytes(self) -> int:
        return (self._folder / PACKED_FILE).stat().st_size

    def into(self, memory: HostMemory, files: PackedFiles) -> object:
        """Read it as a store does."""
        found = files.load(self._folder, self._digests, self._first)
        assert not isinstance(found, LoraWeights), "expected the packed file"
        return memory.copy(found, memory.room(found.layout.bytes))

    def from_mapping(self, memory: HostMemory, files: PackedFiles, threads: Executor, *, keep: bool) -> object:
        """Copy it from a mapping of the file, which is made anew unless it is kept."""
        found = files.load(self._folder, self._digests, self._first)
        assert not isinstance(found, LoraWeights), "expected the packed file"
        mapped = self._mapped() if self._mapping is None else self._mapping
        self._mapping = mapped if keep else None
        return memory.copy(Mapped(found.settings, found.layout, mapped, threads), memory.room(found.layout.bytes))

    def _mapped(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The packed file's bytes behind its header."""
        with (self._folder / PACKED_FILE).open("rb", buffering=0) as file:
            header = read_header(file)
            assert header is not None, "expected the packed file"
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)[header[1] :]

    def into_new_blocks(self) -> object:
        with (self._folder / PACKED_FILE).open("rb", buffering=0) as file:
            blocks = list[torch.Tensor]()
            for first in range(0, self.bytes, BLOCK):
                size = min(BLOCK, self.bytes - first)
                blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
                file.readinto(blocks[-1].numpy().data)
        return blocks


@dataclass(frozen=True)
class Mapped:
    """A packed file's bytes in a mapping: `Unread`."""

    settings: LoraSettings
    layout: PackedLayout
    content: np.ndarray[tuple[int], np.dtype[np.uint8]]
    threads: Executor

    def write(self, parts: Sequence[torch.Tensor]) -> None:
        """See `Unread`."""
        at, copies = 0, list[Future[None]]()
        for part in parts:
            for first in range(0, len(part), PIECE):
                to = part[first : first + PIECE].numpy()
                copies.append(self.threads.submit(np.copyto, to, self.content[at + first : at + first + len(to)]))
            at += len(part)
        for each in copies:
            each.result()


def ms(ways: Mapping[str, Read], at_once: int) -> dict[str, list[float]]:
    """Milliseconds until `at_once` reads that begin together have ended, without the first rounds. The ways take turns,
    so that they have the same machine."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    with ThreadPoolExecutor(at_once) as threads:
        for _ in range(ROUNDS + 2):
            for way, read in ways.items():
                began = time.perf_counter()
                kept = [each.result() for each in [threads.submit(read) for _ in range(at_once)]]
                times[way].append(1e3 * (time.perf_counter() - began))
                del kept
    return {way: found[2:] for way, found in times.items()}


def floor_ms(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return min(ms({"copy": lambda: np.copyto(target, source)}, 1)["copy"])


def launch(stop: threading.Event) -> None:
    """Launch small kernels one after the other, as a step without a graph does."""
    x = torch.zeros(1024, device="cuda")
    while not stop.is_set():
        for _ in range(100):
            x += 1
        torch.cuda.synchronize()


def main() -> None:
    parser = make_parser(__doc__)
    add_names(parser, "--only", ("host", "new", "mapped", "kept"), what="ways")
    options, gpu = parser.parse_args(), torch.cuda.is_available()
    results = Results.of(
        options,
        "adapter_reads.json",
        __file__,
        {"adapters": ADAPTERS, "at_once": AT_ONCE, "rounds": ROUNDS, "cores": os.cpu_count()},
    )
    base, stop = base_spec(), threading.Event()
    form = PackedForm(base.fingerprint, torch.bfloat16, for_kernels=True)
    files = PackedFiles(form, LoadTimes())
    memory = HostMemory(1 << 30, for_kernels=True)
    threads = ThreadPoolExecutor(min(FILLERS, usable_cores()))
    if gpu:
        began = time.perf_counter()
        memory.pin(lambda: None).join()
        results.put("adapters.pin_s_gib", round(time.perf_counter() - began, 3), "s to pin 1 GiB of the host tier")
        threading.Thread(target=launch, args=(stop,)).start()
    with tempfile.TemporaryDirectory() as scratch:
        made = {n: Adapter(Path(scratch, n), base, form, rank, mlp=mlp) for n, (rank, mlp) in ADAPTERS.items()}
        for name, adapter in made.items():
            floor = floor_ms(adapter.bytes)
            for at_once in AT_ONCE:
                ways: dict[str, Read] = {
                    "host": partial(adapter.into, memory, files),
                    "new": adapter.into_new_blocks,
                    "mapped": partial(adapter.from_mapping, memory, files, threads, keep=False),
                    "kept": partial(adapter.from_mapping, memory, files, threads, keep=True),
                }
                for way, times in ms({way: ways[way] for way in options.only}, at_once).items():
                    about = {"bytes": adapter.bytes, "floor_ms": round(at_once * floor, 2)}
                    key = f"adapters.read_ms.{way}.{name}.{at_once}"
                    results.put(key, round(statistics.median(times), 2), "ms until all are read", None, times, about)
    stop.set()


if __name__ == "__main__":
    main()
