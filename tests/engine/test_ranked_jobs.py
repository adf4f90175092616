"""Jobs on two ranks: what rank 0 gives up is given up by the rank that follows, too. Here both hold the whole base."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from coserve.cancellation import Cancellation, Cancelled
from coserve.engine.ranks.follower import FollowerParts
from coserve.engine.ranks.followers import RankLost
from coserve.engine.ranks.trainer import RankedTrainer
from coserve.finetune.job import TrainingJob
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.types import AdapterDigests, AdapterRef, JobSpec
from tests.support.executors import eager
from tests.support.finetuning import Bench, alive, job_spec, random_corpus, tiny_base
from tests.support.following import Following
from tests.support.generation import adapter

CORPUS = random_corpus()


class Jobs(NamedTuple):
    """One job's files on both ranks, and what trains it there."""

    ranked: RankedTrainer
    following: Following
    spec: JobSpec


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base("llama")


@contextmanager
def on_two_ranks(base: Base, root: Path, start_thread: Callable[[], None] = lambda: None) -> Iterator[Jobs]:
    """`start_thread`: see `Follower`."""
    bench, theirs = (Bench(base, root / str(rank), rows_on_tick=1) for rank in range(2))
    kv = KvCache.for_base(base, 64, 8)

    def read(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        return adapter(base, 0, 1)

    spec = bench.place(CORPUS, theirs.place(CORPUS, job_spec(CORPUS)))
    with Following(lambda _: FollowerParts(kv, eager(base, kv), theirs.trainer, read), start_thread) as following:
        yield Jobs(RankedTrainer(bench.trainer, following.followers, bench.folder), following, spec)


def wait_until_alive(jobs: int) -> None:
    """Wait until memory is held for so many jobs, those of both ranks together."""
    give_up = time.monotonic() + 60
    while len(alive(TrainingJob)) != jobs:
        assert time.monotonic() < give_up, f"expected {jobs} jobs in memory, got {len(alive(TrainingJob))}"
        time.sleep(0.01)


def test_a_start_that_is_cancelled_after_its_end_leaves_no_memory(base: Base, tmp_path: Path) -> None:
    before = len(alive(TrainingJob))
    with on_two_ranks(base, tmp_path) as (ranked, following, spec):
        cancellation = Cancellation()
        start = ranked.load(spec, cancellation)
        assert len(alive(TrainingJob)) == before + 2
        del start
        cancellation.cancel()
        following.catch_up()
        wait_until_alive(before)


def test_a_cancelled_start_may_end_after_the_next_one_of_its_job_is_committed(base: Base, tmp_path: Path) -> None:
    before = len(alive(TrainingJob))
    with on_two_ranks(base, tmp_path) as (ranked, following, spec):
        cancellation = Cancellation()
        ranked.load(spec, cancellation)
        ranked.load(spec, Cancellation())()
        cancellation.cancel()
        following.catch_up()
        wait_until_alive(before + 2)


def test_a_start_that_is_cancelled_while_another_rank_loads_leaves_no_memory(base: Base, tmp_path: Path) -> None:
    before, go_on = len(alive(TrainingJob)), threading.Event()

    def wait() -> None:
        assert go_on.wait(60)

    with on_two_ranks(base, tmp_path, wait) as (ranked, following, spec), ThreadPoolExecutor(1) as threads:
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


def test_a_start_can_be_cancelled_when_the_other_rank_has_ended(base: Base, tmp_path: Path) -> None:
    cancellation = Cancellation()
    with on_two_ranks(base, tmp_path) as (ranked, following, spec):
        ranked.load(spec, cancellation)
    with pytest.raises(RankLost):
        following.catch_up()
    cancellation.cancel()


def test_a_cancelled_preparation_may_begin_after_its_job_is_dropped(base: Base, tmp_path: Path) -> None:
    with on_two_ranks(base, tmp_path) as (ranked, following, spec):
        ranked.load(spec, Cancellation())()
        while (prepare := ranked.preparation(spec.id)) is None:
            ranked.advance(spec.id, None)
        cancellation = Cancellation()
        cancellation.cancel()
        ranked.drop(spec.id)
        with pytest.raises(Cancelled):
            prepare(cancellation)
        following.catch_up()
        ranked.load(spec, Cancellation())()
