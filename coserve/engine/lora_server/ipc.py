"""The transport between GPUs of one host: an engine's mailbox, which a LoRA server opens (CUDA IPC).

The mailbox lies on the engine's GPU and has two parts, one for the message to the server and one for its answer. The
server copies out of it and into it, over NVLink; the engine never touches a server's memory, so a server that dies
takes nothing away. Two words in host memory, which both processes and both GPUs see, hold the numbers of the step's
last message and of its last answer. The sender's stream writes a number behind its copies, and the receiver's stream
waits for it before its own. So no host waits for a message, and no kernel for another one; and the engine's host can
end all waits of a step, if the server is gone, by writing a larger number itself.

One message is answered before the next: a part is free again without a further word. The engine's stream waits for an
answer before it sends once more, so the server has taken the message before, and the engine its answer.

Numbers are those of a step's parameters, and addresses stay the same for all starts of a server: a CUDA graph can
record a step's exchanges. The engine's host sets both words to 0 between two steps, before it tells the server of the
next one: then nobody waits.

A server that several engines use outlives its engine. When this is gone, or sends nothing more in a step, the server's
host ends the waits of its own stream in the same way (`ServerEnd.give_up`), and says so in a third word before: a step
of an engine that was only slow reads garbage, and its host knows.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from coserve.core.types import BaseSpec
from coserve.engine.lora_server.gpu_driver import GpuDriver, IpcUnavailable, StreamOps
from coserve.engine.lora_server.messages import Mailbox
from coserve.engine.lora_server.transport import TensorSpec, within
from coserve.kernels.gpu.device import use_device
from coserve.memory.buffer import aligned

TO_SERVER, TO_ENGINE, GIVEN_UP = 0, 64, 256
"""Offsets in the page, on cache lines of their own: the number of a step's last message, that of its last answer, and a
word that is not 0 once the server has given a step up."""
TRIAL_WORDS = 128
"""Distance of the trial's words behind a step's: a step of the start before may still use these."""
PAGE = 4096
"""Bytes of the page."""
BEYOND = 1 << 30
"""Larger than any message's number."""
AHEAD = 8
"""After so many exchanges a server's host waits for the end of those before them. A launch that finds the GPU's queue
full, at some thousand kernels, may hold the launches of other threads, for as long as an engine hangs."""
TRIAL, TRIAL_SPEC = 1, TensorSpec((1 << 16,), torch.int32)
"""Number and tensor of the first message, which is sent back as it came."""


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where a message's tensors lie, one after the other, and its bytes in all."""
    *starts, total = accumulate(map(aligned, sizes), initial=0)
    return starts, total


class SharedPage:
    """A page of host memory that two processes and their GPUs share, zeros at first."""

    def __init__(self, file: int) -> None:
        """`file`: descriptor of the page's file, which may be closed then."""
        self._bytes = mmap.mmap(file, PAGE)
        self._words = memoryview(self._bytes).cast("I")
        self.address = torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()

    def read(self, offset: int) -> int:
        return self._words[offset // 4]

    def write(self, offset: int, value: int) -> None:
        self._words[offset // 4] = value


@dataclass(frozen=True)
class Part:
    """Half of a mailbox: its address on this process's GPU, its bytes, and the offset of its word."""

    address: int
    size: int
    word: int

    def for_trial(self) -> Part:
        return replace(self, word=self.word + TRIAL_WORDS)


class IpcTransport:
    """Implements `Transport`. `receive` does not wait: the stream does, so what comes is right only if the other end is
    not lost by the time it is read."""

    def __init__(
        self, ops: StreamOps, page: SharedPage, words: int, device: torch.device, sends: Part, receives: Part
    ) -> None:
        """`words`: the page's address on the device; `sends`, `receives`: the mailbox, as this end uses it."""
        self._ops, self._page, self._words, self._device = ops, page, words, device
        self._sends, self._receives = sends, receives

    def for_trial(self) -> Self:
        """Return the same end for a message beside a step's, with words of its own, which are 0."""
        trial = copy(self)
        trial._sends, trial._receives = self._sends.for_trial(), self._receives.for_trial()
        return trial

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """See `Transport`. Raises `ValueError` if the mailbox is too small."""
        starts, total = layout([tensor.nbytes for tensor in tensors])
        if total > self._sends.size:
            raise ValueError(f"expected a message of at most {self._sends.size} bytes, got {total}")
        for start, tensor in zip(starts, tensors, strict=True):
            own = tensor.to(self._device).contiguous()
            self._ops.copy(self._sends.address + start, own.data_ptr(), own.nbytes)
        self._ops.write(self._words + self._sends.word, number)

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """See `Transport`; the tensors are copies, in one allocation."""
        starts, total = layout([spec.bytes for spec in specs])
        found = torch.empty(total, dtype=torch.uint8, device=self._device)
        self._ops.wait(self._words + self._receives.word, number)
        self._ops.copy(found.data_ptr(), self._receives.address, total)
        return [
            found[start : start + spec.bytes].view(spec.dtype).view(spec.shape)
            for start, spec in zip(starts, specs, strict=True)
        ]


class EngineEnd(IpcTransport):
    """Implements `EngineTransport`, for all starts of a server."""

    recordable = True
    _steps = 0
    _ended: Callable[[], None] | None = None
    """Waits for the end of the last step on the device."""

    def renew(self) -> None:
        """Forget the server before: a next one is about to start, with a trial."""
        self._page.write(GIVEN_UP, 0)
        self.for_trial()._clear()

    def begin(self) -> None:
        if self._ended is not None:
            self._ended()
        self._steps += 1
        self._clear()

    def launched(self) -> None:
        self._ended = self._ops.mark()

    @property
    def waiting(self) -> tuple[int, int] | None:
        answered, sent = self._page.read(self._receives.word), self._page.read(self._sends.word)
        return (self._steps, sent) if sent > answered else None

    @property
    def left(self) -> bool:
        return bool(self._page.read(GIVEN_UP))

    def leave(self) -> None:
        self._page.write(self._sends.word, BEYOND)

    def release(self) -> None:
        self._page.write(self._receives.word, BEYOND)

    def _clear(self) -> None:
        for part in (self._sends, self._receives):
            self._page.write(part.word, 0)


class ServerEnd(IpcTransport):
    """Implements `ServerTransport`, for one start of a server."""

    def __init__(
        self, driver: GpuDriver, page: SharedPage, words: int, device: torch.device, sends: Part, receives: Part
    ) -> None:
        """`driver`: of this mailbox alone, which it gives back."""
        super().__init__(driver, page, words, device, sends, receives)
        self._driver, self._steps, self._open = driver, 0, False
        """`_open`: whether a step's messages are received."""
        self._behind: Callable[[], None] = lambda: None
        """Waits for the end of an exchange on the device."""

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        self._open = True
        return super().receive(number, specs)

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        super().send(number, tensors)
        if number % AHEAD == 0:
            self._behind()
            self._behind = self._ops.mark()

    def finish(self) -> None:
        self._ops.mark()()
        self._open, self._steps = False, self._steps + 1
        if self._page.read(GIVEN_UP):
            raise ConnectionError("it is gone, or has sent nothing in a step for too long")

    @property
    def waiting(self) -> tuple[int, int] | None:
        """Return the step and the number of its last message, if the GPU waits for the next one; None: it does not, or
        no step is open."""
        received, answered = self._page.read(self._receives.word), self._page.read(self._sends.word)
        return (self._steps, received) if self._open and received == answered else None

    def give_up(self) -> None:
        """Let the GPU go on, although messages are missing: what it answers is garbage. May be called on any thread,
        and again: the engine's GPU may still have written a number."""
        self._page.write(GIVEN_UP, 1)
        self._page.write(self._receives.word, BEYOND)

    def close(self) -> None:
        self._ops.mark()()
        self._driver.close()


class Streams:
    """A GPU's streams for exchanges. A stream waits for the peer, so no two threads use the same one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.cuda.Stream]()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run the block's work on a stream that no other block uses meanwhile. Nothing changes on a CPU."""
        use_device(self._device)
        if self._device.type != "cuda":
            yield
            return
        try:
            stream = self._free.pop()
        except IndexError:  # torch has 32, and begins again with the first one
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._free.append(stream)


class Mailboxes:
    """An engine's mailboxes, one for each server, for all its starts. Graphs keep their addresses; and each start that
    took another stream for its trial would soon have that of other work, of torch's 32."""

    def __init__(self, device: torch.device, spec: BaseSpec, servers: int, tokens: int) -> None:
        """Allocate them, for steps of up to `tokens` tokens. Raises `IpcUnavailable`, also without memory."""
        self._driver, self._device, self._streams = GpuDriver(device), device, Streams(device)
        self._files, self._own = list[int](), list[tuple[EngineEnd, Mailbox]]()
        with ExitStack() as failed:
            failed.callback(self.close)
            for _ in range(servers):
                self._own.append(self._make(*mailbox_sizes(spec, tokens)))
            failed.pop_all()

    def _make(self, there: int, back: int) -> tuple[EngineEnd, Mailbox]:
        address, handle = self._driver.allocate(there + back)
        self._files.append(file := os.memfd_create("lora-server"))
        os.truncate(file, PAGE)
        page = SharedPage(file)
        words = self._driver.register(page.address, PAGE)
        end = EngineEnd(self._driver, page, words, self._device, *_parts(address, there, back))
        return end, Mailbox(handle=handle, there=there, back=back, page=file, device=self._device.type)

    def offer(self, index: int) -> tuple[EngineEnd, Mailbox]:
        """Return the engine's end for a server that is about to start, and what the server needs."""
        end, mailbox = self._own[index]
        end.renew()
        return end, mailbox

    def try_out(self, deadline: float, connected: Callable[[], None]) -> None:
        """Exchange a message over each mailbox with a server that calls `answer_trial`. `connected` waits until all
        have: it raises if one cannot. Raises `IpcUnavailable` if what comes back is wrong, or does not within
        `deadline` seconds."""
        with self._streams.one():
            trials = [end.for_trial() for end, _ in self._own]
            for trial in trials:
                trial.send(TRIAL, [_trial(self._device)])
            connected()
            for trial in trials:
                with within(deadline, trial.release):
                    _receive_trial(trial)

    def close(self) -> None:
        """Give their memory back, once all servers have ended and no step will run. Raises `IpcUnavailable`."""
        for end, _ in self._own:
            end.release()
            end.for_trial().release()
        self._driver.finish()
        self._driver.close()
        while self._files:
            os.close(self._files.pop())


def open_mailbox(mailbox: Mailbox, page: SharedPage, device: torch.device) -> ServerEnd:
    """Return a server's end of a mailbox. Raises `IpcUnavailable`."""
    if mailbox.device != device.type:
        raise IpcUnavailable(f"the engine computes on {mailbox.device}, and the LoRA server on {device.type}")
    driver = GpuDriver(device)
    with ExitStack() as failed:
        failed.callback(driver.close)
        there, back = _parts(driver.open(mailbox.handle), mailbox.there, mailbox.back)
        words = driver.register(page.address, PAGE)
        failed.pop_all()
    return ServerEnd(driver, page, words, device, back, there)


def answer_trial(trial: ServerEnd) -> None:
    """Send the engine's first message back: see `Mailboxes.try_out`. Raises `IpcUnavailable` if it is wrong."""
    trial.send(TRIAL, [_receive_trial(trial)])


def _receive_trial(trial: IpcTransport) -> Tensor:
    (found,) = trial.receive(TRIAL, [TRIAL_SPEC])
    if not torch.equal(found.cpu(), _trial(torch.device("cpu"))):
        raise IpcUnavailable("a message between two GPUs has arrived wrong, or too late")
    return found


def _trial(device: torch.device) -> Tensor:
    return torch.arange(1, TRIAL_SPEC.shape[0] + 1, dtype=TRIAL_SPEC.dtype, device=device)


def _parts(address: int, there: int, back: int) -> tuple[Part, Part]:
    """Return a mailbox's parts of so many bytes, to the server and to the engine."""
    return Part(address, there, TO_SERVER), Part(address + there, back, TO_ENGINE)


def mailbox_sizes(spec: BaseSpec, tokens: int) -> tuple[int, int]:
    """Return the bytes of the longest message to a server and of its longest answer, for so many tokens.

    There: inputs of gate and up with the experts' numbers, or inputs of down with the router's weights; back: the terms
    (see `BeginStep`). `TRIAL_SPEC` fits, however few tokens there are.
    """
    item, there, back = getattr(torch, spec.dtype).itemsize, TRIAL_SPEC.bytes, TRIAL_SPEC.bytes
    sites = iter(spec.experts.values())  # of each layer gate and up first, then down
    for up, down in zip(sites, sites, strict=True):
        rows = tokens * up.chosen
        sent = (tokens * up.in_features * item, 8 * rows), (rows * down.in_features * item, 4 * rows)
        there = max(there, *(layout(sizes)[1] for sizes in sent))
        back = max(back, *(layout([size * item])[1] for size in (rows * up.out_features, tokens * down.out_features)))
    return there, back
