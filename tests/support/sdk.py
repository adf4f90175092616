"""A daemon of canned answers for tests of the SDK."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from coserve.client import AsyncClient, MockTransport, Request, Response, RetryPolicy
from coserve.client.caller import Caller
from coserve.core.errors import CoserveError
from coserve.core.schemas.generation import Choice, GenerateChunk, GenerateResponse, Timing, Usage
from coserve.core.schemas.jobs import Job, JobEvent
from coserve.core.schemas.service import STREAM_END
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from tests.support.records import make_metrics

USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
TIMING = Timing(queue=0.0, ttft=0.1, e2e=0.2)
GENERATED = GenerateResponse(
    id="gen-1",
    adapter=None,
    version=None,
    seed=7,
    choices=[Choice(index=0, text="hi", token_ids=[1, 2], finish_reason="stop")],
    usage=USAGE,
    timing=TIMING,
)


def reply(body: msgspec.Struct, status: int = 200, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, named, msgspec.json.encode(body))


def refusal(
    status: int, code: str, message: str = "no", *, headers: dict[str, str] | None = None, **more: object
) -> Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message, **more}})
    return Response(status, headers, body)


def chunk(text: str, *, last: bool = False) -> GenerateChunk:
    return GenerateChunk(
        id="gen-1",
        adapter="a",
        version=1,
        seed=7,
        index=0,
        text=text,
        token_ids=[1],
        finish_reason="stop" if last else None,
        usage=USAGE if last else None,
        timing=TIMING if last else None,
    )


def sse(*events: msgspec.Struct | str, ids: Iterable[int] = ()) -> list[bytes]:
    """One piece per event; a text goes as it is."""
    numbers = iter(ids)
    pieces = []
    for event in events:
        data = event.encode() if isinstance(event, str) else msgspec.json.encode(event)
        number = next(numbers, None)
        pieces.append((b"" if number is None else b"id: %d\n" % number) + b"data: " + data + b"\n\n")
    return pieces


def stream_of(*events: msgspec.Struct | str, end: bool = True) -> Response:
    return Response(200, {}, streamed(sse(*events, *([STREAM_END] if end else []))))


def job(state: JobState = JobState.QUEUED, id: str = "job-1", **fields: object) -> Job:
    return Job(
        **{  # type: ignore[arg-type]
            "id": id,
            "adapter": "a",
            "version": 1,
            "state": state,
            "created_at": 1.0,
            "started_at": None,
            "finished_at": None,
            "queue_position": None,
            "step": 0,
            "total_steps": 2,
            "progress": 0.0,
            "eta": None,
            "loss": None,
            "metrics": None,
            "trained_tokens": 0,
            "rows": 1,
            "tokens": 1,
            "target_tokens": 1,
            "continue_from": None,
            "lora": LoraSettings(),
            "training": TrainingSettings(),
            "metadata": {},
            "error": None,
            "result": None,
            **fields,
        }
    )


def job_event(seq: int, state: JobState | None = None, *, step: int | None = None) -> JobEvent:
    return JobEvent(
        seq=seq,
        job="job-1",
        created_at=1.0,
        level="info",
        type="state" if state else "metrics",
        message="",
        state=state,
        metrics=None if step is None else make_metrics(step, 2, 1.5, tokens=100, target_tokens=10, seconds=0.5),
    )


class Daemon:
    """Answers requests by its list, in order; an error in the list is raised. `naps` are the SDK's waits."""

    def __init__(
        self, *answers: Response | CoserveError | Callable[[Request], Response], retry: RetryPolicy | None = None
    ) -> None:
        self._answers = list(answers)
        self.naps: list[float] = []
        self.transport = MockTransport(self._answer)
        settings = {"api_key": "key", "sleep": self._nap, "rng": random.Random(0)}
        self.client = AsyncClient(transport=self.transport, retry=retry, **settings)
        self.caller = Caller(self.transport, retry=retry or RetryPolicy(), **settings)
        """For handles that no request of `client` has made."""

    @property
    def requests(self) -> list[Request]:
        return self.transport.requests

    def _answer(self, request: Request) -> Response:
        answer = self._answers.pop(0)
        if isinstance(answer, CoserveError):
            raise answer
        return answer if isinstance(answer, Response) else answer(request)

    async def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)


async def streamed(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """A body in pieces, for `Response`."""
    for piece in pieces:
        yield piece
