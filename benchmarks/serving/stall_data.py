"""A data folder with imported adapters, made without a daemon, so that a measured start finds them.

    python -m benchmarks.serving.stall_data MODEL DEVICE

prints the base's description as JSON: its fingerprint depends on the weights, so the base is loaded once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.serving.http_case import Size, adapter_folders, model_folder
from coserve.core.types import BaseSpec
from coserve.lora.files.record import record_adapter
from coserve.state.folder import DataFolder
from coserve.state.registry.records import AdapterRecord
from coserve.state.registry.registry import Registry

CACHES = ("XDG_CACHE_HOME", "CUDA_CACHE_PATH")
"""Environment variables that name caches besides those in the daemon's cache folder."""
DISTINCT = 2
"""Adapters whose weights differ; the others are links to their files."""


class Folders:
    """Folders of one benchmark: the base, PEFT files, the daemon's data and the compilers' caches. Kept files are used
    again."""

    def __init__(self, root: Path, size: Size) -> None:
        self._size = size
        self.model, self.adapters = root / "model", root / "adapters"
        self.data, self.caches, self.log = root / "data", root / "caches", root / "daemon.log"
        self._spec = root / "spec.json"

    def prepare(self) -> None:
        """Make the base's folder and the PEFT files, and ask for the base's fingerprint. Raises
        `CalledProcessError`."""
        if not self.model.exists():
            model_folder(self.model, self._size)
        if not self.adapters.exists():
            adapter_folders(self.adapters, self._size.config, DISTINCT)
        if not self._spec.exists():
            command = [sys.executable, "-m", "benchmarks.serving.stall_data", str(self.model), self._size.device]
            self._spec.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    def empty(self) -> None:
        """Empty caches, and data that hold nothing but the adapters."""
        for folder in (self.data, self.caches):
            shutil.rmtree(folder, ignore_errors=True)
        self.caches.mkdir(parents=True)
        self._import(msgspec.json.decode(self._spec.read_bytes(), type=BaseSpec))

    def warm(self) -> bool:
        """Whether a daemon has run here before."""
        return self.caches.exists()

    def environment(self) -> dict[str, str]:
        return {name: str(self.caches / name.lower()) for name in CACHES}

    def _import(self, spec: BaseSpec) -> None:
        """Register every adapter, its files hard links."""
        folder = DataFolder(self.data)
        with folder.lock():
            registry = Registry(folder.database)
            distinct = list[AdapterRecord]()
            for i, source in enumerate(sorted(self.adapters.iterdir())):
                ref = registry.reserve_version(source.name)
                shutil.copytree(source, folder.adapter(ref), copy_function=os.link)
                if i < DISTINCT:
                    distinct.append(record_adapter(source, ref, spec, source="import", created_at=time.time()))
                registry.add_adapter(msgspec.structs.replace(distinct[i % DISTINCT], ref=ref))
            registry.close()


def main() -> None:
    from coserve.model.load import load_base

    base = load_base(sys.argv[1], device=sys.argv[2], dtype="auto", load_format="dummy")
    sys.stdout.buffer.write(msgspec.json.encode(base.spec))


if __name__ == "__main__":
    main()
