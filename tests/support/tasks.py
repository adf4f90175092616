"""Tasks for a helper process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from coserve.core.errors import InvalidRequest, MalformedRow, StorageFull
from coserve.data.corpus.sources import Piece
from coserve.data.corpus.tokenize import Tokenization
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained import sandbox
from coserve.data.pretrained.chat import ChatTemplate


def echo(context: TaskContext, body: bytes) -> bytes:
    return body


def pid(context: TaskContext) -> int:
    return os.getpid()


def refuse(context: TaskContext) -> None:
    raise InvalidRequest("expected more", field="a.b")


def refuse_row(context: TaskContext) -> None:
    raise MalformedRow("expected text", line=7)


def fail(context: TaskContext) -> None:
    raise KeyError("/secret/path")


def sleep(context: TaskContext, began: str) -> None:
    Path(began).touch()
    time.sleep(600)


def work(context: TaskContext) -> str:
    """Five seconds in all, with heartbeats."""
    for _ in range(500):
        time.sleep(0.01)
        context.progress()
    return "done"


def half_an_answer(context: TaskContext) -> None:
    """Write the beginning of a frame to the socket, then stop."""
    os.write(int(sys.argv[1]), (1 << 20).to_bytes(4, "big") + b"x")
    time.sleep(600)


def full_disk(context: TaskContext, body: bytes, file: str) -> None:
    """`decode_corpus` on a disk that fills up."""
    Path(file).write_bytes(b"{")
    raise StorageFull("the disk is full")


def key(context: TaskContext) -> str:
    return os.environ.get("COSERVE_API_KEY", "none")


def tokens(context: TaskContext, text: str) -> list[int]:
    return context.tokenizer.encode(text)


def die(context: TaskContext, path: str) -> None:
    """Note in the file at `path` that it ran; then the process is killed."""
    with Path(path).open("a") as file:
        file.write("ran\n")
    os.kill(os.getpid(), signal.SIGKILL)


def die_of_a_piece(
    context: TaskContext, piece: Piece, target: str, options: Tokenization, columns: dict[str, str]
) -> None:
    """`tokenize_piece` in a process that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def render(context: TaskContext, template: str) -> str:
    """A chat by a template of its own."""
    return ChatTemplate(template, {}, limits=sandbox.limits).render([{"role": "user", "content": "hi"}])


def compute(context: TaskContext) -> int:
    """Take almost as much processor time as a template may."""
    seconds, began = sandbox.SECONDS - 1, time.process_time()
    while time.process_time() - began < seconds:
        pass
    return seconds
