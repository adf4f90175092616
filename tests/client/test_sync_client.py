"""The thin face: the same answers and errors, from a program without an event loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

import coserve
from coserve.client import Client, JobHandle, MockTransport, Request, Response
from coserve.core.errors import AdapterNotFound, InvalidRequest
from coserve.core.schemas.jobs import Preparing, SubmissionEvent
from coserve.core.training.jobs import JobState
from tests.support.sdk import GENERATED, chunk, job, job_event, refusal, reply, sse, stream_of, streamed


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "coserve-client"]


def daemon(request: Request) -> Response:
    match request.method, request.path:
        case "POST", "/generate" if b'"stream":true' in (request.body or b""):  # type: ignore[operator]
            return stream_of(chunk("a"), chunk("b"), chunk("c", last=True))
        case "POST", "/generate":
            return reply(GENERATED)
        case "POST", "/finetune":
            return reply(job(), 202)
        case "GET", "/finetune/job-1/events":
            story = sse(job_event(1, step=1), job_event(2, JobState.SUCCEEDED), ids=(1, 2))
            return Response(200, {}, streamed(story))
        case "GET", "/finetune/job-1":
            return reply(job(JobState.SUCCEEDED, result="a@1"))
        case _:
            return refusal(404, "adapter_not_found", "no such adapter")


def test_calls_streams_and_jobs() -> None:
    with coserve.Client(transport=MockTransport(daemon)) as client:
        assert client.generate("hi") == GENERATED
        assert [piece.text for piece in client.stream("hi")] == ["a", "b", "c"]
        handle = client.finetune("a", [{"text": "x"}])
        assert repr(handle) == "<JobHandle job-1 a@1 queued>"
        assert [event.seq for event in handle.events()] == [1, 2]
        assert handle.wait(progress=False).result == "a@1"
        assert handle.info.state is JobState.SUCCEEDED
        with pytest.raises(AdapterNotFound, match="no such adapter"):
            client.adapter("x")
    assert threads() == []


def test_leaving_a_stream_early_closes_it() -> None:
    closed = threading.Event()
    body = Response(200, {}, aiter(stream_of(chunk("a"), chunk("b"))), close=closed.set)
    with Client(transport=MockTransport(lambda _: body)) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        stream.close()
        assert closed.is_set()


def test_an_interrupt_cancels_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    async def never(_: Request) -> Response:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(transport=MockTransport(never)) as client:
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.health()
        assert cancelled.wait(5)


def endless(left: threading.Event) -> MockTransport:
    """One chunk of a stream, and then nothing; leaving takes a moment."""

    async def chunks() -> AsyncIterator[bytes]:
        try:
            yield sse(chunk("one"))[0]
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            left.set()

    return MockTransport(lambda _: Response(200, {"Content-Type": "text/event-stream"}, chunks()))


@pytest.mark.parametrize("place", ["concurrent.futures.Future.result", "asyncio.run_coroutine_threadsafe"])
def test_an_interrupt_leaves_a_stream_wherever_it_comes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next chunk is awaited, and just after it has been asked for."""
    left = threading.Event()
    real = {"asyncio.run_coroutine_threadsafe": asyncio.run_coroutine_threadsafe}.get(place, lambda *_: None)

    with Client(transport=endless(left)) as client:
        stream = client.stream("hi")
        assert next(stream).text == "one"
        with monkeypatch.context() as patch:

            def interrupted(*given: Any) -> None:
                patch.undo()
                real(*given)
                raise KeyboardInterrupt

            patch.setattr(place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert left.is_set()
        with pytest.raises(StopIteration):
            next(stream)


def test_a_client_that_is_forgotten_leaves_no_thread() -> None:
    client = Client(transport=MockTransport(daemon))
    stream = client.stream("hi")
    next(stream)
    assert threads() == ["coserve-client"]
    del client, stream
    gc.collect()
    assert threads() == []


def test_several_threads_share_a_client() -> None:
    got: list[object] = []
    with Client(transport=MockTransport(daemon)) as client:
        workers = [threading.Thread(target=lambda: got.append(client.generate("hi"))) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert got == [GENERATED] * 8


UNCLOSED = """
import http.server, threading
import coserve

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"a 1")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(202)
        self.send_header("Content-Length", str(len(JOB)))
        self.end_headers()
        self.wfile.write(JOB)
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()

def ask():
    print(coserve.Client(f"http://127.0.0.1:{server.server_port}").metrics())

"""


def test_a_client_that_nobody_closed_closes_its_connections() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", UNCLOSED + "ask()"], capture_output=True, text=True, timeout=240, check=True
    )
    assert (done.stdout, done.stderr) == ("a 1\n", "")


def test_a_client_that_was_never_closed_ends_with_the_program() -> None:
    """Its loop has used threads."""
    body = msgspec.json.encode(job())
    script = f"JOB = {body!r}\n{UNCLOSED}\nclient = coserve.Client(f'http://127.0.0.1:{{server.server_port}}')\n"
    script += "print(client.finetune('a', [{'text': 'x'}]).id)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert (done.stdout, done.stderr) == ("job-1\n", "")


def preparing(request: Request) -> Response:
    """As `daemon`, with three steps on the way to a job."""
    if (request.method, request.path) != ("POST", "/finetune"):
        return daemon(request)
    steps = [SubmissionEvent(preparing=Preparing("a", 0.0, rows, rows / 3)) for rows in (1, 2, 3)]
    return Response(202, {"Content-Type": "text/event-stream"}, streamed(sse(*steps, SubmissionEvent(job=job()))))


def test_a_callback_may_call_the_client() -> None:
    shown: list[tuple[int, str]] = []

    def show(preparing: Preparing) -> None:
        shown.append((preparing.rows, client.generate("hi").id))

    with Client(transport=MockTransport(preparing)) as client:
        assert client.finetune("a", [{"text": "x"}], on_preparing=show).id == "job-1"
    assert shown == [(1, "gen-1"), (2, "gen-1"), (3, "gen-1")]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_fails_ends_the_call(error: type[BaseException]) -> None:
    shown: list[int] = []

    def show(preparing: Preparing) -> None:
        shown.append(preparing.rows)
        raise error

    with Client(transport=MockTransport(preparing)) as client:
        with pytest.raises(error):
            client.finetune("a", [{"text": "x"}], on_preparing=show)
        assert client.generate("hi") == GENERATED
    assert shown == [1] and threads() == []


def unending(left: threading.Event) -> MockTransport:
    """One step on the way to a job, and then nothing until the client has `left`."""

    async def steps() -> AsyncIterator[bytes]:
        try:
            yield sse(SubmissionEvent(preparing=Preparing("a", 0.0, 1, 0.5)))[0]
            await asyncio.Event().wait()
        finally:
            left.set()

    return MockTransport(lambda _: Response(202, {"Content-Type": "text/event-stream"}, steps()))


def test_a_callback_that_fails_cancels_the_submission() -> None:
    left = threading.Event()

    def show(_: Preparing) -> None:
        raise ZeroDivisionError

    with Client(transport=unending(left)) as client:
        with pytest.raises(ZeroDivisionError):
            client.finetune("a", [{"text": "x"}], on_preparing=show)
        assert left.wait(30)


def test_a_callback_may_close_the_client() -> None:
    left = threading.Event()
    client = Client(transport=unending(left))
    with pytest.raises(InvalidRequest, match="the client is closed"):
        client.finetune("a", [{"text": "x"}], on_preparing=lambda _: client.close())
    assert left.is_set() and threads() == []


def test_rows_may_come_from_the_client() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": client.generate("hi").choices[0].text}

    with Client(transport=MockTransport(daemon)) as client:
        assert client.finetune("a", rows()).id == "job-1"


def test_a_warning_of_cut_rows_names_the_line_of_the_call() -> None:
    transport = MockTransport(lambda _: reply(msgspec.structs.replace(job(), rows=3, rows_cut=1), 202))
    with Client(transport=transport) as client, pytest.warns(UserWarning, match="1 of 3 rows was too long") as caught:
        client.finetune("a", [{"text": "x"}])
    assert [warning.filename for warning in caught] == [__file__]


def test_wrong_arguments_of_generate_are_explained() -> None:
    with Client(transport=MockTransport(daemon)) as client:
        with pytest.raises(TypeError, match="unexpected keyword argument 'max_new_tokens'; did you mean 'max_tokens'"):
            client.generate("hi", max_new_tokens=5)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="expected a text or token ids, got messages; did you mean 'messages'"):
            client.generate([{"role": "user", "content": "hi"}])  # type: ignore[list-item]


def test_every_method_has_a_text() -> None:
    for kind in (Client, JobHandle):
        for name, method in vars(kind).items():
            assert name.startswith("_") or isinstance(method, property) or method.__doc__, name


def test_errors_of_wrong_arguments_name_the_class_that_was_used() -> None:
    with coserve.Client(transport=MockTransport(daemon)) as client:
        with pytest.raises(
            TypeError, match=r"^finetune\(\) got an unexpected .* 'epochs'; did you mean 'training.epochs'\?$"
        ):
            client.finetune("a", [{"text": "x"}], epochs=1)
        with pytest.raises(TypeError, match=r"^Client\.adapter\(\) missing 1 required positional argument"):
            client.adapter()  # type: ignore[call-arg]
        handle = client.finetune("a", [{"text": "x"}])
        with pytest.raises(TypeError, match=r"^JobHandle\.wait\(\) got an unexpected keyword argument 'every'$"):
            handle.wait(every=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"^JobHandle\.events\(\) got an unexpected"):
            handle.events(since=1)  # type: ignore[call-arg]
