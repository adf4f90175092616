"""Transports of activations and terms between an engine and its LoRA servers."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

ENGINE = 0
"""The engine's rank in a gloo group; server i is rank i + 1."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is to arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Transport(Protocol):
    """One end of a connection. Both ends know the messages of a step, with their shapes and dtypes, from the socket's.
    The engine sends first, each message is answered, by the same number, and numbers increase from 1 within a step."""

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for the peer. Raises `ConnectionError` if it is gone."""
        ...

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receive the message of this number. Raises `ConnectionError` if the peer is gone or does not send in time;
        where the GPU's stream waits in place of the host, somebody must watch the end."""
        ...


class EngineTransport(Transport, Protocol):
    """The engine's end."""

    recordable: bool
    """Whether a CUDA graph can record a step's messages, and replay them for other steps, and after other starts of the
    server."""

    def begin(self) -> None:
        """Begin a step, once the device has come to the end of the exchanges before. The server must not know of this
        one."""
        ...

    def launched(self) -> None:
        """Note that no exchange of the step will follow."""
        ...

    @property
    def waiting(self) -> tuple[int, int] | None:
        """Return the step (counted from 1) and the number of the message for whose answer the GPU waits, or soon will;
        None: the answer is there, or `receive` waits itself."""
        ...

    @property
    def left(self) -> bool:
        """Whether the server has given a step up: answers since then are garbage."""
        ...

    def leave(self) -> None:
        """Let the server go on: no message of the step will come."""
        ...

    def release(self) -> None:
        """Let the GPU go on, although answers are missing: it reads garbage. The server's process must have ended, or
        its end of this transport."""
        ...


class ServerTransport(Transport, Protocol):
    """A server's end."""

    def finish(self) -> None:
        """Wait until a step is over. Raises `ConnectionError` if it was given up."""
        ...

    def close(self) -> None:
        """End the transport, once the device has come to the end of its exchanges."""
        ...


class GlooTransport:
    """Implements `Transport` by gloo's messages, whose tag is the message's number. Tensors on a GPU go through host
    memory: `send` waits for them, and `receive` for the message, while the GPU computes what was launched before."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, deadline: float) -> None:
        """`device`: of tensors that are received; `deadline`: timeout of a message in seconds."""
        self._group: dist.ProcessGroup | None = group
        self._peer, self._device = peer, device
        self._deadline = timedelta(seconds=deadline)
        self._sent = deque[tuple[dist.Work, Tensor]]()
        """Messages that may still be on their way."""

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        for place, tensor in enumerate(tensors):
            own = tensor.cpu().contiguous()
            with _connection():
                work = self._joined().send([own], self._peer, 2 * number + place)
            self._sent.append((work, own))

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        found = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
        for place, tensor in enumerate(found):
            with _connection():
                self._joined().recv([tensor], self._peer, 2 * number + place).wait(self._deadline)
        return [tensor.to(self._device) for tensor in found]

    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ConnectionError("the engine has left")
        return self._group

    def _leave(self) -> None:
        self._group = None  # the last end to leave a group closes its connections


class GlooEngineEnd(GlooTransport):
    """Implements `EngineTransport`. Steps do not overlap and no GPU waits, so there is nothing to keep apart."""

    recordable = False
    waiting, left = None, False

    def begin(self) -> None: ...

    def launched(self) -> None: ...

    def leave(self) -> None:
        self._leave()

    def release(self) -> None: ...


class GlooServerEnd(GlooTransport):
    """Implements `ServerTransport`: `send` has waited for the device."""

    def finish(self) -> None: ...

    def close(self) -> None:
        self._leave()


def join_servers(path: str, servers: int, device: torch.device, deadline: float) -> list[GlooEngineEnd]:
    """Connect an engine to its servers, each of which calls `join_engine`; return its ends in the servers' order.
    `path`: the rendezvous file, which the first process creates; `deadline`: seconds until all have joined, and those
    of each message. Raises `ConnectionError`."""
    group = _join(path, ENGINE, servers, deadline)
    return [GlooEngineEnd(group, index + 1, device, deadline) for index in range(servers)]


def join_engine(path: str, index: int, servers: int, device: torch.device, deadline: float) -> GlooServerEnd:
    """Connect server `index` to its engine: see `join_servers`."""
    return GlooServerEnd(_join(path, index + 1, servers, deadline), ENGINE, device, deadline)


def _join(path: str, rank: int, servers: int, deadline: float) -> dist.ProcessGroup:
    with _connection():
        store = dist.FileStore(path, servers + 1)  # type: ignore[attr-defined]
        gloo: object = dist.ProcessGroupGloo(store, rank, servers + 1, timedelta(seconds=deadline))
    return cast("dist.ProcessGroup", gloo)  # it has the same methods


@contextmanager
def within(seconds: float, late: Callable[[], None]) -> Iterator[None]:
    """Call `late`, on another thread, if the block takes longer."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _connection() -> Iterator[None]:
    """Context of a gloo call: its errors become `ConnectionError`."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error
