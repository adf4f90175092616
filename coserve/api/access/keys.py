"""API keys, as the gate checks them: in memory, so that a request costs no read and a revocation counts at once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable

import msgspec

from coserve.core.access.principal import DAEMON, Principal, Scope
from coserve.core.access.schemas import ApiKey, CreateKey
from coserve.core.errors import InvalidRequest, Unauthorized
from coserve.state.registry.access import KeyRecord

PREFIX = "csk"
"""First part of every secret, by which scanners of leaked secrets find it: `csk-<id>-<random>`."""


class KeyRing:
    """All keys of the registry, and the daemon's own (`--api-key`), which is an administrator's. A key is needed as
    soon as there is one of either kind, and still when all are revoked. `clock` returns seconds since the epoch."""

    def __init__(self, own: str | None, clock: Callable[[], float] = time.time) -> None:
        self._own = None if own is None else own.encode()
        self._clock = clock
        self._records: dict[str, KeyRecord] = {}

    @property
    def has_own(self) -> bool:
        return self._own is not None

    def load(self, records: Iterable[KeyRecord]) -> None:
        """Add these keys, or replace those with the same id."""
        self._records |= {record.id: record for record in records}

    def principal_of(self, authorization: str) -> Principal:
        """Return the principal of a request with this `Authorization` header. Raises `Unauthorized`."""
        if self._own is None and not self._records:
            return DAEMON
        scheme, _, given = authorization.partition(" ")
        secret = given.encode(errors="replace")
        if scheme.lower() == "bearer":
            if self._own is not None and hmac.compare_digest(secret, self._own):
                return DAEMON
            _, _, rest = given.partition("-")
            record = self._records.get(rest.partition("-")[0])
            if record is not None and hmac.compare_digest(hashlib.sha256(secret).digest(), record.sha256):
                return self._valid(record)
        raise Unauthorized("expected 'Authorization: Bearer KEY' with a key of the daemon", field="Authorization")

    def _valid(self, record: KeyRecord) -> Principal:
        if record.revoked_at is not None:
            raise Unauthorized("the API key is revoked", field="Authorization")
        if not record.valid(self._clock()):
            raise Unauthorized("the API key has expired", field="Authorization")
        return Principal(record.project, frozenset(record.scopes), record.id)

    def make(self, request: CreateKey) -> tuple[KeyRecord, str]:
        """Return a new key and its secret. Raises `InvalidRequest` for a first key without the scope admin: nobody
        could create another one."""
        if self._own is None and not self._records and Scope.ADMIN not in request.scopes:
            why = "expected a first key with the scope admin, since every request needs a key from now on"
            raise InvalidRequest(why, field="scopes")
        id, now = secrets.token_hex(6), self._clock()
        secret = f"{PREFIX}-{id}-{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            id=id,
            project=request.project,
            scopes=tuple(sorted(set(request.scopes))),
            sha256=hashlib.sha256(secret.encode()).digest(),
            created_at=now,
            name=request.name,
            expires_at=None if request.expires_in is None else now + request.expires_in,
        )
        return record, secret

    def views(self) -> list[ApiKey]:
        """All keys, oldest first, without secrets."""
        return [key_view(record) for record in self._records.values()]


def key_view(record: KeyRecord) -> ApiKey:
    return msgspec.convert(record, ApiKey, from_attributes=True)
