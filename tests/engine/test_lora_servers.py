"""LoRA servers: what processes without base weights compute equals the coupled path, and what happens when one is
lost."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
import torch.distributed as dist

from coserve.core.errors import AdapterNotFound, LoraServerLost, StorageBusy
from coserve.core.link.channel import Channel
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.messages import AnyFromServer, AnyToServer, BeginStep
from coserve.engine.lora_server.placement import ServerPart, part_of
from coserve.engine.lora_server.reading import PairsReader, PairsRuns
from coserve.engine.lora_server.running import Answered, RunningServers
from coserve.engine.lora_server.server import LoraServer, ReadPairs
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.lora_server.transport import GlooServerEnd
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.packed_header import PACKED_FILE
from coserve.lora.files.tensorfile import digest_file
from coserve.lora.store.files import load_packed
from coserve.lora.store.packed_files import PackedFiles, PackedForm
from coserve.lora.store.reads import LoadTimes
from coserve.model.base import wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import packed, tokens_of
from tests.support.lora_servers import REFS, in_threads, save_adapters


def without_experts(weights: LoraWeights, slot: int) -> LoraWeights:
    sites = {name: pair for name, pair in weights.sites.items() if name not in weights.experts}
    return LoraWeights(weights.settings, sites, slot)


@pytest.mark.parametrize(
    ("family", "servers", "ep", "mailboxes"),
    [
        ("qwen3_moe", 1, 1, False),
        ("qwen3_moe", 1, 1, True),
        ("qwen3_moe", 3, 3, False),
        ("mixtral", 2, 1, False),
        ("mixtral", 2, 2, True),
        ("gpt_oss", 2, 1, False),
        ("gpt_oss", 4, 2, True),
        ("deepseek_v3", 2, 2, True),
        ("olmoe", 2, 1, False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_terms_of_servers_equal_the_coupled_path(
    family: str, servers: int, ep: int, mailboxes: bool, tmp_path: Path
) -> None:
    """However layers and experts are divided. Two adapters of different ranks and a sequence without one; then one
    adapter apart, the other one coupled; then a single token, so that some servers have none of its experts."""
    base = wrap_base(tiny_family(family), name=family)
    adapters = save_adapters(family, base, tmp_path)
    segments, sequences = Segments((0, 11, 20, 27, 32), (0, -1, 1, 0)), [tokens_of(n, seed=n) for n in (11, 9, 7, 5)]
    expected = packed(base, sequences, LoraBatch(segments, tuple(adapters), GROUPED))
    make = lambda start, told: in_threads(base, tmp_path, servers, told, ep=ep, mailboxes=mailboxes)
    gone = Event()
    own = LoraServers(servers, make, 60.0, gone.set)
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
        token, one = [tokens_of(1, seed=9)], Segments((0, 1), (0,))
        found = packed(base, token, LoraBatch(one, (apart[1],), GROUPED, remote=own))
        wanted = packed(base, token, LoraBatch(one, (adapters[1],), GROUPED))
        torch.testing.assert_close(found[0], wanted[0], atol=2e-5, rtol=1e-5)
        left = packed(base, sequences, LoraBatch(segments, tuple(replace(w, remote=-1) for w in apart), GROUPED))
        assert (left[0] - expected[0]).abs().max() > 0.1, "terms that are left out would not be seen"
        own.dropped(REFS[0])
        assert own.slot(REFS[0]) == -1 and own.slot(REFS[1]) == slots[1] and not gone.is_set()
    assert gone.is_set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_first_layers_answer_while_the_last_ones_are_read(tmp_path: Path) -> None:
    """The engine may use an adapter when its first layers are there; a step waits for the others. If these cannot be
    read, the server is lost."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    adapters = save_adapters("mixtral", base, tmp_path)
    read_on, broken = Event(), list[bool]()
    held = Event()

    def slowly(read: ReadPairs) -> ReadPairs:
        def runs(found: PairsRuns) -> Iterator[Mapping[str, LoraPair]]:
            for place, run in enumerate(found.runs):
                if place and not held.is_set():
                    held.set()
                    read_on.wait()
                if place and broken:
                    raise StorageBusy("gone")
                yield run

        return lambda ref, digests: replace(found := read(ref, digests), runs=runs(found))

    segments, sequences = Segments((0, 6), (0,)), [tokens_of(6, seed=1)]
    expected = packed(base, sequences, LoraBatch(segments, (adapters[0],), GROUPED))[0]
    start = lambda start, told: in_threads(base, tmp_path, 1, told, readers=slowly, deadline=8.0)
    with closing(LoraServers(1, start, 60.0)) as own:
        own.wait()
        own.load(REFS[0], None)()
        assert held.wait(60.0)
        apart = LoraBatch(segments, (without_experts(adapters[0], own.slot(REFS[0])),), GROUPED, remote=own)
        with ThreadPoolExecutor(1) as other:
            found = other.submit(lambda: packed(base, sequences, apart)[0])
            assert not wait([found], 0.2).done
            read_on.set()
            torch.testing.assert_close(found.result(), expected, atol=2e-5, rtol=1e-5)
        broken.append(True)
        own.load(REFS[1], None)()
        late = LoraBatch(segments, (without_experts(adapters[1], own.slot(REFS[1])),), GROUPED, remote=own)
        with pytest.raises(LoraServerLost):
            packed(base, sequences, late)


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_does_not_answer_a_load_is_lost(tmp_path: Path) -> None:
    """It hangs, and no step asks it for anything: every adapter's first request would wait for it. If it reads others
    meanwhile, it is slow."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    save_adapters("mixtral", base, tmp_path)
    found, go_on, told = list[RunningServers](), Event(), Event()

    def hangs(read: ReadPairs) -> ReadPairs:
        def held(ref: AdapterRef, digests: AdapterDigests | None) -> PairsRuns:
            if ref != REFS[1]:
                go_on.wait()
            return read(ref, digests)

        return held

    def start(number: int, told: Answered) -> RunningServers:
        found.append(in_threads(base, tmp_path, 1, told, readers=hangs, mailboxes=True))
        return found[-1]

    with closing(LoraServers(1, start, 0.1)) as own:
        own.wait()
        own.notify(told.set)
        slow, _ = own.load(REFS[0], None), own.load(REFS[1], None)
        while own.slot(REFS[1]) < 0:
            assert told.wait(60.0)
            told.clear()
        slow()
        lost = found[0].lost
        own.load(REFS[0], None)()
        go_on.set()
        assert not lost and found[0].why == "LoRA server 0 did not read an adapter in time"


@pytest.mark.filterwarnings("ignore")
def test_an_answer_to_a_load_that_was_dropped_is_not_one_to_the_next_load(tmp_path: Path) -> None:
    """Neither that it was dropped, which is so no more, nor that it is there, which it is not yet."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    save_adapters("mixtral", base, tmp_path)
    begun, go_on = [Event() for _ in range(3)], [Event() for _ in range(2)]
    count = iter(range(3))

    def in_turn(read: ReadPairs) -> ReadPairs:
        def held(ref: AdapterRef, digests: AdapterDigests | None) -> PairsRuns:
            number = next(count)
            begun[number].set()
            if number < 2:
                go_on[number].wait()
            return read(ref, digests)

        return held

    start = lambda start, told: in_threads(base, tmp_path, 1, told, readers=in_turn)
    with closing(LoraServers(1, start, 60.0)) as own:
        own.wait()
        own.load(REFS[0], None)
        assert begun[0].wait(60.0)
        own.dropped(REFS[0])
        loaded = own.load(REFS[0], None)
        assert begun[1].wait(60.0)
        other = own.load(REFS[1], None)  # a thread is free for it once the first answer is sent
        go_on[0].set()
        assert begun[2].wait(60.0)
        other()
        assert own.slot(REFS[0]) == -1 and own.slot(REFS[1]) >= 0
        go_on[1].set()
        loaded()
        assert own.slot(REFS[0]) >= 0 and not own.troubles


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_parts_of_an_adapter_are_read_from_peft_and_packed_files(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all experts and of some, in runs of layers; a packed file is used where there is one."""
    base = wrap_base(tiny_family(family), name=family)
    spec, folder = base.spec, DataFolder(tmp_path)
    weights = save_adapters(family, base, tmp_path)[0]
    path = folder.adapter(REFS[0])
    digests = AdapterDigests(digest_file(path, ADAPTER_WEIGHTS), digest_file(path, ADAPTER_CONFIG))
    whole = part_of(spec, 0, 1, 1)
    experts = whole.experts // 2
    sites = {name: msgspec.structs.replace(site, experts=experts) for name, site in whole.sites.items()}
    for files in ("peft", "packed"):
        for part in (whole, ServerPart(sites, experts, experts)):
            found = PairsReader(part, spec, folder, base.device)(REFS[0], digests)
            runs, size = [dict(run) for run in found.runs], 0
            assert [sorted({spec.experts[name].layer for name in run}) for run in runs] == [[0], [1]]
            pairs = {name: pair for run in runs for name, pair in run.items()}
            assert pairs.keys() == weights.experts.keys() and found.rank == 3
            for name, pair in pairs.items():
                like = weights.experts[name]
                assert pair.experts == part.experts and pair.scaling == like.scaling
                for own, other in ((pair.a_RD, like.a_RD), (pair.b_OR, like.b_OR)):
                    expected = other.view(like.experts, -1, other.shape[1])[part.first : part.first + part.experts]
                    assert torch.equal(own, expected.flatten(0, 1))
                    size += own.nbytes
            assert found.bytes == size
        if files == "peft":
            packed_files = PackedFiles(PackedForm(spec.fingerprint, base.dtype, for_kernels=False), LoadTimes())
            packed_files.load(path, digests, lambda: load_packed(path, spec, dtype=base.dtype, for_kernels=False))
            packed_files.close()
            assert (path / PACKED_FILE).exists()
            monkeypatch.delattr("coserve.engine.lora_server.reading.load_adapter")


class Tables:
    """`ExpertSlots` of a GPU that is not there."""

    put = clear = lambda *_: pytest.fail("a reader changes no tables")

    def __init__(self, *_: object) -> None: ...


def test_readers_leave_a_gpu_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tables nor streams: a wait for one, with the lock that steps need, would hold them up."""
    monkeypatch.setattr("coserve.engine.lora_server.terms.ExpertSlots", Tables)
    spec = wrap_base(tiny_family("mixtral"), name="mixtral").spec
    held, pair = HeldPairs(spec.experts, 1, torch.device("cuda")), LoraPair(torch.zeros(1, 2), torch.zeros(2, 1), 1.0)
    held.reserve(0, 1)
    assert held.add(0, 1, {next(iter(spec.experts)): pair}, 1) == 1
    held.end(0, 1)


def test_a_server_takes_no_message_of_another_start_or_table() -> None:
    """Steps name what they know of the table; a slot that was filled later, or emptied, is refused."""
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    held = HeldPairs(part_of(base.spec, 0, 1, 1).sites, 4, base.device)
    held.reserve(2, 1)
    known = held.add(2, 1, {}, 0)
    assert held.step((0, 3), (2,), known)
    held.clear(2)
    with pytest.raises(LookupError, match="slots"):
        held.step((0, 3), (2,), known)
    held.reserve(2, 2)
    with pytest.raises(AdapterNotFound):
        held.add(2, 1, {}, 0)
    assert held.add(2, 2, {}, 0) > known
    with pytest.raises(LookupError, match="slots"):
        held.step((0, 3), (2,), known)
    with pytest.raises(LookupError, match="version"):
        held.step((0, 3), (2,), held.version + 1)
    ours, theirs = socket.socketpair()
    channel = Channel[AnyFromServer, AnyToServer](theirs, msgspec.msgpack.Decoder(AnyToServer))
    with closing(ours), closing(channel):
        engine = Channel[AnyToServer, AnyFromServer](ours, msgspec.msgpack.Decoder(AnyFromServer))
        engine.send(BeginStep(start=1, version=held.version, bounds=(0, 3), slots=(2,)))
        with closing(engine), pytest.raises(LookupError, match="start 2"):
            LoraServer(
                channel,
                GlooServerEnd(dist.group.WORLD, 0, base.device, 1.0),
                held,
                PairsReader(part_of(base.spec, 0, 1, 1), base.spec, DataFolder(Path()), base.device),
                2,
            ).run(torch.float32)
