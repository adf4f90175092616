"""The engine: load the base, build its parts, run the tick. `engine/process.py` is the process's entry."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from coserve.adapter_store.files import load_adapter
from coserve.adapter_store.host import HostBudget
from coserve.adapter_store.store import AdapterStore
from coserve.config import Config
from coserve.engine.engine import Engine
from coserve.engine.sizes import STEP_TOKENS
from coserve.engine.warming.client import WarmUpClient
from coserve.engine.warming.compilations import watch_compilations
from coserve.engine.warming.early_start import StartedWarmUp
from coserve.engine.warming.part_runner import make_part_runner
from coserve.engine.warming.upgrade import Upgrade
from coserve.errors import AdapterNotFound, StartupError
from coserve.finetune.memory_profiling import Conditions, plan_memory
from coserve.finetune.trainer import Trainer
from coserve.garbage import GarbageCollection, freeze_and_collect_young, freeze_and_disable
from coserve.generate.execution.start import Compilation, make_start, wake_compiler
from coserve.generate.generator import Generator
from coserve.kernels.lora.backend import choose_backend
from coserve.kernels.lora.interface import LoraBackend
from coserve.link import EngineReady, EngineRefused, EngineWarming, FromEngine, Link, ToEngine
from coserve.logs.format import log_event
from coserve.logs.setup import LogSettings, set_up_logging
from coserve.memory.kv import CPU_TOKENS, KvCache
from coserve.memory.plan import Work
from coserve.model.base import Base, load_base
from coserve.model.lora import LoraWeights
from coserve.queues.policy import make_policy
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.stream_link import engine_end
from coserve.types import AdapterDigests, AdapterRef
from coserve.warmup.messages import WarmUpTask
from coserve.warmup.parts import EAGER, FIRST, STEP_PARTS

log = logging.getLogger(__name__)

EXACT_THREADS = 2
SWITCH_INTERVAL = 2e-5
"""Seconds after which a thread gives the interpreter to another. A step frees it and takes it back with every operation: at
Python's 5 ms, beside a thread that compiles or reads an adapter, it would wait so long a thousand times."""


def build_engine(
    base: Base,
    config: Config,
    link: Link[FromEngine, ToEngine],
    *,
    garbage: GarbageCollection | None = None,
    warm: WarmUpClient | None = None,
    preload_kernels: Callable[[Compilation | None], None] = lambda _: None,
) -> tuple[Engine, EngineReady]:
    """The engine over a loaded base, and the message that says it is ready. `garbage`: see `Engine`; `warm`: the warm-up's
    client; `preload_kernels`: see `Upgrade`."""
    folder = DataFolder(config.data_dir)
    lora_backend = choose_backend(config.lora_way, base.device, base.dtype)

    def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        path = folder.adapter(ref)
        if not path.is_dir():
            raise AdapterNotFound(f"no adapter {str(ref)!r}", field="adapter")
        return load_adapter(path, base.spec, device="cpu", dtype=base.dtype, digests=digests)

    budget = HostBudget(config.max_adapters_resident, config.adapter_memory_bytes)
    store = AdapterStore(load, budget, pinned=base.device.type == "cuda")
    step_tokens = config.step_tokens or STEP_TOKENS[base.device.type]
    pool = _pool_size(base, config, lora_backend, step_tokens, folder, shared=0 if warm is None else warm.memory_bytes)
    kv = KvCache.for_base(base, pool.tokens, config.page_tokens)
    start = make_start(
        base,
        kv,
        max_running=config.inference_batch_size,
        lora_backend=lora_backend,
        when=config.compile,
        step_tokens=step_tokens,
        warm=warm,
    )
    generator = Generator(
        base,
        store,
        kv,
        start.executor,
        max_running=config.inference_batch_size,
        step_tokens=step_tokens,
        prefix_cache=config.prefix_cache,
    )
    trainer = Trainer(
        base,
        store,
        folder,
        micro_batch_tokens=config.micro_batch_tokens,
        recompute=config.recompute,
        keep_checkpoints=config.keep_checkpoints,
        lora_backend=lora_backend,
    )
    notes = _notes(base, generator, config) + pool.notes
    upgrade = None
    if start.compilation is not None:
        upgrade = Upgrade(start.compilation, generator, notes, warm, preload_kernels=preload_kernels)
        if warm is not None and warm.complete(STEP_PARTS):
            upgrade.compile()  # from disk; while requests run it would take several times as long and delay them
            upgrade.adopt()
    engine = Engine(
        generator,
        trainer,
        store,
        make_policy(config),
        link,
        max_running=config.inference_batch_size,
        max_queue=config.max_queue,
        fair=config.fair,
        max_active_jobs=config.max_active_jobs,
        step_tokens=step_tokens,
        clock=time.monotonic,
        planned_bytes=pool.planned,
        garbage=garbage,
        upgrade=upgrade,
    )
    ready = EngineReady(spec=base.spec, kv_tokens=kv.tokens, lora_way=lora_backend.name, notes=notes + start.notes)
    return engine, ready


@dataclass(frozen=True)
class _PoolSize:
    tokens: int
    planned: int = 0
    """Bytes of the GPU's memory that torch should never need more than; 0 without a plan."""
    notes: tuple[str, ...] = ()


def _pool_size(
    base: Base, config: Config, lora_backend: LoraBackend, step_tokens: int, folder: DataFolder, *, shared: int
) -> _PoolSize:
    """The page pool: as set, or what the memory plan leaves. `shared`: bytes that a warm-up may use for now."""
    if config.kv_tokens is not None:
        return _PoolSize(config.kv_tokens)
    if base.device.type != "cuda":
        return _PoolSize(CPU_TOKENS)
    work = Work(step_tokens, config.micro_batch_tokens, config.max_active_jobs)
    conditions = Conditions(lora_backend, config.recompute, config.inference_batch_size, config.page_tokens, work)
    plan = plan_memory(base, conditions, fraction=config.memory_fraction, path=folder.memory, shared=shared)
    note = plan.note(config.page_tokens)
    log.info("%s", note)
    planned = torch.cuda.memory_allocated(base.device) + plan.set_aside
    return _PoolSize(plan.pages * config.page_tokens, planned, (note,))


def default_threads() -> int:
    """All cores but one, two at most: with more, torch's CPU kernels round a row differently in different batches."""
    return min(EXACT_THREADS, max(1, (os.cpu_count() or 2) - 1))


def _notes(base: Base, generator: Generator, config: Config) -> tuple[str, ...]:
    """What a user should know of how this engine runs; shown in /health."""
    notes = generator.notes
    if base.spec.context_note:
        log.warning("%s", base.spec.context_note)
        notes += (base.spec.context_note,)
    if config.load_format == "dummy":
        notes += ("the base's weights are random (load_format dummy): its texts mean nothing",)
    if base.device.type == "cpu" and torch.get_num_threads() > EXACT_THREADS:
        notes += (f"more than {EXACT_THREADS} CPU threads: the same seed may give another text in another batch",)
    return notes


async def _run(config: Config, fd: int, warm_up: StartedWarmUp | None) -> None:
    link = await engine_end(socket.socket(fileno=fd))
    failpoint("engine.start")
    began = time.monotonic()
    try:
        warm = None if warm_up is None else await _connect(warm_up)
        if warm is not None and warm_up is not None and not warm_up.concurrent:
            await warm.wait_until_ended()
        base = load_base(
            config.model,
            device=config.device,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            load_format=config.load_format,
        )
        if warm is not None:
            waking = asyncio.get_running_loop().run_in_executor(None, wake_compiler, base.device)
            if config.compile != "background":
                await warm.wait_until_ended()
            elif not await warm.wait_for_parts(FIRST):
                await warm.wait_for_parts(EAGER)
            await asyncio.wait({waking})  # what it raises, `make_start` hears too
        garbage = GarbageCollection(first_full=freeze_and_disable)
        preload_kernels: Callable[[Compilation | None], None] = lambda _: None
        if warm_up is not None:
            preload_kernels = partial(_preload_kernels, base, config, warm_up.task)
        engine, ready = build_engine(base, config, link, garbage=garbage, warm=warm, preload_kernels=preload_kernels)
    except StartupError as error:
        link.send(EngineRefused(code=error.code, message=error.message))
    else:
        if not engine.compiled:
            preload_kernels(None)
        freeze_and_collect_young()  # compilation makes much garbage, on other threads too
        log_event(
            log,
            "base loaded",
            model=base.spec.name,
            device=base.spec.device,
            dtype=base.spec.dtype,
            memory_bytes=torch.cuda.memory_allocated(base.device) if base.device.type == "cuda" else None,
            kv_tokens=ready.kv_tokens,
            seconds=round(time.monotonic() - began, 3),
        )
        link.send(ready)
        if not engine.warms_up:
            link.send(EngineWarming(done=0, total=0, seconds_left=0.0, notes=ready.notes))
        await engine.run()
        log_event(log, "engine stops")
    await link.close()


def _preload_kernels(base: Base, config: Config, task: WarmUpTask, compilation: Compilation | None) -> None:
    """Load the kernels of compiled steps (None: of eager ones), on a stream that the engine's steps do not wait for."""
    began = time.monotonic()
    try:
        with torch.cuda.stream(torch.cuda.Stream(base.device)):  # type: ignore[no-untyped-call]
            make_part_runner(base, config, task).preload_kernels(
                None if compilation is None else compilation.preload_executor
            )
            torch.cuda.current_stream().synchronize()
    except Exception:  # steps load their kernels later
        log.exception("the kernels of the first steps could not be loaded ahead")
    log.info("kernels of the first steps loaded in %.1f s", time.monotonic() - began)


async def _connect(warm_up: StartedWarmUp) -> WarmUpClient:
    warm = WarmUpClient(warm_up.task)
    await warm.listen(warm_up.socket)
    return warm


def serve(config: Config, fd: int, warm_up: StartedWarmUp | None) -> None:
    """Run the engine until it stops. `fd`: the link's socket; `warm_up`: the warm-up's process, if there is one."""
    set_up_logging("engine", LogSettings.of(config))
    disable_progress_bar()
    torch.set_num_threads(config.threads or default_threads())
    sys.setswitchinterval(SWITCH_INTERVAL)
    watch_compilations(logging.WARNING)  # steps wait for each of them
    run_to_exit(_run(config, fd, warm_up))


def run_to_exit(work: Coroutine[None, None, None]) -> None:
    """Run `work`, then end the process: with status 1 and a line in the log if `work` raised.

    It waits for no thread: one may still compile, which cannot be stopped and is not needed.
    """
    try:
        asyncio.run(work)
    except BaseException as error:  # any error must end the process: the API process sees its end
        log.critical("the engine ends: %s", type(error).__name__, exc_info=error)
        _exit_now(1)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        _exit_now(0)


def _exit_now(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)
