"""A registry of an earlier schema is brought to today's and copied before that; what a backup copies of jobs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from coserve.core.schemas.documents import DocumentJob, DocumentSettings
from coserve.core.types import AdapterRef
from coserve.state.backup import back_up
from coserve.state.folder import DataFolder
from coserve.state.registry.database import SCHEMA_VERSION
from coserve.state.registry.registry import Registry
from tests.support.records import import_adapter, make_adapter, make_job

FIRST = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE jobs (
    position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    idempotency_key TEXT UNIQUE, record BLOB NOT NULL
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id), seq INTEGER NOT NULL, type TEXT NOT NULL, step INTEGER,
    record BLOB NOT NULL, PRIMARY KEY (job, seq)
) STRICT, WITHOUT ROWID;
CREATE TABLE adapters (
    id TEXT NOT NULL, version INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (id, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE versions (id TEXT PRIMARY KEY, last INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE notes (position INTEGER PRIMARY KEY AUTOINCREMENT, created_at REAL NOT NULL, message TEXT NOT NULL) STRICT;
"""
SECOND = """
CREATE TABLE current (id TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE VIEW current_versions (id, version) AS SELECT id, coalesce(
    (SELECT version FROM current WHERE current.id = adapters.id), max(version)
) FROM adapters GROUP BY id;
"""
PROJECT = "project TEXT NOT NULL DEFAULT 'default'"
THIRD = f"""
ALTER TABLE jobs ADD COLUMN {PROJECT};
ALTER TABLE versions ADD COLUMN {PROJECT};
CREATE TABLE api_keys (id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE quotas (project TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""
SCHEMAS = {1: FIRST, 2: FIRST + SECOND, 3: FIRST + SECOND + THIRD}
"""Schemas as they were released."""


def columns(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Name, type and constraints of the columns of each table and view."""
    with closing(sqlite3.connect(path)) as db:
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        return {name: [row[1:] for row in db.execute(f"PRAGMA table_info({name})")] for name in names}


@pytest.mark.parametrize("version", SCHEMAS)
def test_a_registry_of_an_earlier_schema(version: int, tmp_path: Path) -> None:
    path, today = tmp_path / "registry.sqlite3", tmp_path / "today.sqlite3"
    with closing(Registry(today)) as registry:
        import_adapter(registry, make_adapter("poet", 2))
        registry.create_job(make_job(version=3), idempotency_key="k")
    with closing(sqlite3.connect(path)) as old:
        old.executescript(SCHEMAS[version])
        old.execute("INSERT INTO meta VALUES ('schema', ?)", (version,))
        old.execute("ATTACH ? AS today", (str(today),))
        for table, of in columns(path).items():
            if table not in ("meta", "current_versions", "sqlite_sequence"):
                names = ", ".join(str(column[0]) for column in of)
                old.execute(f"INSERT INTO main.{table} SELECT {names} FROM today.{table}")
        old.commit()
    with closing(Registry(path)) as registry:
        registry.check()
        assert [job.spec.id for job in registry.jobs()] == ["job-1"]
        assert registry.job_with_key("k") is not None
        assert registry.adapter("poet").ref == AdapterRef("poet", 2)
        assert registry.next_version("poet") == 4
        assert (registry.owner("poet"), registry.api_keys(), registry.quotas()) == ("default", [], {})
        assert (registry.aliases(), registry.pins(), registry.next_expiry()) == ([], frozenset(), None)
    assert columns(path) == columns(today)
    before = tmp_path / f"registry.sqlite3.schema-{version}"
    with closing(sqlite3.connect(before)) as copy:
        assert copy.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone() == (version,)
        assert copy.execute("SELECT id FROM jobs").fetchall() == [("job-1",)]
    Registry(path).close()  # no second copy of what is today's
    assert not (tmp_path / f"registry.sqlite3.schema-{SCHEMA_VERSION}").exists()


def test_a_document_that_is_not_a_corpus_yet_is_copied(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    for made in (folder.adapters, folder.files, folder.jobs):
        made.mkdir(parents=True)
    job = msgspec.structs.replace(make_job(), document=DocumentJob(settings=DocumentSettings()))
    with closing(Registry(folder.database)) as registry:
        registry.create_job(job)
    folder.job(job.spec.id).mkdir()
    folder.document(job.spec.id).write_bytes(b"chunks")
    (folder.job(job.spec.id) / "questions.jsonl").write_bytes(b"{}\n")
    assert back_up(folder.root, tmp_path / "copy").jobs == 1
    copied = tmp_path / "copy" / folder.job(job.spec.id).relative_to(folder.root)
    assert {path.name for path in copied.iterdir()} == {folder.document(job.spec.id).name, "questions.jsonl"}
