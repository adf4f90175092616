"""Jobs on two ranks: what rank 0 gives up is given up by the rank that follows, too. Here both hold the whole base."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from coserve.core.cancellation import Cancellation, Cancelled
from coserve.core.errors import CorruptAdapter, EngineFault, JobOutOfMemory, StorageBusy
from coserve.core.link.jobs import JobFailed, JobNote, JobSnapshot, JobSucceeded, JobWaiting
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.ranks.commands import LoadIntoPages
from coserve.engine.ranks.follower import FollowerParts
from coserve.engine.ranks.followers import RankLost
from coserve.engine.ranks.trainer import RankedTrainer
from coserve.finetune.host_copy import HostCopy
from coserve.finetune.sessions.followed import FollowedSessions
from coserve.finetune.sessions.session import TrainingSession
from coserve.lora.store.packing import copied_into, packed_bytes
from coserve.memory.kv import KvCache
from coserve.memory.pages import Span
from coserve.model.agreement import MemoryTogether
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.executors import eager
from tests.support.finetuning import Bench, alive, job_spec, random_corpus, tiny_base
from tests.support.following import Following
from tests.support.generation import adapter

CORPUS = random_corpus()
POOL = 1024
"""Tokens of the follower's pages."""


class Jobs(NamedTuple):
    """One job's files on both ranks, and what trains it there."""

    ranked: RankedTrainer
    following: Following
    spec: JobSpec
    fail_reads: list[Exception]
    """What the next reads of adapters raise on the rank that follows."""
    benches: list[Bench]
    """By rank."""
    followed: FollowedSessions
    pages: KvCache
    """Of the rank that follows."""


@pytest.fixture(scope="module")
def bases() -> list[Base]:
    """Of both ranks, which run theirs at the same time."""
    return [tiny_base("llama") for _ in range(2)]


@contextmanager
def on_two_ranks(bases: list[Base], root: Path, start_thread: Callable[[], None] = lambda: None) -> Iterator[Jobs]:
    """`start_thread`: see `Follower`."""
    theirs = Bench(bases[1], root / "1")
    followed = theirs.followed()
    base, kv, fail_reads = bases[1], KvCache.for_base(bases[1], POOL, 8), list[Exception]()

    def read(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        if fail_reads:
            raise fail_reads.pop()
        return adapter(base, 0, 1)

    with Following(lambda _: FollowerParts(kv, eager(base, kv), followed, read), start_thread) as following:
        ranks = partial(RankedTrainer, followers=following.followers)
        bench = Bench(bases[0], root / "0", rows_on_tick=1, kind=ranks)
        spec = bench.place(CORPUS, theirs.place(CORPUS, job_spec(CORPUS, sample_prompts=("a",), sample_steps=1)))
        assert isinstance(bench.trainer, RankedTrainer)
        yield Jobs(bench.trainer, following, spec, fail_reads, [bench, theirs], followed, kv)


def train(ranked: RankedTrainer, spec: JobSpec, until: Callable[[], bool]) -> None:
    while not until():
        assert not [one for one in ranked.advance(spec.id, None) if isinstance(one, JobFailed)]


def wait_until_alive(jobs: int) -> None:
    """Wait until memory is held for so many jobs, those of both ranks together."""
    give_up = time.monotonic() + 60
    while len(alive(TrainingSession)) != jobs:
        assert time.monotonic() < give_up, f"expected {jobs} jobs in memory, got {len(alive(TrainingSession))}"
        time.sleep(0.01)


def test_memory_is_released_on_all_ranks(bases: list[Base], tmp_path: Path) -> None:
    with on_two_ranks(bases, tmp_path) as jobs:
        with mock.patch.object(jobs.followed, "release_memory") as released:
            assert not jobs.ranked.release_memory(), "rank 0 has no graphs"
            jobs.following.catch_up()
        released.assert_called_once_with()


def test_a_start_that_is_cancelled_after_its_end_leaves_no_memory(bases: list[Base], tmp_path: Path) -> None:
    before = len(alive(TrainingSession))
    with on_two_ranks(bases, tmp_path) as (ranked, following, spec, *_):
        cancellation = Cancellation()
        start = ranked.load(spec, cancellation)
        assert len(alive(TrainingSession)) == before + 2
        del start
        cancellation.cancel()
        following.catch_up()
        wait_until_alive(before)


def test_a_cancelled_start_may_end_after_the_next_one_of_its_job_is_committed(
    bases: list[Base], tmp_path: Path
) -> None:
    before = len(alive(TrainingSession))
    with on_two_ranks(bases, tmp_path) as (ranked, following, spec, *_):
        cancellation = Cancellation()
        ranked.load(spec, cancellation)
        ranked.load(spec, Cancellation())()
        cancellation.cancel()
        following.catch_up()
        wait_until_alive(before + 2)


def test_a_start_that_is_cancelled_while_another_rank_loads_leaves_no_memory(bases: list[Base], tmp_path: Path) -> None:
    before, go_on = len(alive(TrainingSession)), threading.Event()

    def wait() -> None:
        assert go_on.wait(60)

    with on_two_ranks(bases, tmp_path, wait) as (ranked, following, spec, *_), ThreadPoolExecutor(1) as threads:
        cancellation = Cancellation()
        load = threads.submit(ranked.load, spec, cancellation)
        wait_until_alive(before + 1)  # rank 0 has done its part
        cancellation.cancel()
        go_on.set()
        with pytest.raises(Cancelled):
            load.result(60)
        del load
        following.catch_up()
        wait_until_alive(before)


def test_a_start_can_be_cancelled_when_the_other_rank_has_ended(bases: list[Base], tmp_path: Path) -> None:
    cancellation = Cancellation()
    with on_two_ranks(bases, tmp_path) as (ranked, following, spec, *_):
        ranked.load(spec, cancellation)
    with pytest.raises(RankLost):
        following.catch_up()
    cancellation.cancel()


def test_a_rank_that_cannot_read_the_published_adapter_now_tries_again(bases: list[Base], tmp_path: Path) -> None:
    with on_two_ranks(bases, tmp_path) as (ranked, _, spec, fail_reads, *_):
        ranked.load(spec, Cancellation())()
        train(ranked, spec, lambda: ranked.finished(spec.id))
        fail_reads.append(StorageBusy("no file descriptors"))
        waiting = JobWaiting(id=spec.id, message="waiting for the disk: no file descriptors")
        assert ranked.publication(spec.id)()() == waiting
        assert isinstance(ranked.publication(spec.id)()(), JobSucceeded)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_published_adapter_that_one_rank_has_no_memory_for_is_kept_by_none(
    bases: list[Base], tmp_path: Path, rank: int
) -> None:
    def no_memory(weights: LoraWeights) -> LoraWeights:
        raise MemoryError

    with suppress(KeyError), on_two_ranks(bases, tmp_path) as jobs:
        ranked, spec, bench = jobs.ranked, jobs.spec, jobs.benches[0]
        ranked.load(spec, Cancellation())()
        train(ranked, spec, lambda: ranked.finished(spec.id))
        if rank:
            jobs.fail_reads.append(MemoryError())
        with mock.patch.object(bench.store, "host_copy", no_memory) if not rank else nullcontext():
            message = ranked.publication(spec.id)()()
        assert isinstance(message, JobSucceeded)
        assert not bench.in_memory(message.ref)
        jobs.following.followers.send(LoadIntoPages(message.ref, 0, 1, {}))
        with pytest.raises(RankLost):
            jobs.following.catch_up()


def test_a_published_adapter_that_a_rank_finds_damaged_ends_the_engine(bases: list[Base], tmp_path: Path) -> None:
    with on_two_ranks(bases, tmp_path) as (ranked, _, spec, fail_reads, *_):
        ranked.load(spec, Cancellation())()
        train(ranked, spec, lambda: ranked.finished(spec.id))
        fail_reads.append(CorruptAdapter("its weights are not finite"))
        with pytest.raises(EngineFault, match="cannot be read: its weights are not finite"):
            ranked.publication(spec.id)()


def test_a_state_that_no_rank_could_gather_ends_its_job_alone(bases: list[Base], tmp_path: Path) -> None:
    """The rank that follows has had the same error, and goes on."""

    def no_memory(*_: object) -> None:
        raise MemoryTogether("rank 1: needed 1 GiB, free 5 bytes")

    with on_two_ranks(bases, tmp_path) as (ranked, following, spec, *_):
        for fails in (True, False):
            ranked.load(spec, Cancellation())()
            train(ranked, spec, lambda: ranked.snapshot_due(spec.id))
            with mock.patch.object(HostCopy, "download", no_memory) if fails else nullcontext():
                with pytest.raises(JobOutOfMemory, match="rank 1: needed 1 GiB") if fails else nullcontext():
                    assert isinstance(ranked.snapshot(spec.id)()(), JobSnapshot)
                following.catch_up()
            ranked.drop(spec.id)


def test_a_rank_whose_device_has_failed_while_it_loads_ends_the_engine(bases: list[Base], tmp_path: Path) -> None:
    """And not its job, which goes on after the restart."""

    def broken(*_: object) -> None:
        raise EngineFault("the GPU does not work any more")

    with on_two_ranks(bases, tmp_path) as jobs:
        jobs.followed.load = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineFault, match="the GPU does not work"):
            jobs.ranked.load(jobs.spec, Cancellation())


def pages_of(jobs: Jobs, weights: LoraWeights) -> Span:
    return Span(0, jobs.pages.buffer.pages_for(packed_bytes(weights)), lambda: None)


def test_a_snapshot_is_kept_by_all_ranks_until_nobody_needs_it(bases: list[Base], tmp_path: Path) -> None:
    with on_two_ranks(bases, tmp_path) as jobs:
        ranked, spec, store = jobs.ranked, jobs.spec, jobs.benches[0].store
        ranked.load(spec, Cancellation())()
        for number in (1, 2):
            train(ranked, spec, lambda: ranked.snapshot_due(spec.id))
            message = ranked.snapshot(spec.id)()()
            assert isinstance(message, JobSnapshot) and message.step == number
            weights, expected = store.acquire(message.ref), KvCache.for_base(bases[0], POOL, 8)
            span = pages_of(jobs, weights)
            copied_into(expected.buffer.of(span), weights)
            jobs.following.followers.send(LoadIntoPages(message.ref, span.first, span.pages, {}))
            jobs.following.catch_up()
            assert torch.equal(jobs.pages.buffer.bytes, expected.buffer.bytes), "of the follower's own copy"
            store.release(message.ref)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_snapshot_that_one_rank_has_no_memory_for_is_kept_by_none(
    bases: list[Base], tmp_path: Path, rank: int
) -> None:
    def no_memory(weights: LoraWeights) -> LoraWeights:
        raise MemoryError

    with suppress(KeyError), on_two_ranks(bases, tmp_path) as jobs:
        ranked, spec, bench = jobs.ranked, jobs.spec, jobs.benches[rank]
        ranked.load(spec, Cancellation())()
        train(ranked, spec, lambda: ranked.snapshot_due(spec.id))
        keep, bench.store.host_copy = bench.store.host_copy, no_memory
        message = ranked.snapshot(spec.id)()()
        assert isinstance(message, JobNote) and "no host memory" in message.message
        bench.store.host_copy = keep
        train(ranked, spec, lambda: ranked.snapshot_due(spec.id))
        found = ranked.snapshot(spec.id)()()
        assert isinstance(found, JobSnapshot)
        lost = AdapterRef(found.ref.id, found.ref.version - 1)
        assert jobs.benches[0].store.resident() == ()
        jobs.following.followers.send(LoadIntoPages(lost, 0, 1, {}))
        with pytest.raises(RankLost):
            jobs.following.catch_up()
