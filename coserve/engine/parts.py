"""The parts of an engine over a loaded base, as every rank makes them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from coserve.adapter_store.files import load_adapter
from coserve.adapter_store.store import AdapterStore
from coserve.config import Config
from coserve.engine.sizes import STEP_TOKENS
from coserve.errors import AdapterNotFound
from coserve.finetune.memory_profiling import Conditions, plan_memory
from coserve.finetune.trainer import Trainer
from coserve.generate.execution.start import Start, WarmKernels, make_start
from coserve.kernels.lora.backend import choose_backend
from coserve.kernels.lora.interface import LoraBackend
from coserve.memory.kv import CPU_TOKENS, KvCache
from coserve.memory.plan import Work
from coserve.model.base import Base
from coserve.model.groups import share_inputs
from coserve.model.lora import LoraWeights
from coserve.parallel.lockstep import Lockstep
from coserve.processes import usable_cores
from coserve.state.folder import DataFolder
from coserve.types import AdapterDigests, AdapterRef

log = logging.getLogger(__name__)

EXACT_THREADS = 2
SWITCH_INTERVAL = 2e-5
"""Seconds after which a thread gives the interpreter to another. A step frees it and takes it back with every operation: at
Python's 5 ms, beside a thread that compiles or reads an adapter, it would wait so long a thousand times."""


def set_up_threads(config: Config) -> None:
    """Those of this process; ranks share the cores."""
    torch.set_num_threads(config.threads or max(1, default_threads() // config.tp))
    sys.setswitchinterval(SWITCH_INTERVAL)


def default_threads() -> int:
    """All cores but one, two at most: with more, torch's CPU kernels round a row differently in different batches."""
    return min(EXACT_THREADS, max(1, usable_cores() - 1))


@dataclass(frozen=True)
class PoolSize:
    tokens: int
    planned: int = 0
    """Bytes of the GPU's memory that torch should never need more than; 0 without a plan."""
    notes: tuple[str, ...] = ()


class EngineParts:
    """Makes the parts as the settings say."""

    def __init__(self, base: Base, config: Config) -> None:
        self.base, self.config, self.folder = base, config, DataFolder(config.data_dir)
        self.lora_backend: LoraBackend = choose_backend(config.lora_backend, base.device, base.dtype)
        self.step_tokens = config.step_tokens or STEP_TOKENS[base.device.type]

    def read_adapter(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        """This rank's part of an adapter: see `adapter_store.store.Load`."""
        path = self.folder.adapter(ref)
        if not path.is_dir():
            raise AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
        whole = load_adapter(path, self.base.spec, device="cpu", dtype=self.base.dtype, digests=digests)
        return self.base.shard(whole)

    def pool_size(self, *, shared: int = 0) -> PoolSize:
        """The page pool: as set, or what the memory plan leaves. `shared`: bytes that a warm-up may take for a while."""
        base, config = self.base, self.config
        if config.kv_tokens is not None:
            return PoolSize(config.kv_tokens)
        if base.device.type != "cuda":
            return PoolSize(CPU_TOKENS)
        work = Work(self.step_tokens, config.micro_batch_tokens, config.max_active_jobs)
        conditions = Conditions(
            self.lora_backend, config.recompute, config.inference_batch_size, config.page_tokens, work
        )
        if self.lora_backend.capturable and self.lora_backend.groups_inputs and config.compile != "off":
            share_inputs(base)  # as `make_start` will: what is measured is what runs
        plan = plan_memory(base, conditions, fraction=config.memory_fraction, path=self._profile_path, shared=shared)
        note = plan.note(config.page_tokens)
        log.info("%s", note)
        planned = torch.cuda.memory_allocated(base.device) + plan.set_aside
        return PoolSize(plan.pages * config.page_tokens, planned, (note,))

    @property
    def _profile_path(self) -> Path | None:
        """Under tensor parallelism the profile is measured at each start: all ranks run its forwards, or none."""
        return self.folder.memory if self.config.tp == 1 else None

    def make_start(self, kv: KvCache, warm: WarmKernels | None = None) -> Start:
        """How steps run at first. Under tensor parallelism layers are compiled, and graphs captured, before the first request: a
        collective needs all ranks at the same time."""
        config = self.config
        return make_start(
            self.base,
            kv,
            max_running=config.inference_batch_size,
            lora_backend=self.lora_backend,
            when=config.compile if config.tp == 1 or config.compile == "off" else "before",
            step_tokens=self.step_tokens,
            warm=warm,
        )

    def make_trainer(
        self, store: AdapterStore, gathering: Callable[[str], None] = lambda _: None, board: int | None = None
    ) -> Trainer:
        """`gathering`: see `Trainer`. `board`: file descriptor of the ranks' board (`Lockstep`); None: there is one rank."""
        config, sharding = self.config, self.base.sharding
        return Trainer(
            self.base,
            store,
            self.folder,
            micro_batch_tokens=config.micro_batch_tokens,
            recompute=config.recompute,
            keep_checkpoints=config.keep_checkpoints,
            lora_backend=self.lora_backend,
            gathering=gathering,
            guard=None if sharding is None or board is None else Lockstep(sharding.mesh, board),
        )
