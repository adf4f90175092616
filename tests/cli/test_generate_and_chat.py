"""`coserve generate` from standard input and with a system message; `coserve chat` at a terminal and from a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import msgspec
import pytest

from coserve.core.schemas.service import STREAM_END
from tests.support.sdk import chunk, sse


class ChatServer(ThreadingHTTPServer):
    """Answers every generation with `answer`'s words for the messages, a chunk each. After the word `pause` it says
    nothing more until its client has left, when it sets `left`."""

    daemon_threads = True

    def __init__(self, answer: Callable[[list[dict[str, str]]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.paused, self.left = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = self.server.answer(body.get("messages", [])).split(" ")
        for number, word in enumerate(words):
            if word == "pause":
                self.server.paused.set()
                self.connection.recv(1)
                self.server.left.set()
                return
            for piece in sse(chunk(word if number == 0 else f" {word}")):
                self.wfile.write(piece)
        for piece in sse(chunk("", last=True), STREAM_END):
            self.wfile.write(piece)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_chat(answer: Callable[[list[dict[str, str]]], str]) -> Iterator[ChatServer]:
    with ChatServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


Messages = list[dict[str, str]]

TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def answer(messages: Messages) -> str:
    return messages[-1]["content"].removeprefix("say ") if messages else "one two"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serve_chat(answer) as found:
        yield found


def coserve(*arguments: str, url: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "coserve", *arguments, "--url", url],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("stdin", "prompt"), [("Today we\n", "Today we"), ("Today we", "Today we"), ("one\n\n", "one\n")]
)
def test_a_prompt_from_standard_input_loses_the_end_of_its_last_line(
    stdin: str, prompt: str, server: ChatServer
) -> None:
    done = coserve("generate", "-", url=server.url, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr
    assert [body["prompt"] for body in server.asked] == [prompt]


def test_a_system_message_goes_before_the_prompt(server: ChatServer) -> None:
    done = coserve("generate", "say hi", "--system", "be short", url=server.url)
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    assert [(message["role"], message["content"]) for message in server.asked[0]["messages"]] == [
        ("system", "be short"),
        ("user", "say hi"),
    ]


def test_a_chat_from_a_pipe_has_its_history_and_obeys_commands(server: ChatServer) -> None:
    lines = "say a b\n\nsay c\n/system be kind\nsay d\n/reset\nsay e\n/system\n/restart\nsay f\n"
    done = coserve("chat", "--adapter", "a", "--max-tokens", "7", "--seed", "1", url=server.url, stdin=lines)
    assert (done.returncode, done.stdout) == (0, "a b\nc\nd\ne\nf\n"), done.stderr
    assert "unknown command /restart" in done.stderr and "/reset" in done.stderr
    said = [[(message["role"], message["content"]) for message in body["messages"]] for body in server.asked]
    first = [("user", "say a b")]
    second = [*first, ("assistant", "a b"), ("user", "say c")]
    third = [("system", "be kind"), *second, ("assistant", "c"), ("user", "say d")]
    fourth = [("system", "be kind"), ("user", "say e")]
    assert said == [first, second, third, fourth, [*fourth[1:], ("assistant", "e"), ("user", "say f")]]
    assert {(body["adapter"], body["max_tokens"], body["seed"], body["stream"]) for body in server.asked} == {
        ("a", 7, 1, True)
    }


class Terminal:
    """`coserve chat` on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        # Not by `pty.fork`: a fork needs memory for all that the tests before have mapped.
        self._fd, other = pty.openpty()
        chat = [sys.executable, "-P", "-m", "coserve", "chat", "--url", url]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", TAKE_TERMINAL, *chat],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, again: str = "") -> None:
        """Read until this appears; what comes after it is for the next call. `again` is typed whenever nothing comes
        for a second: readline may miss a key that comes at the very moment at which it begins to read."""
        while text not in self.seen:
            while again and not select.select([self._fd], [], [], 1.0)[0]:
                self.type(again)
            try:
                self.seen += os.read(self._fd, 1024).decode()
            except OSError:
                raise AssertionError(f"expected {text!r}, then it ended; read {self.seen!r}") from None
        self.seen = self.seen.partition(text)[2]

    def end(self) -> int:
        try:
            while os.read(self._fd, 1024):
                pass
        except OSError:  # the other side is closed
            pass
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.mark.timeout(120)
def test_ctrl_c_ends_an_answer_and_ctrl_d_leaves(server: ChatServer) -> None:
    with Terminal(server.url) as terminal:
        terminal.until("Ctrl-D leaves")
        terminal.until("> ")
        terminal.type("\x03")  # at the prompt it is a new line
        terminal.until("> ", again="\x03")
        terminal.type("say ahoy there pause\n")
        terminal.until("\nahoy there")
        assert server.paused.wait(60)
        terminal.type("\x03")
        terminal.until("> ")
        assert server.left.wait(60), "the daemon still works on the answer"
        terminal.type("say next\n")
        terminal.until("\nnext")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [message["content"] for message in server.asked[1]["messages"]] == [
        "say ahoy there pause",
        "ahoy there",
        "say next",
    ]


def test_an_error_at_the_terminal_ends_one_answer(server: ChatServer) -> None:
    with Terminal("http://127.0.0.1:9") as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("no daemon answers")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert coserve("chat", url="http://127.0.0.1:9", stdin="hello\n").returncode == 1
