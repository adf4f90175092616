"""LoRA servers: what processes without base weights compute equals the coupled path, and what happens when one is
lost."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import torch
import torch.distributed as dist

from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.types import AdapterDigests, AdapterRef, SiteSpec
from coserve.engine.lora_server.connect import layers_of
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer, BeginStep
from coserve.engine.lora_server.running import Answered, RunningServers, Server
from coserve.engine.lora_server.server import LoraServer
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.lora_server.transport import GlooTransport, gloo_group
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import packed, save_peft, tokens_of

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = ((3, BOTH, ["q_proj", "o_proj"]), (5, BOTH[1:], []))
REFS = [AdapterRef("one", 1), AdapterRef("two", 1)]


class Ended:
    """Ends a server's thread in place of its process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def kill(self) -> None:
        self._end.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        return 0


def in_threads(base: Base, folder: Path, servers: int, told: Answered) -> RunningServers:
    """Servers as threads of this process; gloo connects them as it connects processes."""
    found, ranks = list[Server](), ThreadPoolExecutor(servers + 1)
    groups = [ranks.submit(gloo_group, str(folder / "ranks"), rank, servers + 1, 60.0) for rank in range(servers + 1)]
    for index in range(servers):
        ours, theirs = socket.socketpair()
        sites = layers_of(base.spec, index, servers)

        def read(ref: AdapterRef, digests: AdapterDigests | None, sites: dict[str, SiteSpec] = sites):
            path = DataFolder(folder).adapter(ref)
            weights = load_adapter(path, base.spec, device="cpu", dtype=torch.float32, digests=digests)
            return {name: pair for name, pair in weights.experts.items() if name in sites}

        channel = Channel[AnyFromServer, AnyToServer](theirs, msgspec.msgpack.Decoder(AnyToServer))
        transport = GlooTransport(groups[index + 1].result(), 0, 60.0)
        server = LoraServer(channel, transport, HeldPairs(sites, 8, base.device), read, 1)
        Thread(target=run, args=(server, channel), daemon=True).start()
        own = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
        found.append(Server(Ended(ours), own, sites))
    transports = [GlooTransport(groups[0].result(), index + 1, 60.0) for index in range(servers)]
    ranks.shutdown()
    return RunningServers(1, found, transports, told)


def run(server: LoraServer, channel: Channel[AnyFromServer, AnyToServer]) -> None:
    with suppress(PeerLost), closing(channel):
        server.run(torch.float32)


def save_adapters(family: str, base: Base, folder: Path) -> list[LoraWeights]:
    found = []
    for ref, (rank, parameters, modules) in zip(REFS, KINDS, strict=True):
        path = DataFolder(folder).adapter(ref)
        path.mkdir(parents=True)
        save_peft(tiny_family(family), path, seed=rank, r=rank, target_modules=modules, target_parameters=parameters)
        found.append(load_adapter(path, base.spec, device="cpu", dtype=torch.float32))
    return found


def without_experts(weights: LoraWeights, slot: int) -> LoraWeights:
    sites = {name: pair for name, pair in weights.sites.items() if name not in weights.experts}
    return LoraWeights(weights.settings, sites, slot)


@pytest.mark.parametrize(("family", "servers"), [("qwen3_moe", 1), ("mixtral", 2), ("gpt_oss", 2)])
@pytest.mark.filterwarnings("ignore")
def test_terms_of_servers_equal_the_coupled_path(family: str, servers: int, tmp_path: Path) -> None:
    """Two adapters of different ranks and a sequence without one; then one adapter apart, the other one coupled."""
    base = wrap_base(tiny_family(family), name=family)
    adapters = save_adapters(family, base, tmp_path)
    segments, sequences = Segments((0, 11, 20, 27, 32), (0, -1, 1, 0)), [tokens_of(n, seed=n) for n in (11, 9, 7, 5)]
    expected = packed(base, sequences, LoraBatch(segments, tuple(adapters), GROUPED))
    own = LoraServers(servers, lambda start, told: in_threads(base, tmp_path, servers, told), 60.0)
    with closing(own):
        own.wait()
        for load in [own.load(ref, None) for ref in REFS]:
            load()
        slots = [own.slot(ref) for ref in REFS]
        assert min(slots) >= 0
        assert [info.adapters for info in own.states()] == [2] * servers
        apart = [without_experts(weights, slot) for weights, slot in zip(adapters, slots, strict=True)]
        for chosen in (apart, [apart[0], adapters[1]], [adapters[0], apart[1]], adapters):
            found = packed(base, sequences, LoraBatch(segments, tuple(chosen), GROUPED, remote=own))
            for one, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(one, wanted, atol=2e-5, rtol=1e-5)
        left = packed(base, sequences, LoraBatch(segments, tuple(replace(w, remote=-1) for w in apart), GROUPED))
        assert (left[0] - expected[0]).abs().max() > 0.1, "terms that are left out would not be seen"
        own.dropped(REFS[0])
        assert own.slot(REFS[0]) == -1 and own.slot(REFS[1]) == slots[1]


def test_a_server_takes_no_message_of_another_start_or_table() -> None:
    """Steps name what they know of the table; a slot that was filled later, or emptied, is refused."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    held = HeldPairs(layers_of(base.spec, 0, 1), 4, base.device)
    held.put(2, {})
    known = held.version
    assert held.step((0, 3), (2,), known)
    held.clear(2)
    with pytest.raises(LookupError, match="slots"):
        held.step((0, 3), (2,), known)
    held.put(2, {})
    with pytest.raises(LookupError, match="slots"):
        held.step((0, 3), (2,), known)
    with pytest.raises(LookupError, match="version"):
        held.step((0, 3), (2,), held.version + 1)
    ours, theirs = socket.socketpair()
    channel = Channel[AnyFromServer, AnyToServer](theirs, msgspec.msgpack.Decoder(AnyToServer))
    with closing(ours), closing(channel):
        engine = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
        engine.send(BeginStep(start=1, step=1, version=held.version, bounds=(0, 3), slots=(2,)))
        with closing(engine), pytest.raises(LookupError, match="start 2"):
            LoraServer(channel, GlooTransport(dist.group.WORLD, 0, 1.0), held, lambda *_: {}, 2).run(torch.float32)
