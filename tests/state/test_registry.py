from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.core.errors import (
    AdapterBusy,
    AdapterNotFound,
    JobNotFound,
    StartupError,
    StorageFailed,
    StorageFull,
    WrongJobState,
)
from coserve.core.schemas.jobs import Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState, Teacher
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.state.failpoints import armed
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.retries import Backoff
from coserve.state.thread import RegistryThread
from tests.support.records import import_adapter, make_adapter, make_job, make_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.sqlite3"


@pytest.fixture
def registry(path: Path) -> Registry:
    return Registry(path, clock=iter(range(1000, 100000)).__next__)


def test_a_job_from_start_to_end(registry: Registry, path: Path) -> None:
    registry.create_job(make_job())
    registry.record_start("job-1", 3, 0)
    for step in (1, 2, 3):
        registry.record_step("job-1", make_metrics(step))
        registry.record_message("job-1", f"checkpoint at step {step}", type="checkpoint")
    done = registry.succeed("job-1", make_adapter(source="job:job-1"))
    assert done.state is JobState.SUCCEEDED
    assert done.result == AdapterRef("poet", 1)
    assert (done.step, done.total_steps, done.trained_tokens) == (3, 3, 30)
    assert done.started_at is not None
    assert done.finished_at is not None
    events = registry.events("job-1")
    assert [event.seq for event in events] == list(range(1, 10))
    assert [event.type for event in events] == ["state"] * 2 + ["metrics", "checkpoint"] * 3 + ["state"]
    assert [event.state for event in events if event.type == "state"] == ["queued", "running", "succeeded"]
    assert registry.events("job-1", after=7, limit=1) == [events[7]]
    assert registry.adapter("poet") == make_adapter(source="job:job-1")
    registry.close()
    again = Registry(path)
    assert again.job("job-1") == done
    assert again.events("job-1") == events
    again.check()


def test_an_interrupted_job_goes_on_from_its_checkpoint(registry: Registry) -> None:
    registry.create_job(make_job())
    registry.record_start("job-1", 3, 0)
    for step in (1, 2):
        registry.record_step("job-1", make_metrics(step))
    registry.set_state("job-1", JobState.QUEUED, message="interrupted")
    record = registry.record_start("job-1", 3, 1)
    assert (record.step, record.trained_tokens, record.metrics) == (1, 10, make_metrics(1))
    registry.record_step("job-1", make_metrics(2))
    assert registry.job("job-1").trained_tokens == 20


def test_why_a_job_did_not_go_on_from_its_last_checkpoint_is_an_event_and_a_note(registry: Registry) -> None:
    registry.create_job(make_job())
    assert registry.record_start("job-1", 3, 0).notes == ()
    registry.set_state("job-1", JobState.QUEUED, message="interrupted")
    assert registry.record_start("job-1", 3, 1, "damaged").notes == ("damaged",)
    assert [event.message for event in registry.events("job-1") if event.level == "warning"] == ["damaged"]


def test_samples_that_a_job_has_left_behind_are_told_once(registry: Registry) -> None:
    """It goes on from step 5, past step 4, whose samples were being generated; those of the step that it goes on from
    come yet."""
    job = make_job()
    training = msgspec.structs.replace(job.spec.training, sample_prompts=("a", "b", "c"), sample_steps=2)
    registry.create_job(msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, training=training)))

    def told() -> list[str]:
        found = [event.message for event in registry.events("job-1") if event.type == "message"]
        assert tuple(found) == registry.job("job-1").notes
        return found

    def restart(step: int) -> list[str]:
        registry.record_start("job-1", 9, step)
        return told()

    assert [restart(step) for step in (0, 1, 2)] == [[], [], []]
    for prompt in range(3):
        registry.record_sample("job-1", Sample(step=2, prompt=prompt, text="", finish_reason="stop"))
    assert restart(3) == []
    none = "no samples at step 4: the job was interrupted during generation"
    assert [restart(step) for step in (5, 5, 6)] == [[none]] * 3
    registry.record_sample("job-1", Sample(step=6, prompt=1, text="", finish_reason="stop"))
    registry.record_note("job-1", "no sample of prompt 0 at step 6: the queue is full")
    assert restart(7)[2:] == ["no sample of prompt 2 at step 6: the job was interrupted during generation"]
    assert len(restart(8)) == 3


def test_a_sample_is_kept_once_for_its_step_and_prompt(registry: Registry) -> None:
    def sample(step: int, prompt: int, text: str = "") -> Sample:
        return Sample(step=step, prompt=prompt, text=text, finish_reason="stop")

    registry.create_job(make_job())
    told = [sample(2, 1), sample(2, 0), sample(4, 0), sample(2, 1, "again"), sample(2, 2), sample(4, 0, "again")]
    for each in told:
        registry.record_sample("job-1", each)
    kept = [event.sample for event in registry.events("job-1") if event.type == "sample"]
    assert kept == [sample(2, 1), sample(2, 0), sample(4, 0), sample(2, 2)]
    record = registry.job("job-1")
    assert record.samples == (sample(4, 0),)
    assert [registry.sampled(record, step) for step in (2, 3, 4, 6)] == [{0, 1, 2}, set(), {0}, set()]
    registry.set_state("job-1", JobState.CANCELLED)
    with pytest.raises(WrongJobState):
        registry.record_sample("job-1", sample(6, 0))


def test_floats_come_back_as_they_were(registry: Registry) -> None:
    registry.create_job(make_job())
    registry.record_start("job-1", 3, 0)
    registry.record_step("job-1", make_metrics(1, loss=math.nan))
    metrics = registry.job("job-1").metrics
    assert metrics is not None
    assert math.isnan(metrics.loss)


def test_moves_that_are_refused(registry: Registry) -> None:
    registry.create_job(make_job())
    with pytest.raises(WrongJobState):
        registry.succeed("job-1", make_adapter())
    with pytest.raises(WrongJobState):
        registry.set_state("job-1", JobState.QUEUED)
    error = ErrorInfo(code="non_finite_loss", message="loss is not finite")
    assert registry.set_state("job-1", JobState.FAILED, error=error).error == error
    assert registry.events("job-1")[-1].level == "error"
    before = registry.events("job-1")
    for state in (JobState.RUNNING, JobState.QUEUED, JobState.PAUSED, JobState.CANCELLED, JobState.FAILED):
        with pytest.raises(WrongJobState):
            registry.set_state("job-1", state)
    with pytest.raises(WrongJobState):
        registry.record_start("job-1", 3, 0)
    assert registry.events("job-1") == before


def test_what_is_not_there(registry: Registry) -> None:
    for call in (registry.job, registry.events, lambda job: registry.jobs(after=job)):
        with pytest.raises(JobNotFound):
            call("nobody")
    for missing in (registry.adapter, registry.versions, registry.delete_adapter):
        with pytest.raises(AdapterNotFound):
            missing("nobody")
    import_adapter(registry, make_adapter())
    with pytest.raises(AdapterNotFound, match="poet@2"):
        registry.adapter("poet", 2)


def test_pages_of_jobs_and_adapters(registry: Registry) -> None:
    for n in range(5):
        registry.create_job(make_job(f"job-{n}", adapter=f"a{n}"))
        import_adapter(registry, make_adapter(f"b{n}"))
        import_adapter(registry, make_adapter(f"b{n}", 2))
    registry.set_state("job-3", JobState.PAUSED)
    assert [job.spec.id for job in registry.jobs(limit=2)] == ["job-4", "job-3"]
    assert [job.spec.id for job in registry.jobs(after="job-3", limit=2)] == ["job-2", "job-1"]
    assert [job.spec.id for job in registry.jobs(states=[JobState.PAUSED])] == ["job-3"]
    assert registry.jobs(states=[]) == []
    assert [job.spec.id for job in registry.unfinished()] == [f"job-{n}" for n in range(5)]
    assert [str(one.ref) for one in registry.adapters(limit=2)] == ["b0@2", "b1@2"]
    assert [str(one.ref) for one in registry.adapters(after="b1", limit=2)] == ["b2@2", "b3@2"]


def test_a_page_of_adapters_takes_as_little_work_among_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, opened = sqlite3.connect, list[sqlite3.Connection]()
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **kwargs: opened.append(connect(*args, **kwargs)) or opened[-1]
    )
    registry = Registry(path, clock=iter(range(1000, 100000)).__next__)

    def instructions() -> int:
        found = list[int]()
        for each in opened:
            each.set_progress_handler(lambda: found.append(1), 1)
        registry.adapters(after="b1", limit=2)
        for each in opened:
            each.set_progress_handler(None, 1)
        return len(found)

    for n in range(5):
        import_adapter(registry, make_adapter(f"b{n}"))
    few = instructions()
    for n in range(50):
        import_adapter(registry, make_adapter(f"c{n}"))
    assert instructions() <= few + 2


@pytest.mark.parametrize("job", [make_job(version=2), make_job(adapter="bard", init_from=AdapterRef("poet", 1))])
def test_an_adapter_in_use_is_not_deleted(registry: Registry, job: JobRecord) -> None:
    import_adapter(registry, make_adapter())
    registry.create_job(job)
    with pytest.raises(AdapterBusy):
        registry.delete_adapter("poet")
    registry.set_state("job-1", JobState.CANCELLED)
    registry.delete_adapter("poet")


def test_what_a_waiting_job_continues_from_is_not_deleted(registry: Registry) -> None:
    """It waits for a job that ended without a version while it waited for the one that published."""
    registry.create_job(make_job())
    for number in (2, 3):
        job = make_job(f"job-{number}", version=number)
        registry.create_job(msgspec.structs.replace(job, after=f"job-{number - 1}"))
    registry.record_start("job-1", 3, 0)
    registry.succeed("job-1", make_adapter(source="job:job-1"))
    for ended in ("job-2", "job-3"):
        with pytest.raises(AdapterBusy, match=r"in use by job-"):
            registry.delete_version(AdapterRef("poet", 1))
        registry.set_state(ended, JobState.CANCELLED)
    registry.delete_version(AdapterRef("poet", 1))


def test_a_teacher_is_not_deleted_while_its_job_runs(registry: Registry) -> None:
    import_adapter(registry, make_adapter())
    job, teacher = make_job(adapter="bard"), Teacher(ref=AdapterRef("poet", 1), digests=AdapterDigests("0"), rank=4)
    registry.create_job(msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, teacher=teacher)))
    with pytest.raises(AdapterBusy):
        registry.delete_adapter("poet")
    with pytest.raises(AdapterBusy):
        registry.delete_version(AdapterRef("poet", 1))
    registry.set_state("job-1", JobState.CANCELLED)
    registry.delete_version(AdapterRef("poet", 1))


@pytest.mark.parametrize(("action", "error"), [("ENOSPC", StorageFull), ("EIO", StorageFailed)])
def test_a_commit_that_fails_changes_nothing(registry: Registry, action: str, error: type[Exception]) -> None:
    registry.create_job(make_job())
    registry.record_start("job-1", 3, 0)
    before = (registry.job("job-1"), registry.events("job-1"), registry.adapter_refs())
    calls = [
        lambda: registry.create_job(make_job("job-2", version=2), idempotency_key="k"),
        lambda: registry.set_state("job-1", JobState.PAUSED),
        lambda: registry.record_step("job-1", make_metrics(1)),
        lambda: registry.succeed("job-1", make_adapter()),
        lambda: import_adapter(registry, make_adapter("bard")),
    ]
    for call in calls:
        with armed(f"registry.before_commit={action}"), pytest.raises(error):
            call()
        assert (registry.job("job-1"), registry.events("job-1"), registry.adapter_refs()) == before
    assert registry.next_version("poet") == 2
    registry.record_step("job-1", make_metrics(1))
    registry.check()


def test_a_database_that_cannot_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections, connect = list[sqlite3.Connection](), sqlite3.connect

    def noted(*given: Any, **options: Any) -> sqlite3.Connection:
        connections.append(connect(*given, **options))
        return connections[-1]

    def limit_growth(pages: int) -> None:
        (now,) = connections[0].execute("PRAGMA page_count").fetchone()
        connections[0].execute(f"PRAGMA max_page_count = {now + pages}")

    monkeypatch.setattr(sqlite3, "connect", noted)
    registry = Registry(path)
    registry.create_job(make_job())
    limit_growth(0)
    before = registry.jobs()
    big = msgspec.structs.replace(make_job("big", version=2), metadata={"k": "x" * 200_000})
    with pytest.raises(StorageFull):
        registry.create_job(big)
    assert registry.jobs() == before
    limit_growth(1000)
    registry.create_job(big)
    registry.close()


def test_a_file_that_is_no_registry(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StartupError):
        Registry(path)
    newer = tmp_path / "newer.sqlite3"
    Registry(newer).close()
    with closing(sqlite3.connect(newer, isolation_level=None)) as other:
        other.execute("UPDATE meta SET value = 99")
    with pytest.raises(StartupError, match="schema 99"):
        Registry(newer)


def test_damage_is_found(registry: Registry, path: Path) -> None:
    for n in range(200):
        registry.create_job(make_job(f"job-{n}", adapter=f"a{n}"))
    registry.check()
    registry.close()
    content = bytearray(path.read_bytes())
    for at in range(4096 * 3, len(content), 64):
        content[at : at + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises((StartupError, sqlite3.DatabaseError)):
        Registry(path).check()


async def test_the_thread_keeps_order_and_raises(path: Path) -> None:
    thread = RegistryThread(lambda: Registry(path))
    calls = [thread(lambda r, n=n: r.create_job(make_job(f"job-{n}", adapter=f"a{n}"))) for n in range(20)]
    await asyncio.gather(*calls)
    jobs = await thread(lambda r: r.jobs())
    assert [job.spec.id for job in reversed(jobs)] == [f"job-{n}" for n in range(20)]
    with pytest.raises(JobNotFound):
        await thread(lambda r: r.job("nobody"))
    assert await thread(lambda _: threading.current_thread().name) != threading.current_thread().name
    await thread.close()
    await thread.close()
    with pytest.raises(RuntimeError):
        await thread(lambda r: r.jobs())


async def test_a_read_waits_for_no_change_and_sees_those_before(path: Path) -> None:
    thread = RegistryThread(lambda: Registry(path))
    await thread(lambda r: r.note("before"))
    gate = threading.Event()

    def slow(registry: Registry) -> None:
        registry.note("slow")
        gate.wait(30)

    change = asyncio.create_task(thread(slow))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        while "slow" not in await thread.read(lambda r: r.notes()):
            assert not change.done()
        other.execute("BEGIN IMMEDIATE")
        other.execute("INSERT INTO notes (created_at, message) VALUES (0, 'under way')")
        assert await thread.read(lambda r: r.notes()) == ["before", "slow"], "within another process's transaction"
        other.execute("COMMIT")
    assert not change.done()
    gate.set()
    await change
    assert await thread.read(lambda r: r.notes()) == ["before", "slow", "under way"]
    with pytest.raises(JobNotFound):
        await thread.read(lambda r: r.job("nobody"))
    with pytest.raises(StorageFailed):
        await thread.read(lambda r: r.note("not by a read"))
    await thread.close()
    with pytest.raises(RuntimeError):
        await thread.read(lambda r: r.jobs())


async def test_the_thread_that_changes_the_registry_makes_its_file(path: Path) -> None:
    """It may have reserved space for it."""
    opened = list[str]()

    def factory() -> Registry:
        opened.append(threading.current_thread().name)
        return Registry(path)

    thread = RegistryThread(factory)
    assert await asyncio.gather(*(thread.read(lambda r: r.jobs()) for _ in range(3))) == [[], [], []]
    assert opened == ["registry_0", "registry-reader_0"]
    await thread.close()


async def test_a_read_that_cannot_open_the_file_now_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = RegistryThread(lambda: Registry(path), backoff=Backoff(first=0.001, total=5.0))
    await thread(lambda r: r.note("before"))
    connect, left = sqlite3.connect, iter((14, 14, 7))  # no descriptor, no descriptor, no memory

    def failing(*args: Any, **settings: Any) -> sqlite3.Connection:
        for code in left:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = code
            raise error
        return connect(*args, **settings)

    monkeypatch.setattr("coserve.state.registry.database.sqlite3.connect", failing)
    assert await thread.read(lambda r: r.notes()) == ["before"]
    await thread.close()


async def test_a_close_that_nobody_waits_for_closes_both_connections(path: Path) -> None:
    thread = RegistryThread(lambda: Registry(path))
    await thread(lambda r: r.note("before"))
    gate = threading.Event()
    reading = asyncio.create_task(thread.read(lambda _: gate.wait(30)))
    await asyncio.sleep(0)
    closing_task = asyncio.create_task(thread.close())
    await asyncio.sleep(0)
    closing_task.cancel()
    gate.set()
    await reading
    await thread.close()
    with pytest.raises(RuntimeError):
        await thread(lambda r: r.jobs())
    for own in threading.enumerate():
        if own.name.startswith("registry"):
            await asyncio.to_thread(own.join, 30)
    assert [each.name for each in path.parent.iterdir()] == [path.name], "SQLite's log and its index are gone"


async def test_a_registry_that_is_overwritten_fails_as_a_disk_does(path: Path) -> None:
    thread = RegistryThread(lambda: Registry(path))
    await thread(lambda r: r.note("before"))
    await thread.read(lambda r: r.notes())
    with path.open("r+b") as file:
        file.write(b"nonsense" * 4096)
    for name in ("-wal", "-shm"):
        with path.with_name(path.name + name).open("r+b") as file:
            file.write(b"nonsense" * 1024)
    for call in (thread, thread.read):
        with pytest.raises(StorageFailed, match="damaged"):
            await call(lambda r: r.jobs())
    await thread.close()


async def test_a_cancelled_caller_loses_nothing(path: Path) -> None:
    thread = RegistryThread(lambda: Registry(path))
    await thread(lambda r: r.check())
    gate = threading.Event()
    blocker = asyncio.create_task(thread(lambda _: gate.wait(30)))
    await asyncio.sleep(0)
    blocker.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await blocker
    await thread(lambda r: r.create_job(make_job()))
    await thread.close()


async def test_a_registry_that_does_not_open_says_so(tmp_path: Path) -> None:
    thread = RegistryThread(lambda: Registry(tmp_path / "nowhere" / "registry.sqlite3"))
    with pytest.raises(StartupError):
        await thread(lambda r: r.check())
    await thread.close()


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        (("pirat", None), "no adapter 'pirat'; did you mean 'pirate'?"),
        (("Pirate", 1), "no adapter 'Pirate@1'; did you mean 'pirate'?"),
        (("pirate", 3), "no adapter 'pirate@3'; versions of 'pirate': 2, 1"),
        (("many", 99), "no adapter 'many@99'; versions of 'many': 10, 9, 8, 7, 6, 5, 4, 3, ..."),
        (("zebra", None), "no adapter 'zebra'"),
    ],
)
def test_a_missing_adapter_is_answered_with_what_there_is(
    registry: Registry, ref: tuple[str, int | None], says: str
) -> None:
    for name, count in (("pirate", 2), ("many", 10)):
        for version in range(1, count + 1):
            import_adapter(registry, make_adapter(id=name, version=version))
    with pytest.raises(AdapterNotFound) as missing:
        registry.adapter(*ref)
    assert missing.value.message == says


@pytest.mark.parametrize(("version", "name"), [(None, "pirate"), (1, "pirate@1")])
def test_an_adapter_in_training_is_told_as_one(registry: Registry, version: int | None, name: str) -> None:
    job = make_job(adapter="pirate")
    registry.create_job(job)
    with pytest.raises(AdapterNotFound) as missing:
        registry.adapter("pirate", version)
    progress = f"{job.spec.id} is queued, step 0 of {job.total_steps}"
    assert missing.value.message == f"no adapter {name!r} yet: it is still training ({progress})"
    with pytest.raises(AdapterNotFound, match=r"^no adapter 'pirate@2'$"):
        registry.adapter("pirate", 2)
    with pytest.raises(AdapterNotFound, match="no adapter 'pirat'; did you mean"):
        registry.adapter("pirat")
    registry.set_state(job.spec.id, JobState.CANCELLED)
    with pytest.raises(AdapterNotFound, match=r"^no adapter 'pirate'$"):
        registry.adapter("pirate")
