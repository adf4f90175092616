"""Transports of activations and terms between an engine and its LoRA servers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor


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

    recordable: bool
    """Whether a CUDA graph can record a step's messages, and replay them for other steps, and after other starts of the
    peer."""

    def begin(self) -> None:
        """Begin a step, at the engine's end, once the device has come to the end of the exchanges before. The server
        must not know of this one."""
        ...

    def launched(self) -> None:
        """Note, at the engine's end, that no exchange of the step will follow."""
        ...

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for the peer. Raises `ConnectionError` if it is gone."""
        ...

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Receive the message of this number. Raises `ConnectionError` if the peer is gone or does not send in time;
        if the GPU's stream waits in place of the host, see `waiting`."""
        ...

    @property
    def waiting(self) -> tuple[int, int] | None:
        """Return the step (counted from 1) and the number of the message for whose answer the engine's GPU waits, or
        soon will; None: the answer is there, or `receive` waits itself."""
        ...

    def leave(self) -> None:
        """Let the peer go on, at the engine's end: no message of the step will come."""
        ...

    def release(self) -> None:
        """Let the GPU go on, although answers are missing: it reads garbage. The peer's process must have ended, or its
        end of this transport."""
        ...

    @property
    def left(self) -> bool:
        """Whether the server has given a step up, at the engine's end: answers since then are garbage."""
        ...

    def finish(self) -> None:
        """Wait until a step is over, at the server's end. Raises `ConnectionError` if it was given up."""
        ...

    def close(self) -> None:
        """End the server's end, once the device has come to the end of its exchanges."""
        ...


class GlooTransport:
    """Implements `Transport` by gloo's messages, whose tag is the message's number. Tensors on a GPU go through host
    memory: `send` waits for them, and `receive` for the message, while the GPU computes what was launched before."""

    recordable = False

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, deadline: float) -> None:
        """`device`: of tensors that are received; `deadline`: timeout of a message in seconds."""
        self._group: dist.ProcessGroup | None = group
        self._peer, self._device = peer, device
        self._deadline = timedelta(seconds=deadline)
        self._sent = deque[tuple[dist.Work, Tensor]]()
        """Messages that may still be on their way."""

    def begin(self) -> None:
        """See `Transport`: steps do not overlap, so a number is not in use any more."""

    def launched(self) -> None:
        """See `Transport`."""

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

    @property
    def waiting(self) -> None:
        return None

    def leave(self) -> None:
        """See `Transport`: the last transport to leave a group closes its connections."""
        self._group = None

    def release(self) -> None:
        """See `Transport`: no GPU waits."""

    @property
    def left(self) -> bool:
        return False

    def finish(self) -> None:
        """See `Transport`: `send` has waited for the device."""

    def close(self) -> None:
        self._group = None

    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ConnectionError("the engine has left")
        return self._group


@contextmanager
def _connection() -> Iterator[None]:
    """Context of a gloo call: its errors become `ConnectionError`."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def gloo_group(path: str, rank: int, size: int, seconds: float) -> dist.ProcessGroup:
    """Join a gloo group of `size` processes. `path`: the rendezvous file, which the first process creates. Raises
    `RuntimeError` if not all have joined after `seconds`."""
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    gloo: object = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
    return cast("dist.ProcessGroup", gloo)  # it has the same methods
