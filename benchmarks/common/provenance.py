"""What a result says about its run: commit, versions, command, hardware."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "peft", "aiohttp", "msgspec", "tokenizers")


def commit() -> tuple[str, str | None]:
    """The checked-out commit, and a note if the results do not describe it."""
    if shutil.which("git") is None:
        return "unknown", "the commit was not recorded"
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown", "the commit was not recorded"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", "coserve", "benchmarks/*.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    return head.stdout.strip(), "measured on a tree that was not clean" if changed.stdout.strip() else None


def versions() -> dict[str, str]:
    """Versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Number and model of this machine's cores."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def machine(*, tiny: bool = False) -> str:
    """What computes: the first GPU, as all of a machine are alike, or the CPU where there is none. Nothing is asked for
    a `tiny` shape, which the CPU computes."""
    if tiny:
        return "CPU, a tiny shape"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return cpu_name()
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def module_of(file: str) -> str:
    """The name of a module of this repository, such as `benchmarks.serving.stalls`, from its `__file__`."""
    return ".".join(Path(file).resolve().relative_to(ROOT).with_suffix("").parts)


def command(script: str) -> str:
    """The command line, without the options that say where the results go."""
    hidden = {"--out", "--commit", "--scratch"}
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    return " ".join([f"python -m {script}", *(arg for before, arg in pairs if not {arg, before} & hidden)])


def gpu_run(script: str, part: str, revision: str | None, packages: dict[str, str | None]) -> dict[str, Any]:
    """Provenance of one part of a kernel benchmark. `revision`: the commit, where there is no repository.

    `packages`: versions of further ones.
    """
    import torch
    import triton

    return {
        "hardware": torch.cuda.get_device_name(),
        "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, **packages},
        "commit": revision or _line("git", "rev-parse", "--short", "HEAD"),
        "command": f"python -m {script} --only {part}",
        "seed": 0,
        "date": date.today().isoformat(),
    }


def _line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
