"""The systems of a comparison: coserve's daemon, and vLLM's server, each with the trace's adapters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.peers.processes import module, running, wait_ready
from benchmarks.serving.http_case import Size, adapter_folders
from benchmarks.serving.http_daemon import import_adapter, serve_arguments
from coserve.workloads.scenario import Scenario

STAND_INS = Path(__file__).parent / "stand_ins"
PEERS = ("vllm", "torch", "transformers", "triton", "peft", "flashinfer-python", "flash-attn")
"""Packages whose versions are told."""
MPS = "nvidia-cuda-mps-control"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for its largest rank."""


@dataclass(frozen=True)
class Place:
    """Where a comparison runs. `site`: folder with vLLM's packages, if they are not installed with Python."""

    size: Size
    model: Path
    adapters: Path
    scratch: Path
    site: Path | None = None
    vllm_memory: float = 0.9
    """Share of the GPU's memory, without a trainer."""
    shared_memory: float = 0.4
    """Beside a trainer."""
    strong: bool = False
    """Whether vLLM runs with its settings for LoRA that are off by default: both streams, kernels for each number of
    active adapters."""
    apart: bool = False
    """Whether there are two GPUs: vLLM serves on the first and PEFT trains on the second, coserve does both on both."""
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further options of vLLM, or others instead of its own here: values by name."""

    @property
    def beside_memory(self) -> float:
        """vLLM's share of its GPU's memory while PEFT trains."""
        return self.vllm_memory if self.apart else self.shared_memory


def make_adapters(root: Path, config: dict[str, Any], scenario: Scenario) -> Path:
    """PEFT folders under the trace's names."""
    for folder, name in zip(adapter_folders(root, config), scenario.adapter_names, strict=False):
        folder.rename(root / name)
    return root


def gpu_memory() -> float | None:
    """GiB in use on the first GPU that this process may use, by all processes; None without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    if shutil.which(query[0]) is None:
        return None
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return None if done.returncode else round(float(done.stdout.strip()) / 1024, 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(settings: Mapping[str, object], log: Path) -> AsyncIterator[str]:
    """A daemon with these settings, on a free port; yields its URL once it is warm."""
    given = dict(settings) | {"port": free_port()}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    url = f"http://127.0.0.1:{given['port']}"
    async with running(module("coserve", "serve", *options, "--no-prefix-cache"), log, {}) as process:
        await wait_ready(url, process, log, "/health/ready")
        yield url


@contextlib.asynccontextmanager
async def coserve(place: Place, scenario: Scenario, policy: str = "slack") -> AsyncIterator[str]:
    """The daemon under this policy, whose latency targets are the limits that are judged, with the trace's adapters;
    yields its URL once it is warm."""
    settings = serve_arguments(place.size, place.model, place.scratch / f"data-{free_port()}")
    settings |= {"data_root": place.adapters, "cache_dir": place.scratch / "cache"} | policy_settings(policy)
    settings |= {"tp": 2} if place.apart else {}
    targets = {"slo_ttft": scenario.slo_ttft, "slo_tpot": scenario.slo_tpot}
    settings |= {name: value for name, value in targets.items() if value is not None}
    async with serving(settings, place.scratch / f"coserve-{policy}.log") as url:
        for name in scenario.adapter_names:
            await asyncio.to_thread(import_adapter, url, name)
        yield url


def policy_settings(name: str) -> dict[str, object]:
    """`name`: a policy; `overlap-between` is `overlap` with its steps between slices."""
    if name == "overlap-between":
        return {"policy": "overlap", "overlap_steps": "between"}
    return {"policy": name}


@contextlib.asynccontextmanager
async def vllm(
    place: Place, scenario: Scenario, *, memory: float, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[str]:
    """vLLM's OpenAI server with CUDA graphs and compilation, the prefix cache off; yields its URL. `environment`: more
    of it, as for MPS."""
    port, log = free_port(), place.scratch / "vllm.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *vllm_options(place, scenario, port, memory)]
    path = [str(place.site)] if place.site is not None else []
    own = {"PYTHONPATH": os.pathsep.join([*path, str(STAND_INS)])} | vllm_environment(place.strong)
    async with running(command, log, own | dict(environment)) as process:
        await wait_ready(url := f"http://127.0.0.1:{port}", process, log)
        yield url


def vllm_environment(strong: bool) -> dict[str, str]:
    """`strong`: see `Place`."""
    common = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return common | ({"VLLM_LORA_ENABLE_DUAL_STREAM": "1"} if strong else {})


def peer_about(place: Place, scenario: Scenario, *, memory: float) -> dict[str, object]:
    """Versions of the peer's packages, and its flags and environment, for results; without paths."""
    flags = vllm_options(place, scenario, 0, memory)
    flags = flags[: flags.index("--lora-modules")] if scenario.adapters else flags
    return {
        "versions": peer_versions(place.site),
        "flags": " ".join(flags).replace(str(place.model), "MODEL"),
        "environment": vllm_environment(place.strong),
    }


def peer_versions(site: Path | None) -> dict[str, str]:
    """`site`: see `Place`."""
    installed = distributions() if site is None else distributions(path=[str(site)])
    found = {each.metadata["Name"]: each.version for each in installed}
    return {name: found[name] for name in PEERS if name in found}


@contextlib.asynccontextmanager
async def mps(folder: Path) -> AsyncIterator[dict[str, str]]:
    """NVIDIA's Multi-Process Service, until the end of the block; yields the environment of its clients. Exits where it
    cannot be started."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    if shutil.which(MPS) is None or await _control_mps(environment, "-d"):
        raise SystemExit(f"MPS does not start, see {folder}")
    try:
        yield environment
    finally:
        await _control_mps(environment, command=b"quit -t 10\n")


async def _control_mps(environment: Mapping[str, str], *options: str, command: bytes = b"") -> int | None:
    process = await asyncio.create_subprocess_exec(
        MPS, *options, stdin=asyncio.subprocess.PIPE, env=os.environ | dict(environment)
    )
    await process.communicate(command)
    return process.returncode


def vllm_options(place: Place, scenario: Scenario, port: int, memory: float) -> list[str]:
    rank = next(each for each in VLLM_RANKS if each >= max(scenario.rank))
    options = {
        "model": place.model,
        "served-model-name": "base",
        "host": "127.0.0.1",
        "port": port,
        "load-format": "dummy",
        "dtype": "bfloat16",
        "seed": scenario.seed,
        "max-model-len": place.size.config["max_position_embeddings"],
        "max-num-seqs": place.size.max_running,
        "gpu-memory-utilization": memory,
        "attention-backend": "FLASH_ATTN",
        "max-loras": max(1, scenario.adapters),
        "max-cpu-loras": max(1, scenario.adapters),
        "max-lora-rank": rank,
        "uvicorn-log-level": "warning",
    }
    active = ["--specialize-active-lora"] if place.strong else []
    lora = [f"{name}={place.adapters / name}" for name in scenario.adapter_names]
    flags = [
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--enable-lora",
        *active,
        "--lora-modules",
        *lora,
    ]
    values: dict[str, Sequence[str]] = {name: (str(value),) for name, value in options.items()} | dict(place.more)
    return [part for name, value in values.items() for part in (f"--{name}", *value)] + (flags if lora else flags[:2])
