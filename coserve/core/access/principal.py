"""The principal of a request: the project that it acts for. The gate sets the principal of each request, and the
registry and the file store show only what it may see, as row-level security does in a database: a route that forgets to
ask cannot leak.

A context variable carries it: tasks and threads that a request starts have the request's principal, and the daemon's
own work has `DAEMON`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DEFAULT_PROJECT: Final = "default"
"""Project of everything made without an API key of a project."""


class Scope(StrEnum):
    """A permission of an API key. `admin` includes the others, and all projects."""

    ADMIN = "admin"
    TRAIN = "train"
    GENERATE = "generate"


@dataclass(frozen=True)
class Principal:
    """A project, the scopes of its key, and the key's id (empty for the daemon's own key, or where none is needed)."""

    project: str
    scopes: frozenset[Scope]
    key: str = ""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def sees(self, project: str) -> bool:
        """Whether it may see and use what belongs to `project`."""
        return project == self.project or Scope.ADMIN in self.scopes

    @property
    def only(self) -> str | None:
        """The one project that it sees; None: all."""
        return None if Scope.ADMIN in self.scopes else self.project


DAEMON: Final = Principal(DEFAULT_PROJECT, frozenset({Scope.ADMIN}))
_current: ContextVar[Principal] = ContextVar("principal", default=DAEMON)


def principal() -> Principal:
    """Return the principal of the request that runs; `DAEMON` outside requests."""
    return _current.get()


def act_as(principal: Principal) -> None:
    """Set the principal of the running task and of all that it starts."""
    _current.set(principal)


def cache_salt(salt: str) -> str:
    """Return a prefix-cache salt that no other project can have: no page, and no timing, is shared between projects."""
    return f"{principal().project}\x1f{salt}"


def idempotency_key(key: str) -> str:
    """Return the key under which a job is stored: clients of two projects may choose the same one. Keys that clients
    send are printable, so the separator is in none."""
    project = principal().project
    return key if project == DEFAULT_PROJECT else f"{project}\x1f{key}"
