"""The mailbox between an engine and a LoRA server: messages of any size arrive as they were sent, one after the other.
On GPUs: `tests/gpu/test_lora_ipc_gpu.py`."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coserve.engine.lora_server.gpu_driver import BLOCK, GpuDriver, IpcUnavailable
from coserve.engine.lora_server.ipc import (
    AHEAD,
    PAGE,
    TO_ENGINE,
    TO_SERVER,
    TRIAL_SPEC,
    EngineEnd,
    Mailboxes,
    Part,
    ServerEnd,
    SharedPage,
    layout,
    mailbox_sizes,
    open_mailbox,
)
from coserve.engine.lora_server.transport import TensorSpec
from coserve.memory.buffer import ALIGNMENT
from coserve.model.base import wrap_base
from tests.support.fake_driver import FakeDriver
from tests.support.families import tiny_family
from tests.support.host_stream import HostDriver, HostStream, mailbox_ends

DTYPES = (torch.bfloat16, torch.float32, torch.int64)
SIZE = 1 << 14
SPECS = st.builds(TensorSpec, st.tuples(st.integers(1, 30), st.integers(1, 8)), st.sampled_from(DTYPES))
MESSAGES = st.lists(SPECS, min_size=1, max_size=3)


def drawn(specs: Sequence[TensorSpec], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-99, 99, spec.shape, generator=generator).to(spec.dtype) for spec in specs]


@given(st.lists(st.tuples(MESSAGES, MESSAGES), min_size=1, max_size=6), st.integers(1, 3))
def test_messages_arrive_as_they_were_sent(sizes: list[tuple[list[TensorSpec], list[TensorSpec]]], steps: int) -> None:
    """Both ways, in several steps with the same numbers, whose other end begins to wait before anything is sent."""
    ours, theirs = mailbox_ends(SIZE, SIZE)

    def answer(step: int) -> list[list[Tensor]]:
        found = []
        for number, (there, back) in enumerate(sizes, 1):
            found.append(theirs.receive(number, there))
            theirs.send(number, drawn(back, -step - number))
        return found

    with ThreadPoolExecutor(1) as other:
        for step in range(0, 10 * steps, 10):
            ours.begin()
            answers = other.submit(answer, step)
            for number, (there, back) in enumerate(sizes, 1):
                ours.send(number, drawn(there, step + number))
                wanted = drawn(back, -step - number)
                assert [*map(torch.equal, ours.receive(number, back), wanted)] == [True] * len(back)
                assert ours.waiting is None
            for number, found in enumerate(answers.result(), 1):
                assert all(map(torch.equal, found, drawn(sizes[number - 1][0], step + number)))


@given(st.lists(st.integers(0, 5000), max_size=6))
def test_tensors_of_a_message_do_not_overlap(sizes: list[int]) -> None:
    starts, total = layout(sizes)
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, (_, start) in zip(ends, pairwise([*starts, total]), strict=False))
    assert all(end <= total for end in ends)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_mailbox_has_room_for_a_whole_step(family: str) -> None:
    """Of inputs with numbers or weights, and of terms, for each parameter of experts, and no more than that."""
    spec = wrap_base(tiny_family(family), name=family).spec
    there, back = mailbox_sizes(spec, 4000)
    messages, answers = [], []
    for site in spec.experts.values():
        tokens, rows = 4000, 4000 * site.chosen
        inputs, outputs, number = (tokens, rows, 8) if site.halves else (rows, tokens, 4)
        messages.append(layout([4 * inputs * site.in_features, number * rows])[1])
        answers.append(layout([4 * outputs * site.out_features])[1])
    assert (there, back) == (max(messages), max(answers))


def test_the_trial_fits_into_the_mailbox_of_a_tiny_base() -> None:
    spec, trial = wrap_base(tiny_family("mixtral"), name="mixtral").spec, drawn([TRIAL_SPEC], 0)
    ends = mailbox_ends(*mailbox_sizes(spec, 1))
    ours, theirs = (end.for_trial() for end in ends)
    ours.send(1, trial)
    theirs.send(1, theirs.receive(1, [TRIAL_SPEC]))
    assert torch.equal(ours.receive(1, [TRIAL_SPEC])[0], trial[0])
    ends[0].send(1, [torch.arange(8)])
    assert ends[0].waiting is not None, "the trial answers no message of a step"
    ends[0].renew()
    ours.send(1, trial)
    assert ours.waiting is not None, "the trial of the start before answers none"


def test_a_message_that_is_too_long_is_refused_and_the_next_one_goes() -> None:
    ours, theirs = mailbox_ends(256, 128)
    with pytest.raises(ValueError, match="at most 256 bytes, got 384"):
        ours.send(1, [torch.zeros(300, dtype=torch.uint8)])
    ours.send(2, [torch.arange(8)])
    assert torch.equal(theirs.receive(2, [TensorSpec((8,), torch.int64)])[0], torch.arange(8))


class Sources:
    """`StreamOps` that notes where copies read."""

    def __init__(self) -> None:
        self.found = list[int]()

    def copy(self, to: int, source: int, size: int) -> None:
        self.found.append(source)

    def write(self, word: int, value: int) -> None: ...
    def wait(self, word: int, value: int) -> None: ...
    def mark(self) -> Callable[[], None]:
        raise AssertionError


def test_a_tensor_of_the_host_is_sent_from_the_device() -> None:
    """With several servers for a layer the host has the experts' numbers; the driver copies from a GPU to another."""
    ops, file = Sources(), os.memfd_create("mailbox")
    os.truncate(file, PAGE)
    part = Part(0, 256, TO_SERVER)
    end = EngineEnd(ops, SharedPage(file), 0, torch.device("meta"), part, part)
    os.close(file)
    end.send(1, [torch.arange(8), torch.arange(8, device="meta")])
    assert ops.found == [0, 0]


def test_the_host_can_end_all_waits_of_a_step_and_none_of_the_next_one() -> None:
    ours, theirs = mailbox_ends(256, 256)
    ours.begin()
    assert ours.waiting is None
    ours.send(1, [torch.arange(8)])
    first = ours.waiting
    assert first is not None
    with ThreadPoolExecutor(1) as other:
        found = other.submit(lambda: [ours.receive(number, [TensorSpec((8,), torch.int64)]) for number in (1, 2, 96)])
        ours.release()
        found.result()
    ours.send(96, [torch.arange(8)])
    assert ours.waiting is None
    ours.begin()
    ours.send(1, [torch.arange(8)])
    assert ours.waiting not in (None, first)
    theirs.send(1, [torch.arange(8)])
    assert ours.waiting is None


def test_an_engine_knows_at_once_of_a_step_that_its_server_gave_up() -> None:
    """Answers to it are garbage, and come as others do. The server knows whether it waits, and for which message."""
    (ours, theirs), spec = mailbox_ends(256, 256), TensorSpec((8,), torch.int64)
    ours.begin()
    assert theirs.waiting is None, "no step is open"
    ours.send(1, [torch.arange(8)])
    theirs.receive(1, [spec])
    assert theirs.waiting is None, "it computes"
    theirs.send(1, [torch.arange(8)])
    assert theirs.waiting == (0, 1) and not ours.left
    theirs.give_up()
    theirs.receive(2, [spec])
    theirs.send(2, [torch.arange(8)])
    ours.receive(2, [spec])
    assert ours.left
    with pytest.raises(ConnectionError, match="too long"):
        theirs.finish()
    ours.renew()
    assert not ours.left


def test_a_server_launches_some_exchanges_ahead_and_not_a_whole_step() -> None:
    launched, ended = list[int](), list[int]()

    class Device(HostDriver):
        def mark(self) -> Callable[[], None]:
            launched.append(number)
            return partial(ended.append, number)

    file, part = os.memfd_create("mailbox"), Part(0, 256, TO_ENGINE)
    os.truncate(file, PAGE)
    page = SharedPage(file)
    os.close(file)
    end = ServerEnd(Device(torch.device("cpu")), page, page.address, torch.device("cpu"), part, part)
    for number in range(1, 97):
        end.send(number, [])
        assert number - max(ended, default=0) < 2 * AHEAD
    assert launched == [*range(AHEAD, 97, AHEAD)] and ended == launched[:-1]


def test_opened_memory_is_given_back(driver: FakeDriver) -> None:
    own, other = GpuDriver(torch.device("cpu")), GpuDriver(torch.device("cpu"))
    other.open(own.allocate(64)[1])
    other.close()
    assert not driver.opened and driver.allocated
    own.close()
    assert not driver.allocated


def test_an_engine_tries_mailboxes_on_the_same_stream_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 32 starts torch would return the streams on which it copies adapters or captures graphs."""
    made = list[torch.device]()
    monkeypatch.setattr("coserve.engine.lora_server.ipc.use_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr("coserve.engine.lora_server.ipc.GpuDriver", HostDriver)
    boxes = Mailboxes(torch.device("cuda", 7), wrap_base(tiny_family("mixtral"), name="mixtral").spec, 0, 8)
    for _ in range(3):
        boxes.try_out(1.0, lambda: None)
    assert len(made) == 1


def test_a_server_opens_nothing_of_an_engine_but_a_mailbox(driver: FakeDriver) -> None:
    """Memory behind it in the same block would be open, too: that of another mailbox, or anything else."""
    boxes = mailboxes()
    assert [len(memory) % BLOCK for memory in driver.allocated.values()] == [0]
    boxes.close()


class Behind(HostStream):
    """A device that is behind its host: what is launched runs when the host waits for it."""

    def __init__(self) -> None:
        self._launched = list[Callable[[], None]]()

    def write(self, word: int, value: int) -> None:
        self._launched.append(partial(super().write, word, value))

    def mark(self) -> Callable[[], None]:
        return self._run

    def _run(self) -> None:
        while self._launched:
            self._launched.pop(0)()


def test_a_step_begins_once_the_device_has_come_to_the_end_of_the_one_before() -> None:
    """The host may know of an error when the device is still between two exchanges. Words that are 0 then would have it
    wait without end, and a number that it writes late would be taken for one of the next step's."""
    file = os.memfd_create("mailbox")
    os.truncate(file, PAGE)
    page, memory = SharedPage(file), torch.empty(512, dtype=torch.uint8)
    os.close(file)
    sends, receives = Part(memory.data_ptr(), 256, TO_SERVER), Part(memory.data_ptr() + 256, 256, TO_ENGINE)
    device = Behind()
    end = EngineEnd(device, page, page.address, torch.device("cpu"), sends, receives)
    end.begin()
    end.send(1, [torch.arange(8)])
    end.launched()
    end.begin()
    device.mark()()
    assert page.read(TO_SERVER) == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: found)
    return found


def mailboxes() -> Mailboxes:
    return Mailboxes(torch.device("cpu"), wrap_base(tiny_family("mixtral"), name="mixtral").spec, 1, 8)


def test_mailboxes_may_be_offered_and_opened_on_any_thread(driver: FakeDriver) -> None:
    """An engine makes them on one thread, and starts servers on another, on which no kernel has run."""
    boxes = mailboxes()
    with ThreadPoolExecutor(1) as other:
        _, mailbox = other.submit(boxes.offer, 0).result()
    with ThreadPoolExecutor(1) as other:
        other.submit(open_mailbox, mailbox, SharedPage(mailbox.page), torch.device("cpu")).result()
        assert len(driver.registered) == 2 and len(driver.opened) == 1
        other.submit(boxes.close).result()


def test_pages_of_several_starts_and_of_several_engines_are_registered_once(driver: FakeDriver) -> None:
    """A page that is unmapped while it is registered would have the driver refuse another one at its address; graphs
    keep its address over all starts."""
    for _ in range(4):
        boxes, ends = mailboxes(), list[EngineEnd]()
        for _ in range(3):
            ends.append(boxes.offer(0)[0])
            assert [*driver.registered.values()] == [PAGE] and ends.count(ends[0]) == len(ends)
        boxes.close()
        assert not driver.registered and not driver.allocated


def test_a_page_that_cannot_be_registered_leaves_no_file_open(driver: FakeDriver) -> None:
    driver.registered[0] = 1 << 62
    gc.collect()  # files of earlier tests
    files = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(IpcUnavailable, match="cuMemHostRegister: 712"):
        mailboxes()
    assert len([*Path("/proc/self/fd").iterdir()]) == files and not driver.allocated


def test_memory_that_other_processes_cannot_open_is_given_back(driver: FakeDriver) -> None:
    driver.exports = False
    with pytest.raises(IpcUnavailable, match="cuIpcGetMemHandle"):
        mailboxes()
    assert not driver.allocated
