"""LoRA servers as threads of this process, and the adapters that they serve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread

import msgspec
import torch

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import LogSettings
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec
from coserve.engine.lora_server.ipc import mailbox_sizes
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer, Mailbox, StartServer
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.running import Answered, RunningServers, Server
from coserve.engine.lora_server.server import LoraServer, ReadPairs
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.lora_server.transport import EngineTransport, ServerTransport, join_engine, join_servers
from coserve.kernels.lora.segments import Segments
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.host_stream import mailbox_ends
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import packed, save_peft

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = ((3, BOTH, ["q_proj", "o_proj"]), (5, BOTH[1:], []))
REFS = [AdapterRef("one", 1), AdapterRef("two", 1)]


def start_message(
    spec: BaseSpec, data: Path = Path(), deadline: float = 60.0, device: str = "cpu", mailbox: Mailbox | None = None
) -> StartServer:
    """The settings of an engine's only server."""
    return StartServer(
        index=0,
        servers=1,
        ep=1,
        start=1,
        rendezvous="",
        deadline=deadline,
        spec=spec,
        data_dir=str(data),
        device=device,
        threads=torch.get_num_threads(),
        logs=LogSettings(),
        mailbox=mailbox,
    )


class Ended:
    """Ends a server's thread in place of its process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def kill(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        return 0


def in_threads(
    base: Base,
    folder: Path,
    servers: int,
    told: Answered,
    *,
    ep: int = 1,
    readers: Callable[[ReadPairs], ReadPairs] = lambda read: read,
    deadline: float = 60.0,
    mailboxes: bool = False,
    ends: Callable[[ServerTransport], ServerTransport] = lambda end: end,
) -> RunningServers:
    """Servers as threads of this process; gloo connects them as it connects processes, or mailboxes do, in host memory.
    `readers` wraps how they read adapters, and `ends` their ends of transports. `deadline`: seconds that a message may
    take; a thread that ends leaves its group open."""
    found = list[Server]()
    pairs = _mailboxes(base, servers) if mailboxes else _gloo(base, folder, servers, deadline)
    for index in range(servers):
        ours, theirs = socket.socketpair()
        part = part_of(base.spec, index, servers, ep)
        read = readers(PairsReader(part, base.spec, DataFolder(folder), base.device))
        channel = Channel[AnyFromServer, AnyToServer](theirs, msgspec.msgpack.Decoder(AnyToServer))
        server = LoraServer(channel, ends(pairs[index][1]), HeldPairs(part.sites, 8, base.device), read, 1)
        Thread(target=run, args=(server, channel), daemon=True).start()
        own = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
        found.append(Server(Ended(ours), own, part))
    return RunningServers(1, found, [ours for ours, _ in pairs], told, deadline)


def _gloo(base: Base, folder: Path, servers: int, deadline: float) -> Sequence[tuple[EngineTransport, ServerTransport]]:
    """The engine's end and the server's, for each server."""
    settings = str(folder / "ranks"), servers, base.device, deadline
    join = lambda index: join_engine(settings[0], index, *settings[1:])
    with ThreadPoolExecutor(servers) as ranks:
        theirs = ranks.map(join, range(servers))
        return [*zip(join_servers(*settings), theirs, strict=True)]


def _mailboxes(base: Base, servers: int) -> Sequence[tuple[EngineTransport, ServerTransport]]:
    return [mailbox_ends(*mailbox_sizes(base.spec, 64)) for _ in range(servers)]


def run(server: LoraServer, channel: Channel[AnyFromServer, AnyToServer]) -> None:
    with suppress(PeerLost), closing(channel):
        server.run(torch.float32)


def save_adapters(family: str, base: Base, folder: Path) -> list[LoraWeights]:
    found = []
    for ref, (rank, parameters, modules) in zip(REFS, KINDS, strict=True):
        path = DataFolder(folder).adapter(ref)
        path.mkdir(parents=True)
        save_peft(tiny_family(family), path, seed=rank, r=rank, target_modules=modules, target_parameters=parameters)
        found.append(load_adapter(path, base.spec, dtype=torch.float32))
    return found


def digests_of(folder: Path) -> AdapterDigests:
    return AdapterDigests(digest_file(folder, ADAPTER_WEIGHTS), digest_file(folder, ADAPTER_CONFIG))


def logits_below(base: Base, weights: LoraWeights, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far the logits of a request's tokens are below those of the likeliest ones at most, given the tokens before,
    by the coupled path."""
    given = torch.tensor([*prompt, *tokens[:-1]])
    batch = LoraBatch(Segments((0, len(given)), (0,)), (weights,), GROUPED)
    logits_TV = packed(base, [given], batch)[0][len(prompt) - 1 :]
    return float((logits_TV.max(1).values - logits_TV[torch.arange(len(tokens)), torch.tensor(tokens)]).max())


@contextmanager
def shared_servers(folder: Path, count: int = 1, device: str = "cpu") -> Iterator[list[str]]:
    """`coserve lora-server`, which listens: its log, to the end."""
    command = ["lora-server", str(folder), "--servers", str(count), "--device", device]
    keeper = subprocess.Popen([sys.executable, "-m", "coserve", *command], stderr=subprocess.PIPE, text=True)
    assert keeper.stderr is not None
    log, listening = list[str](), 0
    with keeper:
        try:
            while listening < count:
                log.append(keeper.stderr.readline())
                assert log[-1], log
                listening += "listens" in log[-1]
            Thread(target=log.extend, args=(keeper.stderr,)).start()
            yield log
        finally:
            keeper.terminate()


def listener(folder: Path, index: int = 0) -> int:
    """The process that listens for a server's engines."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(folder / str(index)))
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


@contextmanager
def engine_in_a_step(data: Path, folder: Path, device: str = "cpu", timeout: float = 60.0) -> Iterator[int]:
    """A further engine's process, of another base, in the middle of a step with a server of `folder`: its pid."""
    command = [sys.executable, "-m", "tests.support.lora_engine_process", str(data), str(folder), device, str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "in a step\n"
            yield process.pid
        finally:
            process.kill()


def server_pid() -> int:
    """The youngest LoRA server that this process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"lora_server.process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return max(found)
