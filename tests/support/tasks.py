"""Tasks for a helper process."""

from __future__ import annotations

import os
import time

from coserve.errors import InvalidRequest, MalformedRow
from coserve.offload.protocol import Context


def echo(context: Context, arguments: bytes, body: bytes) -> bytes:
    return body


def pid(context: Context, arguments: bytes, body: bytes) -> bytes:
    return str(os.getpid()).encode()


def refuse(context: Context, arguments: bytes, body: bytes) -> bytes:
    raise InvalidRequest("expected more", field="a.b")


def refuse_row(context: Context, arguments: bytes, body: bytes) -> bytes:
    raise MalformedRow("expected text", line=7)


def fail(context: Context, arguments: bytes, body: bytes) -> bytes:
    raise KeyError("/secret/path")


def sleep(context: Context, arguments: bytes, body: bytes) -> bytes:
    time.sleep(600)
    return b""


def work(context: Context, arguments: bytes, body: bytes) -> bytes:
    """Two signs of life, then the end."""
    for _ in range(2):
        time.sleep(1.1)
        context.progress()
    return b"done"


def key(context: Context, arguments: bytes, body: bytes) -> bytes:
    return os.environ.get("COSERVE_API_KEY", "none").encode()


def tokens(context: Context, arguments: bytes, body: bytes) -> bytes:
    return str(context.tokenizer.encode(body.decode())).encode()
