"""A daemon of canned streams in a thread, which keeps what it was asked; for commands in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

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
