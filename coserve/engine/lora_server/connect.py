"""The connections of an engine and its LoRA servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from coserve.engine.lora_server.gpu_driver import IpcUnavailable
from coserve.engine.lora_server.ipc import TRIAL_SPEC, IpcTransport, ServerEnd, open_mailbox
from coserve.engine.lora_server.messages import StartServer
from coserve.engine.lora_server.transport import GlooTransport, Transport, gloo_group
from coserve.kernels.gpu.device import use_device

SLOTS = 1024
"""Most adapters that the servers hold at once."""
ENGINE = 0
"""The engine's rank in the group; server i is rank i + 1."""
TRIAL = 1
"""Number of the first message over a mailbox (`TRIAL_SPEC`)."""


class Streams:
    """A GPU's streams for exchanges. A stream waits for its engine, so no two threads use the same one at a time."""

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


_streams_of = cache(Streams)
"""An engine's streams for the messages of each start, by device: torch's 32 would become those of its other work."""


def connect(settings: StartServer, opened: Callable[[ServerEnd], None] = lambda _: None) -> Transport:
    """Connect a server to its engine. `opened` is called with the end of a mailbox before this waits for a message of
    it. Raises `IpcUnavailable`, or another `ConnectionError` if the engine or one of its servers does not connect
    within `settings.deadline` seconds."""
    device = torch.device(settings.device)
    if settings.mailbox is None:
        ranks = settings.servers + 1
        try:
            group = gloo_group(settings.rendezvous, settings.index + 1, ranks, settings.deadline)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return GlooTransport(group, ENGINE, device, settings.deadline)
    transport = open_mailbox(settings.mailbox, device)
    with ExitStack() as failed:
        failed.callback(transport.close)
        trial = transport.for_trial()
        opened(trial)
        (found,) = trial.receive(TRIAL, [TRIAL_SPEC])
        _check_trial(found)
        trial.send(TRIAL, [found])
        opened(transport)
        failed.pop_all()
    return transport


def connect_all(rendezvous: str, servers: int, device: torch.device, deadline: float) -> list[Transport]:
    """Connect an engine to its servers by gloo, each of which calls `connect`; return the transports in the servers'
    order. Raises `RuntimeError` if a server does not connect within `deadline` seconds. This is also the timeout of
    each message."""
    group = gloo_group(rendezvous, ENGINE, servers + 1, deadline)
    return [GlooTransport(group, index + 1, device, deadline) for index in range(servers)]


def try_mailboxes(
    transports: Sequence[IpcTransport], device: torch.device, deadline: float, connected: Callable[[], None]
) -> None:
    """Exchange a message over each mailbox with a server that calls `connect`. `connected` waits until all have: it
    raises if one cannot. Raises `IpcUnavailable` if what comes back is wrong, or does not within `deadline` seconds."""
    with _streams_of(device).one():
        trials = [transport.for_trial() for transport in transports]
        for trial in trials:
            trial.send(TRIAL, [_trial(device)])
        connected()
        for trial in trials:
            (found,) = trial.receive(TRIAL, [TRIAL_SPEC])
            with within(deadline, trial.release):
                _check_trial(found)


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


def _trial(device: torch.device) -> torch.Tensor:
    return torch.arange(1, TRIAL_SPEC.shape[0] + 1, dtype=TRIAL_SPEC.dtype, device=device)


def _check_trial(found: torch.Tensor) -> None:
    if not torch.equal(found.cpu(), _trial(torch.device("cpu"))):
        raise IpcUnavailable("a message between two GPUs has arrived wrong, or too late")
