"""LoRA servers: what processes without base weights compute equals the coupled path, and what happens when one is
lost."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from coserve.core.link.channel import Channel
from coserve.engine.lora_server.connect import layers_of
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer, BeginStep
from coserve.engine.lora_server.server import LoraServer
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.lora_server.transport import GlooTransport
from coserve.kernels.lora.segments import Segments
from coserve.model.base import wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.families import tiny_family
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import packed, tokens_of
from tests.support.lora_servers import REFS, in_threads, save_adapters


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
            LoraServer(channel, GlooTransport(dist.group.WORLD, 0, base.device, 1.0), held, lambda *_: {}, 2).run(
                torch.float32
            )
