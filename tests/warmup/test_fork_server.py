"""Workers that are forked from one process with all imports."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from coserve.config import Config, config_to_json
from coserve.engine.warming.worker_process import Driver, fork_broke_cuda, forks_break_cuda
from coserve.warmup.fork_client import ForkServer, ProcessWorker
from coserve.warmup.messages import PartReport, WarmUpTask

TASK = WarmUpTask("", "", {}, "shape", 2)


async def run(worker: ProcessWorker, part: str) -> PartReport | None:
    worker.run_part(part)
    async with asyncio.timeout(60):
        return await worker.next_report()


async def pid_of(worker: ProcessWorker, part: str = "any") -> int:
    report = await run(worker, part)
    assert report is not None
    return int(report.reason.split()[-1])


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_each_worker_is_a_process_of_its_own_that_can_be_ended(tmp_path: Path) -> None:
    server = ForkServer(TASK, "tests.support.fork_echo")
    first, second = await asyncio.gather(server.start_worker(), server.start_worker())
    report = await run(second, "layers")
    assert report is not None and report.reason.startswith("shape layers ")
    pids = [await pid_of(first), await pid_of(second)]
    assert len({*pids, os.getpid()}) == 3
    await first.close()
    assert not alive(pids[0])
    assert await pid_of(second) == pids[1]
    assert await run(second, "die") is None
    await second.close()
    third = await server.start_worker()
    assert await pid_of(third) not in pids
    await server.close()
    assert await third.next_report() is None
    await third.close()


@pytest.mark.parametrize("dies", [False, True])
async def test_what_a_worker_has_forked_ends_with_it_and_leaves_no_zombie(dies: bool) -> None:
    """Not every first process of a container waits for the orphans that it gets."""
    server = ForkServer(TASK, "tests.support.fork_echo")
    worker = await server.start_worker()
    child = await pid_of(worker, "fork")
    assert alive(child)
    if dies:
        assert await run(worker, "die") is None
    await worker.close()
    assert not alive(child)
    await server.close()


@pytest.mark.parametrize("part", ["long", "unreadable"])
async def test_a_worker_whose_report_cannot_be_read_counts_as_dead(part: str) -> None:
    server = ForkServer(TASK, "tests.support.fork_echo")
    first, second = await server.start_worker(), await server.start_worker()
    assert await run(first, part) is None
    await first.close()
    assert await pid_of(second) > 0
    await second.close()
    await server.close()


async def test_another_server_follows_one_that_died_and_its_workers_die_with_it() -> None:
    server = ForkServer(TASK, "tests.support.fork_echo")
    first, second = await server.start_worker(), await server.start_worker()
    first.run_part("die with the server")
    async with asyncio.timeout(60):
        assert await second.next_report() is None
    await asyncio.gather(first.close(), second.close())
    third = await server.start_worker()
    assert await pid_of(third) > 0
    await third.close()
    await server.close()


async def test_a_request_that_is_cancelled_leaves_no_answer_to_the_next_one() -> None:
    server = ForkServer(TASK, "tests.support.fork_echo")
    starting = asyncio.create_task(server.start_worker())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    worker = await server.start_worker()
    pid = await pid_of(worker)
    await worker.close()
    assert not alive(pid)
    await server.close()


async def test_a_server_that_cannot_start_fails_the_request() -> None:
    server = ForkServer(TASK, "tests.support.no_such_module")
    with pytest.raises(ConnectionResetError):
        await server.start_worker()
    await server.close()


@pytest.mark.parametrize(("answer", "broken"), [(0, False), (100, False), (3, True)])
def test_a_fork_that_broke_cuda_is_known(answer: int, broken: bool) -> None:
    """0: all is well; 100: there is no GPU; 3: libcuda was initialised before the fork."""

    class Library:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return answer

    assert fork_broke_cuda(lambda name: Library()) is broken


@pytest.mark.parametrize("broken", [False, True])
def test_it_is_tried_in_a_fork(broken: bool) -> None:
    server = os.getpid()
    assert forks_break_cuda(lambda: broken and os.getpid() != server) is broken


def test_a_fork_that_cannot_be_asked_counts_as_broken() -> None:
    def fails() -> bool:
        raise RuntimeError

    assert forks_break_cuda(fails)


def test_without_a_driver_no_fork_breaks_cuda() -> None:
    def missing(name: str) -> Driver:
        raise OSError(name)

    assert not fork_broke_cuda(missing)


@pytest.mark.slow
async def test_a_forked_worker_runs_a_part_with_torch(tmp_path: Path) -> None:
    config = Config(device="cpu", lora_backend="grouped", step_tokens=3, max_running=2, micro_batch_tokens=4)
    task = WarmUpTask(config_to_json(config).decode(), str(tmp_path), {}, "shape", 1)
    server = ForkServer(task)
    workers = await asyncio.gather(server.start_worker(), server.start_worker())
    for worker in workers:
        worker.run_part("profile")
    for worker in workers:
        async with asyncio.timeout(300):
            while (report := await worker.next_report()) is not None and report.done < report.total:
                pass
        assert report is not None and report.failure is None, report
        await worker.close()
    await server.close()
