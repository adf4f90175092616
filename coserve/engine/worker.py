"""The engine: load the base, build its components, run the tick. `engine/process.py` is the process's entry."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from coserve.config import Config
from coserve.core.errors import StartupError
from coserve.core.garbage import GarbageCollection, freeze_and_disable
from coserve.core.link.channel import engine_end
from coserve.core.link.engine import EngineReady, EngineRefused, EngineStopped
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.logs import log_event, set_up_logging
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.engine.lora_server.start import load_on_servers
from coserve.engine.parts import EngineParts
from coserve.engine.ranks.commands import BuildEngine, MeasurePool
from coserve.engine.ranks.executor import FollowersCopies, FollowersMemory, RankedExecutor, load_on_all
from coserve.engine.ranks.followers import Answers, Followers
from coserve.engine.ranks.progress import OwnRank
from coserve.engine.ranks.serve import exit_now, load_ranked_base, watched
from coserve.engine.ranks.trainer import RankedTrainer
from coserve.engine.spatial.slices_in_flight import TURNS
from coserve.engine.spatial.training_stream import TrainingStream, make_training_stream, prepare_environment
from coserve.engine.starting import EndedAtStart, StartProgress, follow, until_shutdown
from coserve.engine.threads import EXACT_THREADS, choose_threads, set_up_threads
from coserve.engine.warming.compilations import watch_compilations, watch_layers
from coserve.engine.warming.compiled import make_compiled
from coserve.engine.warmup.launch import StartedWarmUp
from coserve.engine.warmup.parts import WarmUpTask, units
from coserve.finetune.trainer import Trainer
from coserve.generate.generator import Generator
from coserve.generate.grammars import Grammars
from coserve.lora.store.interfaces import CopyMirror
from coserve.lora.store.store import AdapterStore, Load
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.queues.policies.choice import make_policy
from coserve.state.failpoints import failpoint

log = logging.getLogger(__name__)


def build_engine(
    base: Base,
    config: Config,
    link: Link[FromEngine, ToEngine],
    *,
    garbage: GarbageCollection | None = None,
    task: WarmUpTask | None = None,
    followers: Followers | None = None,
    training: TrainingStream | None = None,
    progress: StartProgress | None = None,
) -> tuple[Engine, EngineReady]:
    """Build the engine over a loaded base; return it with its `EngineReady` message. Its kernels are loaded and its
    graphs captured.

    `garbage`: see `Engine`; `task`: the warm-up that has compiled for it; `followers`: the other ranks, which have
    loaded their bases or are about to; `training`: the stream for slices that overlap generation; None: slices and
    steps alternate."""
    assert (training is None) != config.trains_concurrently, "expected a stream for training that overlaps generation"
    progress = progress or StartProgress(lambda _: None, 0)
    parts = EngineParts(base, config)
    read: Load = parts.read_adapter
    mirror: CopyMirror | None = None
    progress.loads("measuring memory")
    measured = None if followers is None else followers.ask(MeasurePool())
    pool = parts.pool_size()
    built: Answers | None = None
    if followers is not None and measured is not None:
        pool = replace(pool, tokens=min(pool.tokens, *measured.wait()))
        built = followers.ask(BuildEngine(tokens=pool.tokens))
        read, mirror = load_on_all(read, followers), FollowersCopies(followers)
    if parts.servers is not None:
        read, mirror = load_on_servers(read, parts.servers), parts.servers
    budget = parts.host_budget()
    store = AdapterStore(
        read,
        budget,
        memory=(memory := parts.host_memory(budget)),
        mirror=mirror,
        placed=base.complete_scales,
        times=parts.load_times,
        notes=lambda: parts.packed_files.notes + memory.notes,
        remote=parts.servers,
    )
    kv = KvCache.for_base(
        base, pool.tokens, config.page_tokens, sequences=config.batch_requests, kv_cache_dtype=config.kv_cache_dtype
    )
    progress.loads("loading compiled layers")
    compiled = make_compiled(parts, kv, task, training, progress.captures)
    load_tokenizer = partial(Tokenizer.load, config.model, trust_remote_code=config.trust_remote_code)
    grammars = Grammars(load_tokenizer, base.spec.vocab, pinned=base.device.type == "cuda")
    if base.device.type == "cuda":  # on a CPU the first request with a grammar waits for it
        grammars.warm_up()
    generator = Generator(
        base,
        store,
        kv,
        compiled.executor if followers is None else RankedExecutor(compiled.executor, followers),
        max_running=config.batch_requests,
        step_tokens=parts.step_tokens,
        max_queue=config.max_queue,
        fair=config.fair,
        prefix_cache=config.prefix_cache,
        grammars=grammars,
    )
    kind = Trainer if followers is None else partial(RankedTrainer, followers=followers)
    trainer = parts.make_sessions(kind, store, training=training, compiled=compiled.layers)
    if built is not None:
        built.wait()
    if parts.servers is not None:
        progress.loads("starting LoRA servers")
        parts.servers.wait()
    notes = (
        _notes(base, generator, parts) + pool.notes + compiled.notes + (() if training is None else (training.note,))
    )
    engine = Engine(
        generator,
        trainer,
        store,
        make_policy(config, tpot=config.targets(device=base.device.type)[1]),
        link,
        clock=time.monotonic,
        jobs=JobPlaces(
            config.max_active_jobs,
            memory=parts.job_memory(pool, (lambda: 0) if followers is None else FollowersMemory(followers).taken),
            first_come=config.policy_class.in_batches,
        ),
        marks=TURNS if training is None else training.marks,
        attainment=config.slo_attainment,
        garbage=garbage,
    )
    grammars.notify(engine.wake)
    if parts.servers is not None:
        parts.servers.notify(engine.wake)
    ready = EngineReady(
        spec=msgspec.structs.replace(base.spec, name=config.served_model_name or base.spec.name),
        kv_tokens=kv.tokens,
        pool=kv.shape,
        lora_backend=parts.lora_backend.name,
        memory=parts.memory_model(pool),
        host_adapter_limit=budget,
        notes=notes,
    )
    return engine, ready


def _notes(base: Base, generator: Generator, parts: EngineParts) -> tuple[str, ...]:
    """Notes for the operator on how this engine runs; shown in /health."""
    config, notes = parts.config, generator.notes
    if config.batch_requests > parts.step_tokens:
        most = f"at most {parts.step_tokens} requests run at once"
        bound = f"{most}, below max_running: a step has no more tokens (step_tokens)"
        log.warning("%s", bound)
        notes += (bound,)
    if base.note:
        log.info("%s", base.note)
        notes += (base.note,)
    if base.spec.context_note:
        log.warning("%s", base.spec.context_note)
        notes += (base.spec.context_note,)
    if base.sharding is not None and base.sharding.mesh.note:
        notes += (base.sharding.mesh.note,)
    if config.kv_cache_dtype != "auto":
        notes += ("keys and values are cached in FP8 (kv_cache_dtype), so answers differ slightly from the base's own",)
    if config.load_format == "dummy":
        notes += ("the base's weights are random (load_format dummy): its texts mean nothing",)
    if base.device.type == "cpu" and torch.get_num_threads() > EXACT_THREADS:
        notes += (f"more than {EXACT_THREADS} CPU threads: the same seed may give another text in another batch",)
    return notes


async def _run(config: Config, warm_up: StartedWarmUp | None, rank: OwnRank | None, fd: int) -> None:
    followers = None if rank is None else Followers(rank.commands, rank.monitor.progress)
    link = await engine_end(socket.socket(fileno=fd))
    failpoint("engine.start")
    began = time.monotonic()
    try:
        engine, ready = await until_shutdown(_start(config, warm_up, rank, link, followers), link)
    except StartupError as error:
        link.send(EngineRefused(code=error.code, message=error.message))
    except EndedAtStart:
        log_event(log, "engine stops while it starts")
        link.send(EngineStopped())
    else:
        freeze_and_disable()
        device = torch.device(ready.spec.device)
        log_event(
            log,
            "base loaded",
            model=ready.spec.name,
            device=ready.spec.device,
            dtype=ready.spec.dtype,
            quantization=ready.spec.quantization,
            memory_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
            kv_tokens=ready.kv_tokens,
            seconds=round(time.monotonic() - began, 3),
        )
        link.send(ready)
        if rank is not None:
            rank.monitor.ready(device.type)
        await engine.run()
        log_event(log, "engine stops")
    if followers is not None:
        followers.close()
    await link.close()


async def _start(
    config: Config,
    warm_up: StartedWarmUp | None,
    rank: OwnRank | None,
    link: Link[FromEngine, ToEngine],
    followers: Followers | None,
) -> tuple[Engine, EngineReady]:
    """Load the base while other processes compile what is missing. When they have ended and freed their memory, build
    the engine. Raises `StartupError`."""
    progress = StartProgress(link.send, 0 if warm_up is None else units(config.tp))
    compiling = None if warm_up is None else asyncio.create_task(follow(warm_up.socket, progress.compiles))
    try:
        if compiling is not None and warm_up is not None and not warm_up.concurrent:
            await compiling
        progress.compiles("loading the base", 0)
        base = load_ranked_base(config, rank)
        choose_threads(base, config)
        config = config.resolved(device=base.device.type)
        own_stream = make_training_stream(config, base.device)
        notes: tuple[str, ...] = ()
        if compiling is not None and warm_up is not None:
            notes = await compiling
            warm_up.process.wait()  # it has closed its end of the socket
    finally:
        if compiling is not None:
            compiling.cancel()
    engine, ready = build_engine(
        base,
        config,
        link,
        garbage=GarbageCollection(),
        task=None if warm_up is None else warm_up.task,
        followers=followers,
        training=own_stream,
        progress=progress,
    )
    if own_stream is not None:
        torch.cuda.synchronize(base.device)  # freed memory may still be in use on another stream
    return engine, msgspec.structs.replace(ready, notes=ready.notes + notes)


def serve(config: Config, fd: int, warm_up: StartedWarmUp | None, rank: OwnRank | None) -> None:
    """Run the engine until it stops. `fd`: the link's socket; `warm_up`: the warm-up's process, if any; `rank`: this
    process's rank, with tensor parallelism."""
    set_up_logging("engine", config.logs)
    disable_progress_bar()
    set_up_threads(config)
    prepare_environment(config.resolved(device="cpu" if config.device == "cpu" else "cuda"))
    compilations = watch_compilations(logging.WARNING)  # steps wait for each compilation
    if rank is not None:
        rank.monitor.progress.watch_kernels(lambda: compilations.loads)
        rank.monitor.progress.watch_compiler(watch_layers())
    work = _run(config, warm_up, rank, fd)
    run_to_exit(work if rank is None else watched(work, rank.monitor))


def run_to_exit(work: Coroutine[None, None, None]) -> None:
    """Run `work`, then end the process, with status 1 and a log line if `work` raised.

    It does not wait for threads: one may still compile, which cannot be stopped and is not needed.
    """
    try:
        asyncio.run(work)
    except BaseException as error:  # any error must end the process: the API process sees its end
        log.critical("the engine ends: %s", type(error).__name__, exc_info=error)
        exit_now(1)
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        exit_now(0)
