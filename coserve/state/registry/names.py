"""The registry's aliases, and the labels, pins and uses of adapters."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from coserve.core.access.principal import principal
from coserve.core.errors import AdapterNotFound, NameTaken
from coserve.core.types import AdapterRef
from coserve.state.registry.database import Database
from coserve.state.registry.records import AliasRecord, Labels

HALF_LIFE = 86_400.0
"""Seconds after which a use counts half."""

_encode = msgspec.msgpack.Encoder().encode
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
        """Add to the use counts of versions. `uses`: number of requests since the last call."""
        now = self._clock()
        with self._transaction():
            for ref, count in uses.items():
                key = (ref.id, ref.version)
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
