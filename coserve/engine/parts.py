"""Construction of an engine's components over a loaded base, the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch

from coserve.admission.memory import HostAdmission, MemoryAdmission
from coserve.admission.recompute_plan import host_bytes
from coserve.config import Config
from coserve.core.errors import AdapterNotFound, UnsupportedBase
from coserve.core.gpu_memory import MemoryModel
from coserve.core.processes import free_memory, usable_memory
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.job_memory import DeviceMemory, Fixed
from coserve.engine.lora_server.start import make_servers
from coserve.engine.spatial.training_stream import TrainingStream
from coserve.engine.warming.caches import Caches
from coserve.engine.warming.conditions import conditions_of
from coserve.engine.warmup.key import CONTEXT_BYTES
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import BatchLimits
from coserve.finetune.memory_profiling import keep_graph_bytes, plan_memory
from coserve.finetune.sessions.sessions import TrainerSettings
from coserve.generate.execution.graph_sizes import padded_step
from coserve.generate.execution.start import ExecutorStart, make_start
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.device import use_device
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.files import load_adapter, load_packed
from coserve.lora.store.host_memory import HostMemory, Unread
from coserve.lora.store.packed_files import PackedFiles, PackedForm
from coserve.lora.store.reads import LoadTimes
from coserve.lora.store.store import AdapterStore
from coserve.memory.allocator import Reading, read_device
from coserve.memory.graph_bytes import CudaMemory, GraphBytes
from coserve.memory.kv import CPU_TOKENS, KvCache
from coserve.memory.plan import MemoryPlan
from coserve.model.agreement import on_all_ranks
from coserve.model.base import Base
from coserve.model.faults import contained
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)

AnySessions = TypeVar("AnySessions")

ADAPTER_SHARE = 0.25
"""Fraction of the host memory free at the start that idle adapters may take."""
JOBS_SHARE = 0.5
"""Fraction of the daemon's usable host memory for the state of jobs, which on a GPU is pinned: never swapped."""


@dataclass(frozen=True)
class PoolSize:
    tokens: int
    plan: MemoryPlan | None = None
    loaded: int = 0
    """Bytes that torch had allocated before the pool."""
    notes: tuple[str, ...] = ()


class EngineParts:
    """Makes an engine's components from the settings."""

    def __init__(self, base: Base, config: Config) -> None:
        """Raises `UnsupportedBase` and `ConfigError`: see `make_servers`."""
        self.base, self.config, self.folder = base, config, DataFolder(config.data_dir)
        self._conditions = conditions_of(config, base)
        self.lora_backend: LoraBackend = self._conditions.lora_backend
        self.step_tokens = self._conditions.work.step_tokens
        self.graph_bytes = GraphBytes(CudaMemory(base.device) if base.device.type == "cuda" else None)
        self.servers = make_servers(base, config, padded_step(self.step_tokens, config.batch_requests))
        """The LoRA servers, which are starting; None: there are none."""
        self.load_times = LoadTimes()
        """Times of `read_adapter`, by phase."""
        gpu = base.device.type == "cuda"
        self._packed_form = PackedForm(base.spec.fingerprint, base.dtype, for_kernels=gpu)
        self.packed_files = PackedFiles(self._packed_form, self.load_times)

    def host_budget(self) -> int:
        """Bytes of host memory for this rank's shards of idle adapters."""
        most = self.config.host_adapter_bytes
        return max(1, self._adapter_share if most is None else most // self.config.tp)

    @cached_property
    def _adapter_share(self) -> int:
        """Bytes of this rank's share of the memory that is free at the start."""
        return int(ADAPTER_SHARE * free_memory()) // self.config.tp

    def host_memory(self, budget: int) -> HostMemory:
        """The host tier's memory. On a GPU a thread begins to pin it. Adapters in use may take a share beside it."""
        memory = HostMemory(budget, for_kernels=self._packed_form.for_kernels, most_outside=self._adapter_share)
        if self.base.device.type == "cuda":
            memory.pin(partial(use_device, self.base.device))
        return memory

    def read_adapter(self, ref: AdapterRef, digests: AdapterDigests | None) -> Unread | LoraWeights:
        """Read this rank's shard of an adapter: see `lora.store.store.Load`."""
        path = self.folder.adapter(ref)
        if not path.is_dir():
            raise AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
        spec, dtype, form, times = self.base.spec, self.base.dtype, self._packed_form, self.load_times
        if self.base.sharding is not None:
            return load_adapter(path, spec, dtype=dtype, digests=digests, part=self.base.served)

        def read() -> LoraWeights:
            return self.base.served(
                load_packed(path, spec, dtype=dtype, digests=digests, for_kernels=form.for_kernels, times=times)
            )

        return self.packed_files.load(path, digests, read)

    def pool_size(self) -> PoolSize:
        """The page pool's size: as configured, or what the memory plan leaves."""
        base, config = self.base, self.config
        if config.kv_tokens is not None:
            return PoolSize(config.kv_tokens)
        if base.device.type != "cuda":
            return PoolSize(CPU_TOKENS)
        if self.lora_backend.capturable and self.lora_backend.groups_inputs and config.compile != "off":
            share_inputs(base)  # as `make_start` does, so that the measured model is the one that runs
        plan = plan_memory(base, self._conditions, fraction=config.memory_fraction, path=self._profile_path)
        note = plan.note(config.page_tokens)
        log.info("%s", note)
        loaded = torch.cuda.memory_allocated(base.device)
        return PoolSize(plan.pages * config.page_tokens, plan, loaded, (note,))

    def memory_model(self, pool: PoolSize) -> MemoryModel | None:
        """The model that predicts the memory of jobs; None without a plan."""
        config, plan = self.config, pool.plan
        if plan is None:
            return None
        return MemoryModel(
            costs=plan.costs,
            training=plan.training + plan.jobs,
            ranks=config.tp,
            fully_sharded=config.lora_sharding == "slora",
            recompute=config.recompute,
            graphs=config.tp > 1 and config.compile != "off",
            pinned=self._host_limit,
        )

    @property
    def _host_limit(self) -> int:
        """Bytes of host memory for the state of jobs."""
        return self.config.pinned_memory_bytes or int(JOBS_SHARE * usable_memory())

    def job_memory(
        self, pool: PoolSize, taken_elsewhere: Callable[[], int] = lambda: 0
    ) -> DeviceMemory | HostAdmission:
        """The memory that admits jobs: the GPU's, or host memory alone if there is no plan of the GPU's. Call it after
        the page pool is allocated. `taken_elsewhere`: see `DeviceMemory`."""
        model, plan, base, config = self.memory_model(pool), pool.plan, self.base, self.config
        if model is None or plan is None:
            fully_sharded = config.lora_sharding == "slora"
            needs = partial(host_bytes, base=base.spec, ranks=config.tp, fully_sharded=fully_sharded)
            return HostAdmission(needs, self._host_limit)
        pages = (pool.tokens // config.page_tokens + 1) * plan.page_bytes
        fixed = Fixed(
            held=pool.loaded + pages + plan.states,
            pages=pages,
            page=plan.page_bytes,
            step=plan.step,
            graphs=plan.graphs,
            context=CONTEXT_BYTES,
            planned=pool.loaded + plan.set_aside,
        )
        admission = MemoryAdmission(model, base.spec, config.micro_batch_tokens)
        return DeviceMemory(
            admission, fixed, self._read_device, self.graph_bytes, self._keep_graphs, taken_elsewhere=taken_elsewhere
        )

    def _read_device(self) -> Reading:
        with contained(self.base.device):  # a failed GPU must not fail the job that asks
            return read_device(self.base.device)

    def _keep_graphs(self, size: int) -> None:
        """Save the graphs' size on a thread, as a disk may be slow."""
        if (path := self._profile_path) is not None:
            Thread(target=keep_graph_bytes, args=(self.base, self._conditions, path, size), daemon=True).start()

    @property
    def _profile_path(self) -> Path | None:
        """Path of the memory profile. None with tensor parallelism: then it is measured at each start, on all ranks."""
        return self.folder.memory if self.config.tp == 1 else None

    def make_start(self, kv: KvCache, caches: Caches | None = None) -> ExecutorStart:
        """Choose the step executor: see `generate.execution.start.make_start`. `caches`: earlier measurements."""
        config = self.config
        return make_start(
            self.base,
            kv,
            max_running=config.batch_requests,
            lora_backend=self.lora_backend,
            compile=config.compile == "on",
            step_tokens=self.step_tokens,
            gemms=None if caches is None else caches.gemms,
            graph_bytes=self.graph_bytes,
            remote=self.servers,
        )

    def training_layers(
        self, caches: Caches | None = None, stream: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> CompiledLayers:
        """The layers that training runs once they are compiled. Tensor-parallel ranks call this together. Raises, on
        all ranks, `UnsupportedBase` or `FailedTogether`, with a message on why there are none."""
        base, config = self.base, self.config
        if base.device.type != "cuda":
            raise UnsupportedBase("there is no GPU")
        if config.compile == "off":
            raise UnsupportedBase("compile is off")
        if not self.lora_backend.groups_inputs:
            raise UnsupportedBase(f"the LoRA backend is {self.lora_backend.name}")
        mesh = None if base.sharding is None else base.sharding.mesh
        cut = on_all_ranks(mesh, base.device, partial(LayerCut, base))
        costs = (lambda: None) if caches is None else caches.layer_costs
        return CompiledLayers(base, cut, stream=stream, costs=costs)

    def make_sessions(
        self,
        kind: Callable[[Base, AdapterStore, DataFolder, TrainerSettings], AnySessions],
        store: AdapterStore,
        training: TrainingStream | None = None,
        compiled: CompiledLayers | None = None,
    ) -> AnySessions:
        """Make the sessions of jobs. `training`: the stream for slices that overlap generation; `compiled`: see
        `TrainerSettings`."""
        config = self.config
        settings = TrainerSettings(
            limits=BatchLimits(config.micro_batch_tokens, config.micro_batch_rows),
            mix_jobs=config.mix_jobs,
            recompute=config.recompute,
            keep_checkpoints=config.keep_checkpoints,
            lora_backend=self.lora_backend,
            own_stream=None if training is None else training.enter,
            compiled=compiled,
            graphs=self._layer_graphs(compiled, None if training is None else training.captures),
        )
        return kind(self.base, store, self.folder, settings)

    def _layer_graphs(self, compiled: CompiledLayers | None, captures: torch.cuda.Stream | None) -> LayerGraphs | None:
        """CUDA graphs for compiled training layers; None: layers run without. `captures`: the capture stream; None:
        training uses the default stream."""
        device = self.base.device
        if compiled is None or device.type != "cuda":
            return None
        stream = captures or torch.cuda.Stream(device, priority=TRAINING_PRIORITY)  # type: ignore[no-untyped-call]
        if (sharding := self.base.sharding) is None:
            return LayerGraphs(compiled, partial(GraphMemory, stream))
        return LayerGraphs(compiled, partial(GraphMemory, stream, sharding.mesh.traffic.held), ranks=True)
