from __future__ import annotations

import errno
import fcntl
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from coserve.core.errors import DataFolderInUse, ForbiddenPath, JobNotFound, StartupError, StorageError
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef
from coserve.state.durable import replace_dir, write_file
from coserve.state.failpoints import armed
from coserve.state.folder import DataFolder
from coserve.state.recover import drop_unrecorded_checkpoints, recover
from coserve.state.registry.registry import Registry
from tests.support.records import import_adapter, make_adapter, make_job, make_metrics


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    folder = DataFolder(tmp_path / "data")
    with folder.lock():
        pass
    return folder


@pytest.fixture
def registry(folder: DataFolder) -> Registry:
    return Registry(folder.database)


def lay_adapter(folder: DataFolder, ref: AdapterRef) -> None:
    with replace_dir(folder.adapter(ref), point="adapter") as temp:
        (temp / "adapter_config.json").write_text("{}")
        (temp / "adapter_model.safetensors").write_text("weights")


def lay_job(folder: DataFolder, registry: Registry, id: str, version: int) -> None:
    write_file(folder.corpus(id), b"corpus", point="corpus")
    registry.create_job(make_job(id, version=version))


def files(folder: DataFolder) -> set[str]:
    found = {path.relative_to(folder.root).as_posix() for path in folder.root.rglob("*")}
    return {name for name in found if not name.startswith(("registry", "lock"))}


EMPTY = {"adapters", "files", "jobs", "sessions", "staging"}


def test_an_empty_folder(registry: Registry, folder: DataFolder) -> None:
    assert recover(registry, folder) == []
    assert files(folder) == EMPTY


def test_leftovers_of_unfinished_writes_go(registry: Registry, folder: DataFolder) -> None:
    lay_job(folder, registry, "job-1", 1)
    (folder.job("job-1") / ".tmp-checkpoint-00000001-ab").mkdir()
    (folder.job("job-1") / "checkpoint-00000002").mkdir()  # empty: never a checkpoint
    (folder.jobs / ".trash-job-0-ab").mkdir()
    (folder.adapters / "poet").mkdir()
    (folder.adapters / "poet" / ".tmp-1-ab").mkdir()
    (folder.adapters / "poet" / ".tmp-1-ab" / "adapter_model.safetensors").write_text("half")
    (folder.staging / "upload").write_text("half")
    kept = folder.batches / "batch_1"
    kept.mkdir(parents=True)
    for left in (folder.batches / ".tmp-batch_2-0123", kept / ".tmp-record.json-0123"):
        left.write_text("half")
    recover(registry, folder)
    assert folder.checkpoints("job-1") == []
    of_job = {"jobs/job-1", "jobs/job-1/corpus.safetensors", "jobs/job-1/checkpoint-00000002"}
    assert files(folder) == EMPTY | of_job | {"batches", "batches/batch_1"}


def test_files_without_a_row_go(registry: Registry, folder: DataFolder) -> None:
    lay_adapter(folder, AdapterRef("org/poet", 1))
    lay_adapter(folder, AdapterRef("org/poet", 2))
    lay_adapter(folder, AdapterRef("bard", 1))
    import_adapter(registry, make_adapter("org/poet", 1))
    write_file(folder.corpus("job-9"), b"corpus", point="corpus")
    recover(registry, folder)
    assert folder.adapter_refs() == registry.adapter_refs() == [AdapterRef("org/poet", 1)]
    assert not (folder.adapters / "bard").exists()
    assert folder.job_ids() == []
    assert registry.notes() == []


def test_files_of_jobs_that_are_over_go(registry: Registry, folder: DataFolder) -> None:
    for version, state in enumerate((JobState.CANCELLED, JobState.FAILED, JobState.PAUSED), start=1):
        lay_job(folder, registry, state.value, version)
        registry.set_state(state.value, state)
    recover(registry, folder)
    assert folder.job_ids() == ["paused"]


def test_rows_without_files_go_with_a_note(
    registry: Registry, folder: DataFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2, 3):
        import_adapter(registry, make_adapter("poet", version))
    lay_adapter(folder, AdapterRef("poet", 1))
    lay_adapter(folder, AdapterRef("poet", 2))
    (folder.adapter(AdapterRef("poet", 2)) / "adapter_model.safetensors").unlink()
    recover(registry, folder)
    assert registry.adapter_refs() == folder.adapter_refs() == [AdapterRef("poet", 1)]
    assert [note.split(":")[0] for note in registry.notes()] == ["adapter poet@2 dropped", "adapter poet@3 dropped"]
    assert "poet@3" in caplog.text
    assert registry.next_version("poet") == 4


def test_unfinished_jobs_come_back_oldest_first(registry: Registry, folder: DataFolder) -> None:
    for version, id in enumerate(("a", "b", "c", "d"), start=1):
        lay_job(folder, registry, id, version)
    registry.record_start("b", 10, 0)
    registry.set_state("c", JobState.PAUSED)
    registry.set_state("d", JobState.CANCELLED)
    jobs = recover(registry, folder)
    assert [(job.spec.id, job.state) for job in jobs] == [("a", "queued"), ("b", "queued"), ("c", "paused")]
    assert registry.events("b")[-1].message.startswith("interrupted")
    assert registry.events("b")[-1].state is JobState.QUEUED
    assert recover(registry, folder) == jobs


def test_a_checkpoint_that_the_registry_has_not_heard_of_goes(registry: Registry, folder: DataFolder) -> None:
    lay_job(folder, registry, "job-1", 1)
    registry.record_start("job-1", 10, 0)
    for step in (1, 2, 3):
        registry.record_step("job-1", make_metrics(step, 10))
    for step in (2, 3, 4):
        with replace_dir(folder.checkpoint("job-1", step), point="checkpoint") as temp:
            (temp / "state").write_text("")
    recover(registry, folder)
    assert [step for step, _ in folder.checkpoints("job-1")] == [2, 3]


@pytest.mark.parametrize(
    ("step", "pending", "kept"),
    [(3, b'{"loss": 1.0}', True), (4, b'{"loss": 1.0}', False), (3, b"null", False), (3, b'{"\xff": 1}', False)],
)
def test_a_checkpoint_from_before_its_steps_evaluation_stays(
    registry: Registry, folder: DataFolder, step: int, pending: bytes, kept: bool
) -> None:
    """It has the metrics that the registry lacks."""
    lay_job(folder, registry, "job-1", 1)
    registry.record_start("job-1", 10, 0)
    for done in (1, 2):
        registry.record_step("job-1", make_metrics(done, 10))
    with replace_dir(folder.checkpoint("job-1", step), point="checkpoint") as temp:
        (temp / "state.json").write_bytes(b'{"progress": {"pending": %b}}' % pending)
    recover(registry, folder)
    assert bool(folder.checkpoints("job-1")) is kept


@pytest.mark.parametrize("error", ["EACCES", "EIO"])
def test_a_checkpoint_that_cannot_be_read_now_stays(
    registry: Registry, folder: DataFolder, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon starts, and looks again before the job does."""
    lay_job(folder, registry, "job-1", 1)
    registry.record_start("job-1", 10, 0)
    registry.record_step("job-1", make_metrics(1, 10))
    for step in (1, 2):
        with replace_dir(folder.checkpoint("job-1", step), point="checkpoint") as temp:
            (temp / "state.json").write_text('{"progress": {"pending": {"loss": 1.0}}}')
    with armed(f"job.open={error}@1"):
        (job,) = recover(registry, folder)
    assert [step for step, _ in folder.checkpoints("job-1")] == [1, 2]
    assert "job job-1: checkpoint 2 cannot be read now" in caplog.text
    with armed(f"job.open={error}@1"), pytest.raises(StorageError, match="checkpoint 2 cannot be read now"):
        drop_unrecorded_checkpoints(folder, job)
    drop_unrecorded_checkpoints(folder, job)
    assert [step for step, _ in folder.checkpoints("job-1")] == [1, 2]


def test_a_job_without_its_corpus_fails(registry: Registry, folder: DataFolder) -> None:
    registry.create_job(make_job())
    assert recover(registry, folder) == []
    job = registry.job("job-1")
    assert job.error is not None
    assert (job.state, job.error.code) == (JobState.FAILED, "corpus_missing")


def test_a_damaged_registry_is_refused(registry: Registry, folder: DataFolder) -> None:
    with closing(
        sqlite3.connect(folder.database, isolation_level=None)
    ) as other:  # which does not enforce foreign keys
        other.execute("INSERT INTO events VALUES ('nobody', 1, 'state', NULL, x'00')")
    with pytest.raises(StartupError, match="damaged"):
        recover(registry, folder)


@pytest.mark.parametrize(("table", "name"), [("jobs", "job-1"), ("adapters", "poet")])
def test_records_of_a_later_version_are_refused(registry: Registry, folder: DataFolder, table: str, name: str) -> None:
    registry.create_job(make_job())
    import_adapter(registry, make_adapter())
    with closing(sqlite3.connect(folder.database, isolation_level=None)) as other:
        ((content,),) = other.execute(f"SELECT record FROM {table} WHERE id = ?", (name,))
        later = msgspec.msgpack.encode(msgspec.msgpack.decode(content) | {"colour": 1})
        other.execute(f"UPDATE {table} SET record = ? WHERE id = ?", (later, name))
    with pytest.raises(StartupError, match=rf"later version.*{name}.*`colour`"):
        recover(registry, folder)


@pytest.mark.parametrize(
    "damage", [(b"default", b"\xff"), (b"\xa3bad", b"\xa3bed"), (b"", b"")], ids=["text", "id", "end"]
)
def test_a_damaged_job_is_left_out_alone(
    registry: Registry, folder: DataFolder, damage: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for version, id in enumerate(("good", "bad"), start=1):
        lay_job(folder, registry, id, version)
    write_file(folder.corpus("waits"), b"corpus", point="corpus")
    registry.create_job(msgspec.structs.replace(make_job("waits", version=3), after="bad"))
    with closing(sqlite3.connect(folder.database, isolation_level=None)) as other:
        (record,) = other.execute("SELECT record FROM jobs WHERE id = 'bad'").fetchone()
        damaged = record[:-1] if damage == (b"", b"") else record.replace(*damage)
        other.execute("UPDATE jobs SET record = ? WHERE id = 'bad'", (damaged,))
    assert damaged != record
    assert [job.spec.id for job in recover(registry, folder)] == ["good"]
    assert [(job.spec.id, job.state) for job in registry.jobs()] == [("waits", "failed"), ("good", "queued")]
    with pytest.raises(JobNotFound, match="the record of job 'bad' is damaged"):
        registry.job("bad")
    assert caplog.text.count("the record of job 'bad' is damaged: it is left out") == 1
    assert "bad" in folder.job_ids(), "a backup's record may still need the files"


def test_checkpoints_by_step(folder: DataFolder) -> None:
    for step in (100, 20, 123456789):
        with replace_dir(folder.checkpoint("job", step), point="checkpoint") as temp:
            (temp / "state").write_text("")
    (folder.job("job") / "checkpoint-x").mkdir()
    assert [step for step, _ in folder.checkpoints("job")] == [20, 100, 123456789]
    assert folder.checkpoints("nobody") == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b/c", "../a", "a/..", "a+b", "/etc", ".tmp-a", "a" * 65, "a\n"])
def test_names_that_are_no_names(folder: DataFolder, name: str) -> None:
    with pytest.raises(ForbiddenPath):
        folder.adapter(AdapterRef(name, 1))
    with pytest.raises(ForbiddenPath):
        folder.job(name)


def test_one_daemon_at_a_time(folder: DataFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from coserve.state.folder import DataFolder\n"
        "with DataFolder(Path(sys.argv[1])).lock(): print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        with pytest.raises(DataFolderInUse), folder.lock():
            pass
        child.kill()
    with folder.lock():
        pass


def test_a_folder_that_cannot_be_locked(folder: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system without locks."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartupError, match="No locks available"), folder.lock():
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError), DataFolder(tmp_path / "file" / "data").lock():
        pass


def test_without_its_registry_a_folder_with_adapters_is_refused_and_keeps_its_files(
    registry: Registry, folder: DataFolder
) -> None:
    import_adapter(registry, make_adapter("poet", 1))
    lay_adapter(folder, AdapterRef("poet", 1))
    registry.close()
    folder.database.unlink()
    before = files(folder)
    with closing(Registry(folder.database)) as new, pytest.raises(StartupError, match="put the registry back"):
        recover(new, folder)
    assert files(folder) == before


def test_a_registry_that_cannot_be_written_is_refused(
    registry: Registry, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.close()
    monkeypatch.setattr("coserve.state.registry.database.os.access", lambda path, mode: False)
    with pytest.raises(StartupError, match="read-only"):
        Registry(folder.database)
