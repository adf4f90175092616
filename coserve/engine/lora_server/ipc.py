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
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from coserve.core.types import BaseSpec
from coserve.engine.lora_server.gpu_driver import GpuDriver, IpcUnavailable, StreamOps
from coserve.engine.lora_server.messages import Mailbox
from coserve.engine.lora_server.transport import TensorSpec
from coserve.memory.buffer import aligned

TO_SERVER, TO_ENGINE, TRIAL_WORDS, GIVEN_UP, PAGE = 0, 64, 128, 256, 4096
"""Offsets of the two words in their page, on cache lines of their own; by how much farther the trial's words are, as a
step of the start before may still use the others; the offset of the word that is not 0 once the server has given a step
up; and the page's bytes."""
BEYOND = 1 << 30
"""Larger than any message's number."""
AHEAD = 8
"""After so many exchanges a server's host waits for the end of those before them. A launch that finds the GPU's queue
full, at some thousand kernels, may hold the launches of other threads, for as long as an engine hangs."""
TRIAL_SPEC = TensorSpec((1 << 16,), torch.int32)
"""The first message, which is sent back as it came."""


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where a message's tensors lie, one after the other, and its bytes in all."""
    *starts, total = accumulate(map(aligned, sizes), initial=0)
    return starts, total


class SharedPage:
    """A page of host memory that two processes and their GPUs share, zeros at first."""

    def __init__(self, file: int) -> None:
        """`file`: descriptor of the page's file."""
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


def _nothing() -> None:
    """No step was launched."""


class IpcTransport:
    """Implements `Transport`. `receive` does not wait: the stream does, so what comes is right only if the server is
    not lost by the time it is read."""

    recordable = True

    def __init__(
        self, ops: StreamOps, page: SharedPage, words: int, device: torch.device, sends: Part, receives: Part
    ) -> None:
        """`words`: the page's address on the device; `sends`, `receives`: the mailbox, as this end uses it."""
        self._ops, self._page, self._words, self._device = ops, page, words, device
        self._sends, self._receives = sends, receives
        self._steps, self._ended = 0, _nothing
        """Steps so far, and what waits for the end of the last one on the device."""

    def for_trial(self) -> Self:
        """Return the same end for a message beside a step's, with words of its own, which are 0."""
        trial = copy(self)
        trial._sends, trial._receives = self._sends.for_trial(), self._receives.for_trial()
        trial._ended = _nothing
        return trial

    def renew(self) -> None:
        """Forget the server before, at the engine's end: a next one is about to start, with a trial."""
        self._page.write(GIVEN_UP, 0)
        self.for_trial().begin()

    def begin(self) -> None:
        self._ended()
        self._steps += 1
        for part in (self._sends, self._receives):
            self._page.write(part.word, 0)

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

    def launched(self) -> None:
        self._ended = self._ops.mark()

    @property
    def waiting(self) -> tuple[int, int] | None:
        steps, answered, sent = self._steps, self._page.read(self._receives.word), self._page.read(self._sends.word)
        return (steps, sent) if sent > answered else None

    def leave(self) -> None:
        self._page.write(self._sends.word, BEYOND)

    def release(self) -> None:
        self._page.write(self._receives.word, BEYOND)

    @property
    def left(self) -> bool:
        return bool(self._page.read(GIVEN_UP))

    def finish(self) -> None:
        self._ops.mark()()

    def close(self) -> None:
        self.finish()


class ServerEnd(IpcTransport):
    """A server's end, until `close`."""

    def __init__(
        self, driver: GpuDriver, page: SharedPage, words: int, device: torch.device, sends: Part, receives: Part
    ) -> None:
        """`driver`: of this mailbox alone, which it gives back."""
        super().__init__(driver, page, words, device, sends, receives)
        self._driver, self._open, self._behind = driver, False, _nothing
        """`_open`: whether a step's messages are received; `_behind`: what waits for the end of an exchange."""

    def receive(self, number: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
        self._open = True
        return super().receive(number, specs)

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        super().send(number, tensors)
        if number % AHEAD == 0:
            self._behind()
            self._behind = self._ops.mark()

    def finish(self) -> None:
        super().finish()
        self._open, self._steps = False, self._steps + 1
        if self.left:
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
        super().finish()
        self._driver.close()


class Mailboxes:
    """An engine's mailboxes, one for each server, whoever opens it; they last until `close`."""

    def __init__(self, device: torch.device, spec: BaseSpec, servers: int, tokens: int) -> None:
        """Allocate them, for steps of up to `tokens` tokens. Raises `IpcUnavailable`, also without memory."""
        self._driver, self._device = GpuDriver(device), device
        self._there, self._back = mailbox_sizes(spec, tokens)
        try:
            self._own = [self._driver.allocate(self._there + self._back) for _ in range(servers)]
        except BaseException:
            self._driver.close()
            raise
        self._ends = dict[int, tuple[IpcTransport, int]]()
        """The end of each server that was offered, for all its starts, and the descriptor of its page. A page that is
        registered must not be unmapped: the next one may get its address, and would be refused."""

    def offer(self, index: int) -> tuple[IpcTransport, Mailbox]:
        """Return the engine's end for a server that is about to start, and what the server needs. The caller closes
        `Mailbox.page` once the server has it. Raises `IpcUnavailable`."""
        address, handle = self._own[index]
        if index not in self._ends:
            file = os.memfd_create("lora-server")
            try:
                os.truncate(file, PAGE)
                page, words = _page(self._driver, file)
                there, back = _parts(address, self._there, self._back)
                self._ends[index] = IpcTransport(self._driver, page, words, self._device, there, back), file
            except BaseException:
                os.close(file)
                raise
        end, file = self._ends[index]
        end.renew()
        device, sizes = self._device.type, {"there": self._there, "back": self._back}
        return end, Mailbox(handle=handle, **sizes, page=os.dup(file), device=device)

    def close(self) -> None:
        """Give their memory back, once all servers have ended and no step will run. Raises `IpcUnavailable`."""
        for end, _ in self._ends.values():
            end.release()
            end.for_trial().release()
        self._driver.finish()
        self._driver.close()
        for _, file in self._ends.values():
            os.close(file)
        self._ends.clear()


def open_mailbox(mailbox: Mailbox, device: torch.device) -> ServerEnd:
    """Return a server's end of a mailbox; the caller closes `mailbox.page`. Raises `IpcUnavailable`."""
    if mailbox.device != device.type:
        raise IpcUnavailable(f"the engine computes on {mailbox.device}, and the LoRA server on {device.type}")
    driver = GpuDriver(device)
    try:
        there, back = _parts(driver.open(mailbox.handle), mailbox.there, mailbox.back)
        page, words = _page(driver, mailbox.page)
    except BaseException:
        driver.close()
        raise
    return ServerEnd(driver, page, words, device, back, there)


def _page(driver: GpuDriver, file: int) -> tuple[SharedPage, int]:
    """Return the page of a file, and its address on the device."""
    page = SharedPage(file)
    return page, driver.register(page.address, PAGE)


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
