"""Cache keys of compiled kernels: everything that they depend on, such as the GPU as its driver describes it, and the
cache folder derived from it. No torch."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import coserve
from coserve.config import Config

MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""
CONTEXT_BYTES = 1 << 30
"""Approximate GPU memory of a process besides torch's tensors: CUDA context, libraries, kernels."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    """Compute capability, such as "9.0"."""
    driver: int
    """CUDA version that the driver supports, from `cuDriverGetVersion`."""
    memory_bytes: int


def find_gpu() -> Gpu | None:
    """The first visible GPU; None if there is none, or its driver does not answer."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, driver, major, minor = (ctypes.c_int() for _ in range(5))
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    calls: tuple[Callable[[], int], ...] = (
        lambda: int(cuda.cuInit(0)),
        lambda: int(cuda.cuDriverGetVersion(ctypes.byref(driver))),
        lambda: int(cuda.cuDeviceGetCount(ctypes.byref(count))),
        lambda: int(cuda.cuDeviceGet(ctypes.byref(device), 0)),
        lambda: int(cuda.cuDeviceGetName(name, len(name), device)),
        lambda: int(cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)),
        lambda: int(cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)),
        lambda: int(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)),
    )
    if any(call() != 0 for call in calls):
        return None
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", driver.value, size.value)


CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Environment variables of the compilers' cache folders, and our names for those folders."""
ASSEMBLER = "TRITON_PTXAS_PATH"
"""Environment variable of the assembler that Triton runs; its version is part of each kernel's key."""
GEMM_FOLDER = "gemms"
"""Folder for measurements: choices of GEMM kernels, memory of compiled training layers."""
LIBRARIES = ("torch", "triton", "transformers")
SOURCES = (
    "admission",
    "core/gpu_memory.py",
    "core/training",
    "core/types.py",
    "engine",
    "finetune",
    "generate",
    "kernels",
    "lora/files",
    "memory",
    "model",
)
"""Our packages and modules that determine what is compiled, or the meaning of measured costs."""
SHAPE_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "mla_cache",
    "lora_backend",
    "max_running",
    "page_tokens",
    "step_tokens",
    "micro_batch_tokens",
    "max_active_jobs",
    "recompute",
    "trust_remote_code",
    "tp",
    "ep",
    "lora_server",
    "lora_sharding",
)
"""Settings that decide which kernels an engine needs, besides the base."""


def cache_root(config: Config) -> Path:
    """The folder of all caches, without symbolic links."""
    return (config.cache_dir if config.cache_dir is not None else config.data_dir / "cache").resolve()


def key_fields(gpu: Gpu, root: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Everything that a compiled kernel depends on; a cache with other fields is never read. `root`, from `cache_root`,
    is included because Triton's files contain absolute paths: it would recompile all kernels of a moved folder."""
    fields = {
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "gpu": gpu.name,
        "capability": gpu.capability,
        "driver": str(gpu.driver),
        "source": source_digest(),
        "root": str(root),
        **{name: environ[name] for name in CACHES if name in environ},
    }
    assembler = environ.get(ASSEMBLER)
    if assembler is not None and assembler != _assembler().get(ASSEMBLER):  # set by the user, not by us
        fields[ASSEMBLER] = assembler
    return fields


def digest(fields: Mapping[str, str]) -> str:
    """SHA-256 (hex) of the fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def cache_folder(root: Path, fields: Mapping[str, str]) -> Path:
    """The folder for kernels with these fields, in the folder of all caches."""
    return root / digest(fields)[:24]


def compiler_environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that put the compilers' caches into `folder` and set the assembler, except those that the user has set.

    All processes need them before they compile. Inductor sets torch's own assembler in a process that compiles a layer,
    but not in one that loads it from disk. Kernels that the first compiles later would then have keys that the second
    never asks for.
    """
    wanted = {name: str(folder / own) for name, own in CACHES.items()} | _assembler()
    return {name: value for name, value in wanted.items() if name not in environ}


def _assembler() -> dict[str, str]:
    """Triton's own assembler, the default of a process that has not used inductor; empty if Triton has none."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return {}
    path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return {ASSEMBLER: str(path)} if path.is_file() else {}


def shape_key(config: Config) -> str:
    """SHA-256 (hex) of the base's config.json (its name if it is not a folder), of `SHAPE_SETTINGS`, and of the
    policy's kernel settings."""
    described = Path(config.model) / "config.json"
    content = described.read_bytes() if described.is_file() else b""
    settings = {name: str(getattr(config, name)) for name in SHAPE_SETTINGS} | {
        "max_running": str(config.batch_requests)
    }
    settings |= {name: str(getattr(config, name)) for name in config.policy_class.kernel_settings}
    named = {"config": hashlib.sha256(content).hexdigest()} if content else {"model": config.model}
    return digest(settings | named)


def source_digest(root: Path | None = None) -> str:
    """SHA-256 (hex) of the code in `SOURCES`; `root`: the folder of the package."""
    root = Path(coserve.__file__).resolve().parent if root is None else root
    found = hashlib.sha256()
    packages = [path for name in SOURCES for path in (root / name).rglob("*.py")]
    for path in sorted([*packages, *(root / name for name in SOURCES if name.endswith(".py"))]):
        found.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
