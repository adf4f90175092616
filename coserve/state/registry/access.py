"""The registry's API keys and quotas of projects."""

from __future__ import annotations

import msgspec

from coserve.core.access.principal import Scope
from coserve.core.access.schemas import Quota
from coserve.core.errors import InvalidRequest, JobNotFound, NotFound
from coserve.core.types import Wire
from coserve.state.registry.database import Database


class KeyRecord(Wire, frozen=True):
    """An API key. Only a plain hash of its secret is stored: the secret has 256 random bits, which cannot be guessed.
    A slow hash would help only passwords, and cost time in each request."""

    id: str
    project: str
    scopes: tuple[Scope, ...]
    sha256: bytes
    """SHA-256 of the secret."""
    created_at: float
    name: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None

    def valid(self, now: float) -> bool:
        """Whether the key is neither revoked nor expired at `now`."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)


_encode = msgspec.msgpack.Encoder().encode
_key = msgspec.msgpack.Decoder(KeyRecord).decode
_quota = msgspec.msgpack.Decoder(Quota).decode


class AccessTable(Database):
    """API keys, revoked ones included, and quotas."""

    def api_keys(self) -> list[KeyRecord]:
        """All keys, oldest first."""
        found = [_key(row[0]) for row in self._db.execute("SELECT record FROM api_keys")]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    def add_key(self, record: KeyRecord) -> None:
        """Store a new key."""
        with self._transaction():
            self._db.execute("INSERT INTO api_keys VALUES (?, ?)", (record.id, _encode(record)))
            scopes = ",".join(record.scopes)
            self._log_on_commit("API key created", key=record.id, project=record.project, scopes=scopes)

    def revoke_key(self, id: str, *, last_admin: bool) -> KeyRecord:
        """Revoke a key, once; the first revocation's time stays. Raises `NotFound`, and unless `last_admin`
        `InvalidRequest` for the last valid key with the scope admin: nobody could make another one."""
        with self._transaction():
            row = self._db.execute("SELECT record FROM api_keys WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise NotFound(f"no API key {id[:80]!r}", field="id")
            record = _key(row[0])
            if record.revoked_at is None:
                now = self._clock()
                admins = {key.id for key in self.api_keys() if Scope.ADMIN in key.scopes and key.valid(now)}
                if admins == {id} and not last_admin:
                    why = "expected another key with the scope admin to be there first: this is the last one"
                    raise InvalidRequest(why, field="id")
                record = msgspec.structs.replace(record, revoked_at=now)
                self._db.execute("UPDATE api_keys SET record = ? WHERE id = ?", (_encode(record), id))
                self._log_on_commit("API key revoked", key=id, project=record.project)
        return record

    def project_of_job(self, id: str) -> str:
        """The project that a job belongs to. Raises `JobNotFound`."""
        row = self._db.execute("SELECT project FROM jobs WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise JobNotFound(f"no job {id!r}", field="id")
        return str(row[0])

    def quotas(self) -> dict[str, Quota]:
        return {row[0]: _quota(row[1]) for row in self._db.execute("SELECT project, record FROM quotas")}

    def quota(self, project: str) -> Quota:
        """A project's quota; one without limits if none was set."""
        row = self._db.execute("SELECT record FROM quotas WHERE project = ?", (project,)).fetchone()
        return Quota() if row is None else _quota(row[0])

    def set_quota(self, project: str, quota: Quota) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", (project, _encode(quota)))
            self._log_on_commit("quota set", project=project, **msgspec.structs.asdict(quota))
