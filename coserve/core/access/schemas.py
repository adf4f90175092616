"""Schemas of API keys, quotas and what an administrator changes while the daemon runs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from coserve.core.access.principal import DEFAULT_PROJECT, Scope
from coserve.core.limits import MAX_LIFE
from coserve.core.names import Name
from coserve.core.types import Wire

Seconds = Annotated[float, Meta(ge=1, le=MAX_LIFE)]
Limit = Annotated[int, Meta(ge=1, le=1 << 53)]


class CreateKey(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /admin/keys`."""

    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=3)]
    """`generate`: texts; `train`: jobs, files and adapters; `admin`: everything, of all projects."""
    project: Name = DEFAULT_PROJECT
    """Without the scope admin, a key sees and uses its project's files, jobs and adapters only."""
    name: Annotated[str, Meta(max_length=80)] = ""
    """A name for people: the purpose of the key."""
    expires_in: Seconds | None = None
    """Seconds until the key expires; null: never."""


class ApiKey(Wire, frozen=True):
    """An API key, without its secret."""

    id: str
    project: str
    scopes: list[Scope]
    name: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class NewKey(Wire, frozen=True):
    """The response of `POST /admin/keys`: the only one that has the secret."""

    key: ApiKey
    secret: str
    """Sent by clients as `Authorization: Bearer <secret>`. The daemon keeps its hash only."""


class KeyList(Wire, frozen=True):
    data: list[ApiKey]


class Quota(Wire, frozen=True, omit_defaults=True):
    """Limits of one project; null: none. Body of `PUT /admin/quotas/{id}`, which replaces all of them."""

    requests_per_minute: Limit | None = None
    """POST requests, except those to `/admin`. Each request of a batch counts too, and waits instead of being
    refused."""
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and of generated texts, counted as they are computed. New requests are refused while the
    allowance is used up."""
    jobs: Limit | None = None
    """Jobs that wait, run or are paused."""
    bytes: Limit | None = None
    """Bytes of files and adapters. A request that stores something is refused if its body would not fit; what a job
    publishes is never refused."""


class QuotaUse(Wire, frozen=True):
    """How much of its quota a project uses, rates aside."""

    jobs: int
    """Jobs that wait, run or are paused."""
    bytes: int
    """Bytes of files and adapters."""


class QuotaList(Wire, frozen=True):
    data: dict[str, Quota]
    """Quotas by project."""
    used: dict[str, QuotaUse]
    """The use of these projects' quotas."""


class LogLevel(Wire, frozen=True):
    """Body and response of `PUT /admin/log-level`."""

    level: Literal["debug", "info", "warning", "error"]
