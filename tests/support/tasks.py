"""Tasks for a helper process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow, StorageFull
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained import sandbox
from coserve.data.pretrained.chat import ChatTemplate


def echo(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    return body


def pid(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    return str(os.getpid()).encode()


def refuse(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    raise InvalidRequest("expected more", field="a.b")


def refuse_row(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    raise MalformedRow("expected text", line=7)


def fail(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    raise KeyError("/secret/path")


def sleep(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    time.sleep(600)
    return b""


def work(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Three seconds in all, with heartbeats."""
    for _ in range(300):
        time.sleep(0.01)
        context.progress()
    return b"done"


def half_an_answer(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Write the beginning of a frame to the socket, then stop."""
    os.write(int(sys.argv[1]), (1 << 20).to_bytes(4, "big") + b"x")
    time.sleep(600)
    return b""


def full_disk(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """`decode_corpus` on a disk that fills up."""
    Path(msgspec.msgpack.decode(arguments)["file"]).write_bytes(b"{")
    raise StorageFull("the disk is full")


def key(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    return os.environ.get("COSERVE_API_KEY", "none").encode()


def tokens(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    return str(context.tokenizer.encode(body.decode())).encode()


def die(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Note in the file that `body` names that it ran, if there is one; then the process is killed."""
    if body:
        with Path(body.decode()).open("a") as file:
            file.write("ran\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def render(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """A chat by a template of its own."""
    template = ChatTemplate(msgspec.msgpack.decode(arguments)["template"], {}, limits=sandbox.limits)
    return template.render([{"role": "user", "content": "hi"}]).encode()


def compute(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Take almost as much processor time as a template may."""
    seconds, began = sandbox.SECONDS - 1, time.process_time()
    while time.process_time() - began < seconds:
        pass
    return str(seconds).encode()
