"""The registry's SQLite file: schema, transactions, and errors of the disk.

Write-ahead log with `synchronous=FULL`: a commit survives kill -9 and a power cut. One connection, used by the thread
that made it. A transaction that fails changes nothing; it raises `StorageFull` for a full disk and `StorageBusy` for
another process's lock.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from coserve.core.errors import StartupError, StorageBusy, StorageFailed, StorageFull
from coserve.core.logs import Value, log_event
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 4
NAMES: Final = """
CREATE TABLE aliases (name TEXT PRIMARY KEY, project TEXT NOT NULL, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE labels (id TEXT PRIMARY KEY, expires_at REAL, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE pins (id TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (id, version)) STRICT, WITHOUT ROWID;
CREATE TABLE uses (
    id TEXT NOT NULL, version INTEGER NOT NULL, uses REAL NOT NULL, used_at REAL NOT NULL, PRIMARY KEY (id, version)
) STRICT, WITHOUT ROWID;
"""
"""Tables of aliases, labels of names, and pins and uses of versions: see `NameTable`."""
SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE jobs (
    position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    idempotency_key TEXT UNIQUE, record BLOB NOT NULL, project TEXT NOT NULL DEFAULT 'default'
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id), seq INTEGER NOT NULL, type TEXT NOT NULL, step INTEGER,
    record BLOB NOT NULL, PRIMARY KEY (job, seq)
) STRICT, WITHOUT ROWID;
CREATE TABLE adapters (
    id TEXT NOT NULL, version INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (id, version)
) STRICT, WITHOUT ROWID;
-- The highest version ever given out, also to jobs that failed: a version means one thing for ever. And the project
-- that owns the name, also for ever.
CREATE TABLE versions (
    id TEXT PRIMARY KEY, last INTEGER NOT NULL, project TEXT NOT NULL DEFAULT 'default'
) STRICT, WITHOUT ROWID;
-- Names that were rolled back: any other name means its newest version.
CREATE TABLE current (id TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE VIEW current_versions (id, version) AS SELECT id, coalesce(
    (SELECT version FROM current WHERE current.id = adapters.id), max(version)
) FROM adapters GROUP BY id;
CREATE TABLE notes (position INTEGER PRIMARY KEY AUTOINCREMENT, created_at REAL NOT NULL, message TEXT NOT NULL) STRICT;
CREATE TABLE api_keys (id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE quotas (project TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""


LOCK_TIMEOUT: Final = 0.1
"""Seconds that SQLite waits for another process's lock. `RegistryThread` retries for longer, and runs other calls
between attempts."""

_BUSY: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,  # no file descriptor was free for its log or a temporary file
    }
)
UPGRADES: Final = {
    1: tuple(statement for statement in SCHEMA.split(";") if "current" in statement),
    2: (
        "ALTER TABLE jobs ADD COLUMN project TEXT NOT NULL DEFAULT 'default'",
        "ALTER TABLE versions ADD COLUMN project TEXT NOT NULL DEFAULT 'default'",
        *(statement for statement in SCHEMA.split(";") if "api_keys" in statement or "quotas" in statement),
    ),
    3: tuple(NAMES.split(";")),
}
"""Statements that upgrade each older schema to the next one, in one transaction each. Forward only: the copy that
`_prepare` makes first is the way back. A migration tool would need a second description of these twelve tables."""


@contextmanager
def database_errors() -> Iterator[None]:
    """Raise SQLite's errors about the disk, a damaged file or a lock as `StorageFull`, `StorageFailed` or
    `StorageBusy`."""
    with disk_errors():
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # absent if Python itself raises it
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise StorageFailed(f"the registry is damaged: {error}") from error
            if code == sqlite3.SQLITE_FULL:
                raise StorageFull("the disk is full") from error
            if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
                raise StorageFailed("the disk refused a write of the registry") from error
            if code in _BUSY:
                raise StorageBusy(f"the registry cannot be used now: {error}") from error
            raise


class Database:
    """The registry's connection and its transactions. `clock` returns seconds since the epoch."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file. Raises `StartupError` if it is not a registry of this version or cannot be written,
        `StorageBusy` if another process has locked it."""
        if path.exists() and not os.access(path, os.W_OK):
            raise StartupError(f"cannot write the registry {path}: it is read-only")
        self._clock = clock
        self._log_lines: list[tuple[str, dict[str, Value]]] = []
        self._damaged: set[str] = set()
        """Jobs whose damaged records were logged."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=LOCK_TIMEOUT)
        except sqlite3.DatabaseError as error:
            raise StartupError(f"cannot open the registry {path.name}: {error}") from error
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare(path)
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.DatabaseError):
                if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise StorageBusy("the registry is locked by another process") from error
                raise StartupError(f"cannot open the registry {path.name}: {error}") from error
            raise

    def _prepare(self, path: Path) -> None:
        found = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'meta'").fetchone()
        if found is None:
            with self._transaction():
                for statement in (SCHEMA + NAMES).split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES ('schema', ?)", (SCHEMA_VERSION,))
        (version,) = self._db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
        if version in UPGRADES:
            self.copy_to(path.with_name(f"{path.name}.schema-{version}"))
        while version in UPGRADES:
            with self._transaction():
                for statement in UPGRADES[version]:
                    self._db.execute(statement)
                version += 1
                self._db.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (version,))
        if version != SCHEMA_VERSION:
            raise StartupError(f"the registry has schema {version}; this coserve reads {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with database_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                failpoint("registry.before_commit")
                self._db.execute("COMMIT")
            except BaseException:
                self._log_lines.clear()
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        failpoint("registry.after_commit")
        lines, self._log_lines = self._log_lines, []
        for message, fields in lines:
            log_event(log, message, **fields)

    def _log_on_commit(self, message: str, **fields: Value) -> None:
        """Write a log line once the transaction is committed."""
        self._log_lines.append((message, fields))

    def refuse_changes(self) -> None:
        """Make every later change raise `StorageFailed`, as on a read-only disk."""
        self._db.execute("PRAGMA query_only = ON")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads inside the block see the same state of the database."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    def copy_to(self, path: Path) -> None:
        """Write a consistent copy of the database to a new file, also while others write to the database."""
        with database_errors(), closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Raise `StartupError` if the file is damaged, or a later version of coserve wrote a job or an adapter."""
        problems = [row[0] for row in self._db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        problems += [f"row without its {row[2]}" for row in self._db.execute("PRAGMA foreign_key_check")]
        if problems:
            raise StartupError(f"the registry is damaged: {problems[0]}")

    def _refuse_later(self, what: str, records: str, decode: Callable[[bytes], object]) -> None:
        """Raise `StartupError` if a later version of coserve wrote one of the `records`, a statement: it has unknown
        fields. So may a damaged one, since records have no version; a start would drop what a later version wrote."""
        for id, record in self._db.execute(records):
            try:
                decode(record)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a damaged record is left out by its readers
                if "unknown field" in str(error):
                    raise StartupError(
                        "a later version of coserve wrote the registry (start that), or it is damaged (put a backup "
                        f"back): {what}, {id}: {error}"
                    ) from error

    # ---- notes

    def note(self, message: str) -> None:
        """Store a note for the operator."""
        with self._transaction():
            self._insert_note(message)

    def _insert_note(self, message: str) -> None:
        self._db.execute("INSERT INTO notes (created_at, message) VALUES (?, ?)", (self._clock(), message))

    def notes(self) -> list[str]:
        """Notes for the operator, oldest first."""
        return [row[0] for row in self._db.execute("SELECT message FROM notes ORDER BY position")]
