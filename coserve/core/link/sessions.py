"""Messages about clients' training sessions."""

from __future__ import annotations

from coserve.core.link.message import Message
from coserve.core.training.calls import Call, SessionSpec


class OpenSession(Message, frozen=True, kw_only=True):
    """Queue a client's training session, as a job. Answers: `JobStarted` once it is in memory, `JobWaiting` while it
    waits for memory; its end is `JobFailed` or, after `CancelJob`, `JobCancelled`."""

    spec: SessionSpec


class CallSession(Message, frozen=True, kw_only=True):
    """A call of a session, behind the earlier ones. The answer is `CallDone` or `CallFailed` with its number."""

    id: str
    number: int
    call: Call


class CallDone(Message, frozen=True, kw_only=True):
    """A call of a session was executed. `values`, `metrics`: see `core.training.calls`."""

    id: str
    number: int
    values: bytes = b""
    metrics: dict[str, float] = {}


class CallFailed(Message, frozen=True, kw_only=True):
    """A call of a session failed; the session goes on."""

    id: str
    number: int
    code: str
    message: str
