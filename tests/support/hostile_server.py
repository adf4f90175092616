"""A server that gives every request the same bytes and hangs up: what is no daemon, or one that dies."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


def http(status: str, body: bytes, *, kind: str = "text/html", length: int | None = None, head: str = "") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{head}\r\n".encode() + body


ANSWERS = {
    "hangs up": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a proxy's HTML": http("502 Bad Gateway", HTML),
    "HTML and 200": http("200 OK", HTML),
    "no JSON": http("200 OK", b"{", kind="application/json"),
    "other JSON": http("200 OK", b'{"detail": "hello"}', kind="application/json"),
    "JSON, not UTF-8": http("200 OK", b'{"id": "\xff\xfe"}', kind="application/json"),
    "nothing and 200": http("200 OK", b""),
    "dies mid-answer": http("200 OK", b'{"data": [', kind="application/json", length=9999),
    "a redirect": http("302 Found", b"", head="Location: http://127.0.0.1:1/\r\n"),
    "wrong key": http(
        "401 Unauthorized", b'{"error": {"code": "unauthorized", "message": "wrong key"}}', kind="application/json"
    ),
    "a broken event": http("200 OK", b"event: error\ndata: oops\n\n", kind="text/event-stream"),
    "half an event": http("200 OK", b'data: {"id": "x"', kind="text/event-stream"),
}


@contextmanager
def hostile_server(answer: bytes) -> Iterator[str]:
    """Its URL, for as long as the block runs."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(1)
            self.request.recv(65536)
            self.request.sendall(answer)
            self.request.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while answer and self.request.recv(65536):
                    pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
