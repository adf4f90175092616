"""The registry's adapters: immutable versions, and which number is next."""

from __future__ import annotations

import msgspec

from coserve.errors import AdapterExists, AdapterNotFound
from coserve.state.database import Database
from coserve.state.records import AdapterRecord
from coserve.types import AdapterRef

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AdapterRecord).decode


class AdapterTable(Database):
    """A version number is given out once: also one that a failed job or a deleted adapter had never comes back."""

    def add_adapter(self, record: AdapterRecord) -> None:
        """Register an import. Raises `AdapterExists` if the version was given out before."""
        with self._transaction():
            self._take_version(record.ref)
            self._insert_adapter(record)

    def _insert_adapter(self, record: AdapterRecord) -> None:
        self._db.execute("INSERT INTO adapters VALUES (?, ?, ?)", (record.ref.id, record.ref.version, _encode(record)))

    def _take_version(self, ref: AdapterRef) -> None:
        if ref.version < self.next_version(ref.id):
            raise AdapterExists(f"version {ref.version} of adapter {ref.id!r} is taken", field="adapter")
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET last = excluded.last",
            (ref.id, ref.version),
        )

    def next_version(self, id: str) -> int:
        """Above every version that was published, or promised to a job, under this name; 1 for a new name."""
        row = self._db.execute("SELECT last FROM versions WHERE id = ?", (id,)).fetchone()
        return 1 if row is None else int(row[0]) + 1

    def adapter(self, id: str, version: int | None = None) -> AdapterRecord:
        """One version, or the latest. Raises `AdapterNotFound`."""
        row = self._db.execute(
            "SELECT record FROM adapters WHERE id = ? AND (? IS NULL OR version = ?) ORDER BY version DESC LIMIT 1",
            (id, version, version),
        ).fetchone()
        if row is None:
            name = id if version is None else f"{id}@{version}"
            raise AdapterNotFound(f"no adapter {name!r}", field="adapter")
        return _decode(row[0])

    def adapters(self, *, after: str | None = None, limit: int = 100) -> list[AdapterRecord]:
        """The latest version of each, by name; from the one behind `after` on."""
        rows = self._db.execute(
            "SELECT record FROM adapters AS one WHERE id > ? "
            "AND version = (SELECT max(version) FROM adapters WHERE id = one.id) ORDER BY id LIMIT ?",
            (after or "", limit),
        )
        return [_decode(row[0]) for row in rows]

    def versions(self, id: str) -> list[AdapterRecord]:
        """Every version, ascending. Raises `AdapterNotFound`."""
        rows = self._db.execute("SELECT record FROM adapters WHERE id = ? ORDER BY version", (id,)).fetchall()
        if not rows:
            raise AdapterNotFound(f"no adapter {id!r}", field="adapter")
        return [_decode(row[0]) for row in rows]

    def adapter_refs(self) -> list[AdapterRef]:
        """Every version of every adapter."""
        return [AdapterRef(*row) for row in self._db.execute("SELECT id, version FROM adapters ORDER BY id, version")]

    def drop_version(self, ref: AdapterRef, reason: str) -> None:
        """Forget one version and keep a note that says why."""
        with self._transaction():
            self._db.execute("DELETE FROM adapters WHERE id = ? AND version = ?", (ref.id, ref.version))
            self._insert_note(f"adapter {ref} dropped: {reason}")
