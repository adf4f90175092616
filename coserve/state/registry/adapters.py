"""The registry's adapters: immutable versions, the next version number, and the current version of each name."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coserve.core.access.principal import principal
from coserve.core.errors import AdapterNotFound, NameTaken
from coserve.core.hints import near_miss
from coserve.core.types import AdapterRef
from coserve.state.registry.database import Database
from coserve.state.registry.jobs import JobTable
from coserve.state.registry.records import AdapterRecord, AliasRecord, Labels

HALF_LIFE = 86_400.0
"""Seconds after which a use counts half."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AdapterRecord).decode
_alias = msgspec.msgpack.Decoder(AliasRecord).decode
_labels = msgspec.msgpack.Decoder(Labels).decode


class NameTable(Database):
    """Aliases, labels of names; pins and uses of versions."""

    # ---- aliases

    def find_alias(self, name: str) -> AliasRecord | None:
        """Return an alias that the principal sees."""
        row = self._db.execute("SELECT project, record FROM aliases WHERE name = ?", (name,)).fetchone()
        return None if row is None or not principal().sees(row[0]) else _alias(row[1])

    def alias(self, name: str) -> AliasRecord:
        """Return one alias. Raises `AdapterNotFound`."""
        if (found := self.find_alias(name)) is None:
            raise AdapterNotFound(f"no alias {name!r}", field="name")
        return found

    def aliases(self) -> list[AliasRecord]:
        """Every alias that the principal sees, by name."""
        rows = self._db.execute("SELECT project, record FROM aliases ORDER BY name").fetchall()
        return [_alias(row[1]) for row in rows if principal().sees(row[0])]

    def delete_alias(self, name: str) -> AliasRecord:
        """Delete an alias and return it. Raises `AdapterNotFound`."""
        with self._transaction():
            found = self.alias(name)
            self._db.execute("DELETE FROM aliases WHERE name = ?", (name,))
            self._log_on_commit("alias deleted", alias=name, adapter=str(found.target))
        return found

    def _is_alias(self, name: str) -> bool:
        """Whether it is an alias of any project."""
        return self._db.execute("SELECT 1 FROM aliases WHERE name = ?", (name,)).fetchone() is not None

    def _save_alias(self, record: AliasRecord) -> None:
        """Insert or replace an alias. Raises `NameTaken` if its name is an alias of a project that the principal does
        not see."""
        if self.find_alias(record.name) is None and self._is_alias(record.name):
            raise NameTaken(f"the name {record.name!r} is taken", field="name")
        self._db.execute(
            "INSERT INTO aliases VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET record = excluded.record",
            (record.name, principal().project, _encode(record)),
        )
        share = f" and {record.weight:g} of requests {record.canary}" if record.canary is not None else ""
        self._log_on_commit("alias set", alias=record.name, means=f"{record.target}{share}")

    def _alias_of(self, ref: AdapterRef) -> str | None:
        """Return an alias, of any project, whose requests may get this version."""
        records = (_alias(row[0]) for row in self._db.execute("SELECT record FROM aliases"))
        return next((record.name for record in records if ref in record.refs), None)

    # ---- labels

    def labels(self, id: str) -> Labels:
        row = self._db.execute("SELECT record FROM labels WHERE id = ?", (id,)).fetchone()
        return Labels() if row is None else _labels(row[0])

    def set_labels(self, id: str, labels: Labels) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?, ?)", (id, labels.expires_at, _encode(labels)))

    def next_expiry(self) -> tuple[str, float] | None:
        """Return the name that expires first, and when."""
        found = self._db.execute(
            "SELECT id, expires_at FROM labels WHERE expires_at IS NOT NULL ORDER BY expires_at LIMIT 1"
        ).fetchone()
        return None if found is None else (str(found[0]), float(found[1]))

    # ---- pins and uses

    def set_pinned(self, ref: AdapterRef, *, pinned: bool) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM pins WHERE id = ? AND version = ?", (ref.id, ref.version))
            if pinned:
                self._db.execute("INSERT INTO pins VALUES (?, ?)", (ref.id, ref.version))

    def pins(self) -> frozenset[AdapterRef]:
        return frozenset(AdapterRef(*row) for row in self._db.execute("SELECT id, version FROM pins"))

    def count_uses(self, uses: Mapping[AdapterRef, int]) -> None:
        """Add to the use counts of versions that still exist. `uses`: number of requests since the last call."""
        now = self._clock()
        with self._transaction():
            for ref, count in uses.items():
                key = (ref.id, ref.version)
                if not self._db.execute("SELECT 1 FROM adapters WHERE id = ? AND version = ?", key).fetchone():
                    continue
                row = self._db.execute("SELECT uses, used_at FROM uses WHERE id = ? AND version = ?", key).fetchone()
                before = 0.0 if row is None else _decayed(row[0], row[1], now)
                self._db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", (*key, before + count, now))

    def most_used(self, limit: int) -> list[AdapterRef]:
        """Return the versions with most uses; a use counts half after `HALF_LIFE` seconds."""
        rows, now = self._db.execute("SELECT id, version, uses, used_at FROM uses").fetchall(), self._clock()
        rows.sort(key=lambda row: -_decayed(row[2], row[3], now))
        return [AdapterRef(row[0], row[1]) for row in rows[:limit]]

    def _move_uses(self, ref: AdapterRef, version: int) -> None:
        """Give another version of the name the pin and the use count of this one."""
        key = (version, ref.id, ref.version)
        self._db.execute("UPDATE OR REPLACE pins SET version = ? WHERE id = ? AND version = ?", key)
        self._db.execute("UPDATE OR REPLACE uses SET version = ? WHERE id = ? AND version = ?", key)

    def _forget_version(self, ref: AdapterRef) -> None:
        """Delete the pin and the use count of a deleted version."""
        key = (ref.id, ref.version)
        self._db.execute("DELETE FROM pins WHERE id = ? AND version = ?", key)
        self._db.execute("DELETE FROM uses WHERE id = ? AND version = ?", key)

    def _forget_name(self, id: str) -> None:
        """Delete labels, pins and use counts of a name that has no version left."""
        self._db.execute("DELETE FROM labels WHERE id = ?", (id,))
        self._db.execute("DELETE FROM pins WHERE id = ?", (id,))
        self._db.execute("DELETE FROM uses WHERE id = ?", (id,))


def _decayed(uses: float, used_at: float, now: float) -> float:
    return float(uses * 0.5 ** (max(0.0, now - used_at) / HALF_LIFE))


MAX_SHOWN = 8
"""Most versions that an error message lists."""
MAX_COMPARED = 200
"""Most adapter names that are compared with a misspelt one: its neighbours in order. Takes some milliseconds, in which
no request finds its adapter."""


class AdapterTable(NameTable, JobTable):
    """The registry's adapters. A version number is never used twice, not even after a failed job or a deleted
    adapter."""

    def check(self) -> None:
        super().check()
        self._refuse_later("adapters", "SELECT id, record FROM adapters", _decode)

    def reserve_version(self, id: str) -> AdapterRef:
        """Claim the next version of a name, so that its files can be written before it is registered."""
        with self._transaction():
            ref = AdapterRef(id, self.next_version(id))
            self._claim_version(ref)
        return ref

    def add_adapter(self, record: AdapterRecord) -> None:
        """Register a version that `reserve_version` returned."""
        with self._transaction():
            self._insert_adapter(record)
            self._log_on_commit(
                "adapter imported", adapter=record.ref.id, version=record.ref.version, bytes=record.bytes
            )

    def _insert_adapter(self, record: AdapterRecord) -> None:
        """Insert the row; the newest version becomes the current one."""
        id, version = record.ref.id, record.ref.version
        self._db.execute("INSERT INTO adapters VALUES (?, ?, ?)", (id, version, _encode(record)))
        self._db.execute(
            "DELETE FROM current WHERE id = ? AND ? = (SELECT max(version) FROM adapters WHERE id = ?)",
            (id, version, id),
        )

    def _claim_version(self, ref: AdapterRef) -> None:
        """Record that the version is taken; a new name is the project's from now on. Raises `NameTaken`."""
        assert ref.version >= self.next_version(ref.id), f"{ref} was used before"
        self.check_name(ref.id)
        if self._is_alias(ref.id):
            raise NameTaken(f"the name {ref.id!r} is taken by an alias", field="adapter")
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET last = excluded.last",
            (ref.id, ref.version, principal().project),
        )

    def owner(self, id: str) -> str:
        """The project that owns an adapter's name; the principal's own for a new name."""
        row = self._db.execute("SELECT project FROM versions WHERE id = ?", (id,)).fetchone()
        return principal().project if row is None else str(row[0])

    def _sees(self, id: str) -> bool:
        return principal().only is None or principal().sees(self.owner(id))

    def check_name(self, id: str) -> None:
        """Raise `NameTaken` if the name belongs to a project that the principal does not see."""
        if not self._sees(id):
            raise NameTaken(f"the name {id!r} is taken", field="adapter")

    def adapter_bytes(self, project: str) -> int:
        """Bytes of all versions of all adapters of a project."""
        rows = self._db.execute(
            "SELECT record FROM adapters WHERE (SELECT project FROM versions WHERE id = adapters.id) = ?", (project,)
        )
        return sum(_decode(row[0]).bytes for row in rows)

    def has_claimed_versions(self) -> bool:
        """Return whether any version number was ever reserved; it is reserved before the version's files are
        written."""
        return self._db.execute("SELECT 1 FROM versions LIMIT 1").fetchone() is not None

    def next_version(self, id: str) -> int:
        """One more than the highest version of this name, unpublished ones included; 1 for a new name."""
        row = self._db.execute("SELECT last FROM versions WHERE id = ?", (id,)).fetchone()
        return 1 if row is None else int(row[0]) + 1

    def adapter(self, id: str, version: int | None = None) -> AdapterRecord:
        """One version, or the current one. Raises `AdapterNotFound`."""
        row = self._db.execute(
            "SELECT record FROM adapters WHERE id = :id "
            "AND version = coalesce(:version, (SELECT version FROM current_versions WHERE id = :id))",
            {"id": id, "version": version},
        ).fetchone()
        if row is None or not self._sees(id):
            raise self._not_found(id, version)
        return _decode(row[0])

    def find_version(self, ref: AdapterRef) -> AdapterRecord | None:
        row = self._db.execute(
            "SELECT record FROM adapters WHERE id = ? AND version = ?", (ref.id, ref.version)
        ).fetchone()
        return None if row is None else _decode(row[0])

    def resolve(self, name: str, version: int | None, key: str) -> AdapterRecord:
        """The version that a request means: of an adapter or, by the hash of the request's `key`, of an alias. Raises
        `AdapterNotFound`."""
        if version is None and (alias := self.find_alias(name)) is not None:
            ref = alias.chosen(key)
            return self.adapter(ref.id, ref.version)
        return self.adapter(name, version)

    def set_alias(self, record: AliasRecord) -> AliasRecord:
        """Create or replace an alias. Raises `AdapterNotFound` for a version that is missing, `NameTaken` for a name
        that an adapter has or had."""
        with self._transaction():
            for ref in record.refs:
                self.adapter(ref.id, ref.version)
            if self.next_version(record.name) > 1:
                raise NameTaken(f"the name {record.name!r} is, or was, an adapter's", field="name")
            self._save_alias(record)
        return record

    def _not_found(self, id: str, version: int | None) -> AdapterNotFound:
        """Return the error for a missing adapter: it names the job that will publish it, the adapter's versions, or a
        similar name."""
        newest = "SELECT version FROM adapters WHERE id = ? ORDER BY version DESC LIMIT ?"
        versions = [str(found) for (found,) in self._db.execute(newest, (id, MAX_SHOWN + 1)) if self._sees(id)]
        name = id if version is None else f"{id}@{version}"
        if (alias := self.find_alias(id)) is not None:
            means = f"{id!r} is an alias, which means {alias.target}"
            return AdapterNotFound(f"no adapter {name!r}: {means}", field="adapter")
        unfinished = [job for job in self.unfinished() if self._sees(job.spec.adapter)]
        for job in unfinished:
            if job.spec.adapter == id and version in (None, job.spec.version):
                progress = f"{job.spec.id} is {job.state}, step {job.step} of {job.total_steps}"
                return AdapterNotFound(f"no adapter {name!r} yet: it is still training ({progress})", field="adapter")
        if versions:
            shown = ", ".join(versions[:MAX_SHOWN]) + (", ..." if len(versions) > MAX_SHOWN else "")
            return AdapterNotFound(f"no adapter {name!r}; versions of {id!r}: {shown}", field="adapter")
        like = (
            "SELECT * FROM (SELECT DISTINCT id FROM adapters WHERE id >= :id AND (:only IS NULL "
            "OR :only = (SELECT project FROM versions WHERE id = adapters.id)) ORDER BY id LIMIT :most) "
            "UNION SELECT * FROM (SELECT DISTINCT id FROM adapters WHERE id < :id AND (:only IS NULL "
            "OR :only = (SELECT project FROM versions WHERE id = adapters.id)) ORDER BY id DESC LIMIT :most)"
        )
        given = {"only": principal().only, "id": id, "most": MAX_COMPARED // 2}
        names = [found for (found,) in self._db.execute(like, given)]
        names += [job.spec.adapter for job in unfinished if job.spec.adapter != id]
        names += [alias.name for alias in self.aliases()]
        return AdapterNotFound(f"no adapter {name!r}{near_miss(id, names)}", field="adapter")

    def current_version(self, id: str) -> int | None:
        """The version that a name without a version refers to; None for an unknown name."""
        row = self._db.execute("SELECT version FROM current_versions WHERE id = ?", (id,)).fetchone()
        return None if row is None or not self._sees(id) else int(row[0])

    def newest_version(self, id: str) -> int | None:
        """The newest version of an adapter; None if it has none."""
        row: tuple[int | None] = self._db.execute("SELECT max(version) FROM adapters WHERE id = ?", (id,)).fetchone()
        return row[0]

    def adapters(self, *, after: str | None = None, limit: int = 100, search: str = "") -> list[AdapterRecord]:
        """The current version of each adapter whose name contains `search`, in any case; by name, after `after`."""
        only = principal().only
        rows = self._db.execute(
            "SELECT record FROM adapters WHERE id > ? AND instr(lower(id), lower(?)) "
            "AND version = coalesce((SELECT version FROM current WHERE id = adapters.id), "
            "(SELECT max(version) FROM adapters AS own WHERE own.id = adapters.id)) "  # the view is slower
            "AND (? IS NULL OR (SELECT project FROM versions WHERE id = adapters.id) = ?) ORDER BY id LIMIT ?",
            (after or "", search, only, only, limit),
        )
        return [_decode(row[0]) for row in rows]

    def versions(self, id: str) -> list[AdapterRecord]:
        """Every version, ascending. Raises `AdapterNotFound`."""
        rows = self._db.execute("SELECT record FROM adapters WHERE id = ? ORDER BY version", (id,)).fetchall()
        if not rows or not self._sees(id):
            raise self._not_found(id, None)
        return [_decode(row[0]) for row in rows]

    def adapter_refs(self) -> list[AdapterRef]:
        return [AdapterRef(*row) for row in self._db.execute("SELECT id, version FROM adapters ORDER BY id, version")]

    def roll_back(self, ref: AdapterRef) -> AdapterRecord:
        """Make this version the current one, until a newer one is published. Raises `AdapterNotFound`."""
        with self._transaction():
            record = self.adapter(ref.id, ref.version)
            self._set_current(ref)
            self._log_on_commit("adapter rolled back", adapter=ref.id, version=ref.version)
        return record

    def _set_current(self, ref: AdapterRef) -> None:
        self._db.execute(
            "INSERT INTO current VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET version = excluded.version",
            (ref.id, ref.version),
        )

    def drop_version(self, ref: AdapterRef, reason: str) -> None:
        """Delete one version's row and store a note with the reason."""
        with self._transaction():
            self._remove_version(ref)
            self._insert_note(f"adapter {ref} dropped: {reason}")

    def _remove_version(self, ref: AdapterRef) -> None:
        """Delete one version's row. If it was current, the next older version becomes current, or the newest if none is
        older."""
        was_current = self.current_version(ref.id) == ref.version
        self._forget_version(ref)
        self._db.execute("DELETE FROM adapters WHERE id = ? AND version = ?", (ref.id, ref.version))
        if not was_current:
            return
        self._db.execute("DELETE FROM current WHERE id = ?", (ref.id,))
        if self.current_version(ref.id) is None:
            self._forget_name(ref.id)
        (older,) = self._db.execute(
            "SELECT max(version) FROM adapters WHERE id = ? AND version < ?", (ref.id, ref.version)
        ).fetchone()
        if older is not None:
            self._set_current(AdapterRef(ref.id, older))
