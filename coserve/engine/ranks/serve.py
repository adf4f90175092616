"""A follower's process from start to end: load the base, make the components, execute commands."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from functools import partial
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from coserve.config import Config
from coserve.core.errors import ConfigError, EngineFault, StartupError
from coserve.core.garbage import freeze_heap
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import log_event, set_up_logging
from coserve.core.ranks import JOIN_SECONDS, SILENCE, RankFailed, RankRefused
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.parts import EngineParts
from coserve.engine.ranks.commands import Answer, AnyCommand, command_decoder
from coserve.engine.ranks.follower import Follower, FollowerParts
from coserve.engine.ranks.followers import RankLost
from coserve.engine.ranks.progress import Monitor, OwnRank
from coserve.engine.threads import set_up_threads
from coserve.engine.warming.compilations import watch_compilations, watch_layers
from coserve.engine.warming.compiled import make_compiled
from coserve.engine.warmup.parts import WarmUpTask
from coserve.finetune.sessions.followed import FollowedSessions
from coserve.kernels.gpu.device import use_device
from coserve.lora.store.store import AdapterStore
from coserve.memory.allocator import read_device
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.lora import LoraWeights
from coserve.model.parallel.join import join
from coserve.model.parallel.lockstep import Lockstep
from coserve.model.parallel.mesh import Mesh

log = logging.getLogger(__name__)


def load_ranked_base(config: Config, rank: OwnRank | None) -> Base:
    """Load this rank's shard of the base, or all of it if there is one rank. Raises like `load_base`, and `ConfigError`
    for too few GPUs."""
    device, mesh = config.device, None
    if rank is not None:
        place = rank.place
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda and (found := torch.cuda.device_count()) < place.size:
            raise ConfigError(f"tp: expected a GPU for each of {place.size} ranks, found {found}", field="tp")
        device = f"cuda:{place.rank}" if cuda else device
        if cuda:
            torch.cuda.set_device(place.rank)
        where = torch.device(device if cuda else "cpu")
        mesh = join(place.rank, place.size, address=place.rendezvous, device=where, timeout=JOIN_SECONDS)
        Lockstep(mesh, place.board)
        rank.monitor.progress.watch_collectives(partial(_collectives, mesh))
    return load_base(
        config.model,
        device=device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        load_format=config.load_format,
        mesh=mesh,
        strategy=config.lora_sharding,
        ep=config.ep,
        quantization=config.quantization,
        mla_cache=config.mla_cache,
    )


def _collectives(mesh: Mesh) -> int:
    """Number of collectives begun."""
    return sum([*mesh.traffic.calls.values()])


def follow(config: Config, rank: OwnRank, warm_up: WarmUpTask | None) -> None:
    """Execute the commands of rank 0 until the engine ends, then end the process. `warm_up`: rank 0's warm-up, which
    has ended before rank 0 sends `BuildEngine`; None: there is none."""
    place, monitor = rank.place, rank.monitor
    set_up_logging(f"rank-{place.rank}", config.logs)
    disable_progress_bar()
    set_up_threads(config)
    compilations = watch_compilations(logging.WARNING)  # all ranks wait for each compilation
    monitor.progress.watch_kernels(lambda: compilations.loads)
    monitor.progress.watch_compiler(watch_layers())
    try:
        base = load_ranked_base(config, rank)
        log_event(log, "base loaded", rank=place.rank, ranks=place.size, device=base.spec.device)
        follower = _make_follower(base, config, rank, warm_up)
        follower.run()
        log_event(log, "rank stops", rank=place.rank)
    except StartupError as error:
        monitor.report(RankRefused(error.code, error.message))
        exit_now(1)
    except PeerLost:
        log.error("rank 0 is gone")
        time.sleep(SILENCE)  # let the daemon, which ends this process, report rank 0 first
        exit_now(1)
    except BaseException as error:  # the other ranks cannot go on without this one
        log.critical("rank %d ends: %s", place.rank, type(error).__name__, exc_info=error)
        monitor.report(RankFailed(_text(error)))
        exit_now(1)
    exit_now(0)


def _make_follower(base: Base, config: Config, rank: OwnRank, warm_up: WarmUpTask | None) -> Follower:
    parts = EngineParts(base, config)
    budget = parts.host_budget()
    store = AdapterStore(parts.read_adapter, budget, memory=parts.host_memory(budget))

    def read(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        shard = parts.read_adapter(ref, digests)
        assert isinstance(shard, LoraWeights), "shards have no packed files"
        return store.host_copy(shard)

    def build(tokens: int) -> FollowerParts:
        kv = KvCache.for_base(
            base, tokens, config.page_tokens, sequences=config.batch_requests, kv_cache_dtype=config.kv_cache_dtype
        )
        compiled = make_compiled(parts, kv, warm_up)  # rank 0 tells the operator
        sessions = parts.make_sessions(FollowedSessions, store, compiled=compiled.layers)
        made = FollowerParts(kv, compiled.executor, sessions, read, base.complete_scales)
        freeze_heap()
        rank.monitor.ready(base.device.type)
        return made

    commands = Channel[Answer, AnyCommand](rank.commands[0], command_decoder())
    return Follower(
        commands,
        rank.monitor.progress,
        measure_pool=lambda: parts.pool_size().tokens,
        build=build,
        jobs=config.max_active_jobs,
        start_thread=partial(use_device, base.device),
        outside=lambda: read_device(base.device).outside if base.device.type == "cuda" else 0,
    )


async def watched(work: Coroutine[None, None, None], monitor: Monitor) -> None:
    """Run rank 0, and report to the daemon why it ended; the daemon then ends this process. Raises what `work` raises
    if the daemon does not end it."""
    try:
        await work
    except Exception as error:
        if not isinstance(error, RankLost):
            log.critical("rank 0 ends: %s", type(error).__name__, exc_info=error)
            monitor.report(RankFailed(_text(error)))
        await asyncio.sleep(SILENCE)
        raise


def _text(error: BaseException) -> str:
    """The message of our own errors, the type of others."""
    if not isinstance(error, EngineFault):
        return type(error).__name__
    return str(error) if error.__cause__ is None else f"{error} ({type(error.__cause__).__name__})"


def exit_now(status: int) -> NoReturn:
    """Exit without waiting for threads."""
    logging.shutdown()
    os._exit(status)
