"""The command `coserve doctor`: checks the machine and the settings before a daemon starts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import typer

from coserve.cli.daemon.serve import bind
from coserve.cli.daemon.start_warnings import start_warnings
from coserve.cli.failures import FAILED
from coserve.cli.settings_options import settings_command
from coserve.config import Config, load_config
from coserve.core.errors import StartupError
from coserve.core.gpu_memory import GIB
from coserve.core.processes import usable_cores, usable_memory
from coserve.state.folder import DataFolder

SETTINGS = ("data_dir", "host", "port", "api_key", "device", "tp", "max_connections", "config")
VERSIONS = ("coserve", "torch", "triton", "transformers")
LEAST_DISK, ENOUGH_DISK = 1 * GIB, 10 * GIB
"""Free bytes below which a start fails soon, and below which caches and checkpoints may fill the disk."""
LEAST_MEMORY = 4 * GIB
SHARED_MEMORY = 1 * GIB
SPARE_FILES = 256
"""Descriptors that the daemon needs in addition to its connections."""
TIMEOUT = 120.0
"""Seconds for torch's import, which the first time takes a minute on a small machine."""
PROBE = (
    "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()]))"
)


class Finding(NamedTuple):
    """The result of one check."""

    level: str
    """ok, warning or error."""
    what: str
    do: str = ""
    """Advice to the operator; empty for `ok`."""


def _doctor(given: dict[str, object]) -> None:
    """Check what `coserve serve` needs here: GPU, driver, versions, disk, port, limits and settings. Each problem comes
    with what to do about it. The exit status is 1 if a start would fail. Takes the settings of `coserve serve`.
    """
    config = load_config(given)
    errors = 0
    for finding in (*check_machine(config), *(Finding("warning", line) for line in start_warnings(config, given))):
        print(f"{finding.level + ':':<9}{finding.what}")
        if finding.do:
            print(f"{'':<9}-> {finding.do}")
        errors += finding.level == "error"
    if errors:
        raise typer.Exit(FAILED)


doctor = settings_command(_doctor, SETTINGS)


def check_machine(config: Config) -> Iterator[Finding]:
    yield check_versions()
    yield check_gpu(config)
    yield check_folder(config.data_dir)
    yield check_port(config)
    yield check_files(config.max_connections)
    yield check_memory()
    if config.tp > 1:
        yield check_shared_memory(Path("/dev/shm"))  # noqa: S108 - it is not a temporary file


def check_versions() -> Finding:
    """Check that the packages are installed."""
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for name in VERSIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name not in ("triton", "coserve"):  # none for CPUs; run from a checkout
                missing.append(name)
    if missing:
        return Finding("error", f"not installed: {', '.join(missing)}", "pip install -c constraints.txt .")
    return Finding("ok", ", ".join(found))


def check_gpu(config: Config) -> Finding:
    """Check that torch can use as many GPUs as the settings need."""
    drivers = _drivers()
    try:
        probe = subprocess.run(  # noqa: S603 - our own code
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
        cuda, usable, count = json.loads(probe.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return Finding("error", f"torch cannot be imported: {error}", "install it again: docs/guide/install.md")
    wanted = config.tp if config.device != "cpu" else 0
    if usable and count >= wanted:
        return Finding("ok", f"{'; '.join(drivers) or f'{count} GPUs'}; torch for CUDA {cuda}")
    if usable:
        do = f"--tp {count}, or check CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        return Finding("error", f"--tp {config.tp} needs as many GPUs, and torch sees {count}", do)
    if not drivers and config.device != "cuda":
        return Finding("ok", f"no NVIDIA driver: the base runs on {usable_cores()} CPU cores")
    level = "error" if config.device == "cuda" else "warning"
    if not drivers:
        return Finding(level, "no NVIDIA driver (nvidia-smi finds no GPU)", "install the driver, or take --device auto")
    if cuda is None:
        return Finding(level, f"torch is built without CUDA, and there is {drivers[0]}", "install PyTorch's CUDA wheel")
    do = f"update the driver to one for CUDA {cuda}; in a container, start it with --gpus all"
    return Finding(level, f"torch for CUDA {cuda} cannot use {drivers[0]}", do)


def _drivers() -> list[str]:
    """Return a line for each GPU that the driver knows: its name, memory and the driver's version."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{' '.join(line.split())}" for line in found.stdout.splitlines() if line.strip()]


def check_folder(folder: Path) -> Finding:
    """Check that the data folder, or the nearest folder above it, can be written, has space, and is no other
    daemon's."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("error", f"data_dir: {there} cannot be written", "chown it, or choose another --data-dir")
    if (folder / "lock").exists():
        try:
            with DataFolder(folder).lock():
                pass
        except StartupError as error:
            return Finding("error", error.message, "stop that daemon (coserve ps), or choose another --data-dir")
    free = shutil.disk_usage(there).free
    text = f"data_dir: {free / GIB:.1f} GiB free for {folder}"
    if free < ENOUGH_DISK:
        do = "free space, or choose another --data-dir: kernels, adapters and checkpoints are kept there"
        return Finding("error" if free < LEAST_DISK else "warning", text, do)
    return Finding("ok", text)


def check_port(config: Config) -> Finding:
    """Check that the daemon can listen."""
    try:
        bind(config.host, config.port).close()
    except StartupError as error:
        return Finding("error", f"port: {error}", "stop that program, or choose another --port or --host")
    return Finding("ok", f"port {config.port} on {config.host} is free")


def check_files(connections: int) -> Finding:
    """Check the limit of open files; the daemon raises its own to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < connections + SPARE_FILES:
        do = f"raise it to {connections + SPARE_FILES} (ulimit -Hn, LimitNOFILE=), or lower --max-connections"
        return Finding("warning", f"limits: {hard} open files for {connections} connections", do)
    return Finding("ok", f"limits: {'any number of' if hard == resource.RLIM_INFINITY else hard} open files")


def check_memory() -> Finding:
    size = usable_memory()
    if size < LEAST_MEMORY:
        return Finding("warning", f"memory: {size / GIB:.1f} GiB of host memory", "use a machine with 4 GiB or more")
    return Finding("ok", f"memory: {size / GIB:.1f} GiB of host memory, {usable_cores()} cores")


def check_shared_memory(folder: Path) -> Finding:
    """Check the shared memory, through which NCCL connects several GPUs."""
    size = shutil.disk_usage(folder).total
    if size < SHARED_MEMORY:
        text = f"{folder} has {size >> 20} MiB, and several GPUs need 1 GiB"
        return Finding("error", text, "start the container with --shm-size 1g")
    return Finding("ok", f"{folder} has {size >> 20} MiB")
