"""The engine: load the base, build its parts, run the tick. `engine/process.py` is the process's entry."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from coserve.adapter_store.host import HostBudget
from coserve.adapter_store.mirror import CopyMirror
from coserve.adapter_store.store import AdapterStore, Load
from coserve.config import Config
from coserve.engine.engine import Engine
from coserve.engine.parts import EXACT_THREADS, EngineParts, set_up_threads
from coserve.engine.ranks.adapters import FollowersCopies, load_on_all
from coserve.engine.ranks.commands import BuildEngine, MeasurePool
from coserve.engine.ranks.executor import RankedExecutor
from coserve.engine.ranks.followers import Answers, Followers
from coserve.engine.ranks.memory import FollowersMemory
from coserve.engine.ranks.own_rank import OwnRank
from coserve.engine.ranks.serve import load_ranked_base, watched
from coserve.engine.ranks.trainer import RankedTrainer
from coserve.engine.spatial.training_stream import TrainingStream, make_training_stream, prepare_environment
from coserve.engine.starting import EndedAtStart, until_shutdown
from coserve.engine.warming.client import WarmUpClient
from coserve.engine.warming.compilations import Compilations, watch_compilations, watch_layers
from coserve.engine.warming.early_start import StartedWarmUp
from coserve.engine.warming.part_runner import make_part_runner
from coserve.engine.warming.training_layers import compile_layers, make_training_layers
from coserve.engine.warming.upgrade import (
    PreloadKernels,
    Upgrade,
    preload_nothing,
    report_progress,
)
from coserve.errors import StartupError
from coserve.finetune.trainer import Trainer
from coserve.garbage import GarbageCollection, freeze_and_collect_young, freeze_and_disable
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.execution.start import wake_compiler
from coserve.generate.generator import Generator
from coserve.link import EngineReady, EngineRefused, EngineStopped, EngineWarming, FromEngine, Link, ToEngine
from coserve.logs.format import log_event
from coserve.logs.setup import LogSettings, set_up_logging
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.queues.policies.choice import make_policy
from coserve.state.failpoints import failpoint
from coserve.stream_link import engine_end
from coserve.types import DEFAULT_RANK
from coserve.warmup.messages import WarmUpTask
from coserve.warmup.parts import EAGER, GEMMS, LAYERS, PROFILE, SCORED, STEP_PARTS
from coserve.warmup.parts import training as training_part

log = logging.getLogger(__name__)

NOT_PRELOADED = (
    "generation: its kernels could not be loaded ahead (see the log): the first step of each kind waits for them"
)


def build_engine(
    base: Base,
    config: Config,
    link: Link[FromEngine, ToEngine],
    *,
    garbage: GarbageCollection | None = None,
    warm: WarmUpClient | None = None,
    preload_kernels: PreloadKernels = preload_nothing,
    followers: Followers | None = None,
    training: TrainingStream | None = None,
) -> tuple[Engine, EngineReady]:
    """The engine over a loaded base, and the message that says it is ready. `garbage`: see `Engine`; `warm`: the warm-up's
    client; `preload_kernels`: see `Upgrade`; `followers`: the other ranks, which have loaded their bases or are about to;
    `training`: where slices run beside generation; None: they take turns with it."""
    assert (training is None) != config.trains_concurrently, (
        "expected a stream for training where it runs beside generation"
    )
    parts = EngineParts(base, config)
    limit = config.adapter_memory_bytes  # each rank has its part of every adapter
    budget = HostBudget(config.max_adapters_resident, None if limit is None else limit // config.tp)
    read: Load = parts.read_adapter
    mirror: CopyMirror | None = None
    measured = None if followers is None else followers.ask(MeasurePool())
    pool = parts.pool_size(shared=0 if warm is None else warm.memory_bytes)
    built: Answers | None = None
    if followers is not None and measured is not None:
        pool = replace(pool, tokens=min(pool.tokens, *measured.wait()))
        built = followers.ask(BuildEngine(tokens=pool.tokens))
        read, mirror = load_on_all(read, followers), FollowersCopies(followers)
    store = AdapterStore(read, budget, pinned=base.device.type == "cuda", mirror=mirror)
    kv = KvCache.for_base(base, pool.tokens, config.page_tokens)
    start = parts.make_start(kv, warm)
    generator = Generator(
        base,
        store,
        kv,
        start.executor if followers is None else RankedExecutor(start.executor, followers),
        max_running=config.batch_requests,
        step_tokens=parts.step_tokens,
        prefix_cache=config.prefix_cache,
    )
    training_layers, training_notes = make_training_layers(parts, warm, training)
    kind = Trainer if followers is None else partial(RankedTrainer, followers=followers)
    trainer = parts.make_trainer(store, training=training, compiled=training_layers, kind=kind)
    if built is not None:
        built.wait()
    notes = (
        _notes(base, generator, parts) + pool.notes + training_notes + (() if training is None else (training.note,))
    )
    upgrade = None
    if start.compilation is not None:
        upgrade = Upgrade(
            start.compilation, generator, notes, warm, training_layers=training_layers, preload_kernels=preload_kernels
        )
        if warm is not None and warm.complete(STEP_PARTS):
            upgrade.begin_compiled()
    elif training_layers is not None and not training_layers.ready and (note := compile_layers(training_layers)):
        notes += (note,)
    engine = Engine(
        generator,
        trainer,
        store,
        make_policy(config, tpot=config.targets(device=base.device.type)[1]),
        link,
        max_running=config.batch_requests,
        max_queue=config.max_queue,
        fair=config.fair,
        attainment=config.slo_attainment,
        max_active_jobs=config.max_active_jobs,
        step_tokens=parts.step_tokens,
        clock=time.monotonic,
        memory=parts.device_memory(pool, (lambda: 0) if followers is None else FollowersMemory(followers).taken),
        garbage=garbage,
        upgrade=upgrade,
        mark_training=None if training is None else training.mark,
        between_slices=nullcontext if training is None else training.between,
        mark_step=None if training is None else training.mark_step,
    )
    ready = EngineReady(
        spec=base.spec,
        kv_tokens=kv.tokens,
        pool=kv.shape,
        lora_backend=parts.lora_backend.name,
        memory=parts.memory_model(pool),
        notes=notes + start.notes,
    )
    return engine, ready


def _notes(base: Base, generator: Generator, parts: EngineParts) -> tuple[str, ...]:
    """What a user should know of how this engine runs; shown in /health."""
    config, notes = parts.config, generator.notes
    if config.batch_requests > parts.step_tokens:
        most = f"at most {parts.step_tokens} requests run at once"
        bound = f"{most}, below max_running: a step has no more tokens (step_tokens)"
        log.warning("%s", bound)
        notes += (bound,)
    if base.spec.context_note:
        log.warning("%s", base.spec.context_note)
        notes += (base.spec.context_note,)
    if base.sharding is not None and base.sharding.mesh.note:
        notes += (base.sharding.mesh.note,)
    if config.load_format == "dummy":
        notes += ("the base's weights are random (load_format dummy): its texts mean nothing",)
    if base.device.type == "cpu" and torch.get_num_threads() > EXACT_THREADS:
        notes += (f"more than {EXACT_THREADS} CPU threads: the same seed may give another text in another batch",)
    return notes


@dataclass(frozen=True)
class _Given:
    """What an engine's process begins with. `compilations`: those of this process."""

    config: Config
    warm_up: StartedWarmUp | None
    rank: OwnRank | None
    compilations: Compilations


async def _run(given: _Given, fd: int) -> None:
    rank = given.rank
    followers = None if rank is None else Followers(rank.commands, rank.monitor.progress)
    link = await engine_end(socket.socket(fileno=fd))
    failpoint("engine.start")
    began = time.monotonic()
    try:
        engine, ready = await until_shutdown(_start(given, link, followers), link)
    except StartupError as error:
        link.send(EngineRefused(code=error.code, message=error.message))
    except EndedAtStart:
        log_event(log, "engine stops while it starts")
        link.send(EngineStopped())
    else:
        freeze_and_collect_young()  # compilation makes much garbage, on other threads too
        device = torch.device(ready.spec.device)
        log_event(
            log,
            "base loaded",
            model=ready.spec.name,
            device=ready.spec.device,
            dtype=ready.spec.dtype,
            memory_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
            kv_tokens=ready.kv_tokens,
            seconds=round(time.monotonic() - began, 3),
        )
        link.send(ready)
        if rank is not None:
            rank.monitor.ready(device.type)
        if not engine.warms_up:
            link.send(EngineWarming(done=0, total=0, seconds_left=0.0, notes=ready.notes))
        await engine.run()
        log_event(log, "engine stops")
    if followers is not None:
        followers.close()
    await link.close()


async def _start(
    given: _Given, link: Link[FromEngine, ToEngine], followers: Followers | None
) -> tuple[Engine, EngineReady]:
    """Load the base and build the engine; wait for the kernels that it begins with. Raises `StartupError`."""
    warm = None if given.warm_up is None else await _connect(given.warm_up)
    if warm is None:
        return await _load(given, link, None, followers)
    reporting = asyncio.create_task(report_progress(link, warm))
    try:
        return await _load(given, link, warm, followers)
    finally:
        reporting.cancel()


async def _load(
    given: _Given, link: Link[FromEngine, ToEngine], warm: WarmUpClient | None, followers: Followers | None
) -> tuple[Engine, EngineReady]:
    """`_start`, with the client of the warm-up that has been started."""
    config, warm_up, rank = given.config, given.warm_up, given.rank
    if warm is not None and warm_up is not None and not warm_up.concurrent:
        await warm.wait_until_ended()
    base = load_ranked_base(config, rank)
    config = config.resolved(device=base.device.type)
    own_stream = make_training_stream(config, base.device)
    if warm is not None:
        await warm.checked()
        if not warm.layers_ready():
            with given.compilations.expected():
                # on a thread, as the progress is read meanwhile; what it raises, `make_start` hears too
                await asyncio.wait({asyncio.get_running_loop().run_in_executor(None, wake_compiler, base.device)})
        if config.compile == "background" and rank is None:
            await warm.wait_for_parts((PROFILE,))
        else:  # all ranks load all kernels before the first request
            await warm.wait_until_ended()
    garbage = GarbageCollection(first_full=freeze_and_disable)
    preload_kernels: PreloadKernels = preload_nothing
    if warm_up is not None:
        preload_kernels = partial(_preload_kernels, config, warm_up.task)
    engine, ready = build_engine(
        base,
        config,
        link,
        garbage=garbage,
        warm=warm,
        preload_kernels=preload_kernels,
        followers=followers,
        training=own_stream,
    )
    if own_stream is not None:
        torch.cuda.synchronize(base.device)  # memory that was freed meanwhile may be another stream's
    if warm is not None and engine.warms_up and not engine.compiled:
        if await warm.wait_for_parts((LAYERS, *GEMMS)):  # while kernels of graphs are compiled
            engine.load_layers()
        if await warm.wait_for_parts(SCORED):
            engine.preload_eager()
        if await warm.wait_for_parts(STEP_PARTS):
            engine.compile()
        else:
            await warm.wait_for_parts(EAGER)
            preload_kernels(base, None)
    if warm is not None and warm_up is not None and rank is None:
        await warm.catch_up()
        # While a warm-up runs, its processes may have taken the memory that a micro-batch needs.
        if warm.ended and warm.complete((training_part(DEFAULT_RANK),)):
            with nullcontext() if own_stream is None else own_stream.enter():
                _preload_training(config, warm_up.task, base)
    return engine, ready


def _preload_kernels(
    config: Config,
    task: WarmUpTask,
    base: Base,
    executor: Callable[[KvCache], StepExecutor | None] | None,
    *,
    decodes: bool = True,
) -> str:
    """See `PreloadKernels`. On a stream that the engine's steps do not wait for."""
    began = time.monotonic()
    try:
        with torch.cuda.stream(torch.cuda.Stream(base.device)):  # type: ignore[no-untyped-call]
            make_part_runner(base, config, task).preload_kernels(executor, decodes=decodes)
            torch.cuda.current_stream().synchronize()
    except Exception:  # steps load their kernels later
        log.exception("the kernels of the first steps could not be loaded ahead")
        return NOT_PRELOADED
    log.info("kernels of the first steps loaded in %.1f s", time.monotonic() - began)
    return ""


def _preload_training(config: Config, task: WarmUpTask, base: Base) -> None:
    """Run a few micro-batches on the current stream, that of the trainer: with the kernels, its libraries' handles and the memory
    that slices of jobs will have are there."""
    began = time.monotonic()
    try:
        make_part_runner(base, config, task).preload_training()
        torch.cuda.current_stream().synchronize()
    except Exception:  # the first slices load their kernels
        log.exception("the kernels of training could not be loaded ahead")
    else:
        log.info("kernels of training loaded in %.1f s", time.monotonic() - began)


async def _connect(warm_up: StartedWarmUp) -> WarmUpClient:
    warm = WarmUpClient(warm_up.task)
    await warm.listen(warm_up.socket)
    return warm


def serve(config: Config, fd: int, warm_up: StartedWarmUp | None, rank: OwnRank | None) -> None:
    """Run the engine until it stops. `fd`: the link's socket; `warm_up`: the warm-up's process, if there is one; `rank`: of this
    process, where there are several."""
    set_up_logging("engine", LogSettings.of(config))
    disable_progress_bar()
    set_up_threads(config)
    prepare_environment(config.resolved(device="cpu" if config.device == "cpu" else "cuda"))
    compilations = watch_compilations(logging.WARNING)  # steps wait for each of them
    if rank is not None:
        rank.monitor.progress.watch_kernels(lambda: compilations.loads)
        rank.monitor.progress.watch_compiler(watch_layers())
    work = _run(_Given(config, warm_up, rank, compilations), fd)
    run_to_exit(work if rank is None else watched(work, rank.monitor))


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
