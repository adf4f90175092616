"""A LoRA server on a GPU of its own: its terms are those of the engine's GPU, and the tokens those of the coupled path.
With `-s` it prints what each exchange brought, and how long each part took; servers log to standard error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import Tokens
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.start import load_on_servers, make_servers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.parts import EngineParts
from coserve.engine.worker import build_engine
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.start import make_start
from coserve.generate.generator import Generator
from coserve.kernels.lora.experts.interface import RemoteTerms
from coserve.kernels.lora.segments import Segments
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.load import load_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.generation import prompt, request
from tests.support.local_link import local_pair
from tests.support.lora_engine import Engine
from tests.support.lora_servers import REFS, digests_of, logits_below, save_adapters, server_pid, shared_servers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda:0"
SEGMENTS = Segments((0, 5, 9), (0, 1))
COLD = 60.0
"""Seconds in which a server compiles its kernels."""
CAPTURING = 30.0
"""Most seconds for captures: the graphs with servers are among the first ones."""
ROUNDING = 0.25
"""Most by which the float32 logit of a token may be below the largest. On a CPU in bfloat16 it is 0.08, and with half
an adapter's scaling at least 0.4."""
Found = list[list[int]]


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.2f} s", flush=True)


def configured(folder: Path, servers: int, ep: int, timeout: float) -> Config:
    return Config(
        data_dir=folder / "data",
        device=DEVICE.partition(":")[0],
        compile="off",
        policy="slack",
        kv_tokens=512,
        host_adapter_bytes=1 << 28,
        lora_server=servers,
        lora_server_ep=ep,
        lora_server_timeout=timeout,
    )


def served(
    folder: Path,
    servers: int = 0,
    ep: int = 1,
    *,
    timeout: float = COLD,
    stop: Callable[[int], None] | None = None,
    mailboxes: bool = True,
    shared: Path | None = None,
) -> Found:
    """The tokens of each adapter's request and one without, in fp32; the servers hold both adapters. `stop` is called
    with the number of tokens of the first request so far; it has the servers started again. `shared`:
    the folder of servers that others use, too."""

    async def run() -> Found:
        config = replace(configured(folder, servers, ep, timeout), lora_server_at=shared)
        with timed(f"{servers} servers: an engine starts"):
            base = load_base(str(folder / "base"), device=DEVICE, dtype="float32")
            ours, theirs = local_pair()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coserve.engine.parts.make_servers", partial(make_servers, by_mailboxes=mailboxes))
                engine, _ = build_engine(base, config, theirs)
        running = asyncio.create_task(engine.run())
        own, found = Engine(ours, running, config.data_dir), Found()
        try:
            for ref, at in zip([*REFS, None], [stop, None, None], strict=True):
                with timed(f"request of {ref}"):
                    found.append(await own.tokens(ref, at or (lambda _: None)))
            if servers:
                with timed("the servers hold both adapters"):
                    starts = 1 if stop is None else 2
                    await own.server(lambda info: info.starts >= starts and info.adapters == len(REFS))
        finally:
            print("the engine's notes:", *own.troubles, sep="\n  ", flush=True)
            ours.send(Shutdown())
            await running
        by_gloo = any("through host memory" in trouble for trouble in own.troubles)
        assert by_gloo == (servers > 0 and not mailboxes), own.troubles
        return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and its adapters."""
    folder = tmp_path_factory.mktemp("servers")
    tiny_family("mixtral").save_pretrained(folder / "base")
    save_adapters("mixtral", load_base(str(folder / "base"), device="cpu", dtype="float32"), folder / "data")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Found:
    """The tokens of the coupled path, which are those of a server by gloo. Kernels are compiled here: later servers,
    which may take less time, find them."""
    coupled = served(folder)
    assert served(folder, 1, mailboxes=False) == coupled, "by gloo"
    return coupled


@pytest.mark.parametrize("mailboxes", [False, True])
def test_terms_of_each_exchange_are_those_of_one_gpu(mailboxes: bool, folder: Path) -> None:
    base, device = load_base(str(folder / "base"), device=DEVICE, dtype="float32"), torch.device(DEVICE)
    part = part_of(base.spec, 0, 1, 1)
    read = PairsReader(part, base.spec, DataFolder(folder / "data"), device)
    held = HeldPairs(part.sites, len(REFS), device)
    for slot, ref in enumerate(REFS):
        held.reserve(slot, slot)
        pairs = read(ref, None)
        for run in pairs.runs:
            held.add(slot, slot, run, pairs.rank)
        held.end(slot, slot)
    servers = make_servers(base, configured(folder, 1, 1, COLD), 64, by_mailboxes=mailboxes)
    assert servers is not None
    wrong, generator = list[str](), torch.Generator().manual_seed(7)

    def compare(what: str, found: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
        with timed(what):
            found_, wanted_ = found().flatten().cpu(), wanted.flatten().cpu()
        at, most = (found_ - wanted_).abs().argmax(), wanted_.abs().max()
        line = f"{what}: {found_[at]:g} in place of {wanted_[at]:g} at {at} of {len(wanted_)}, {most:g} at most"
        print(line, flush=True)
        if not torch.allclose(found_, wanted_, atol=1e-4 * float(most), rtol=1e-4):
            wrong.append(line)

    with closing(servers):
        with timed("servers start"):
            servers.wait()
        with timed("servers read"):
            for load in [servers.load(ref, None) for ref in REFS]:
                load()
        assert len(servers.troubles) == (0 if mailboxes else 1), servers.troubles
        for again in range(2):
            step = servers.step(SEGMENTS, [servers.slot(ref) for ref in REFS])
            own = held.step(SEGMENTS.bounds, SEGMENTS.adapters, held.version)
            assert step is not None
            for up, down in zip(*[iter(part.sites)] * 2, strict=True):
                spec, tokens = part.sites[up], SEGMENTS.bounds[-1]
                x_ND = torch.randn(tokens, spec.in_features, generator=generator).to(device)
                h_NKI = torch.randn(tokens, spec.chosen, part.sites[down].in_features, generator=generator).to(device)
                scores_NE = torch.rand(tokens, part.experts, generator=generator)
                weights_NK, chosen_NK = (x.to(device) for x in scores_NE.topk(spec.chosen))
                terms = step.gate_up(up, x_ND, chosen_NK)
                compare(f"step {again}, {up}", terms, own.gate_up(up, x_ND, chosen_NK))
                terms = step.down(down, h_NKI.flatten(0, 1), weights_NK)
                compare(f"step {again}, {down}", terms, own.down(down, h_NKI.flatten(0, 1), weights_NK))
        assert not servers.losses
    assert not wrong, f"the first of {len(wrong)} that differ: {wrong[0]}"


def test_a_graph_of_exchanges_is_right_each_time_and_after_a_loss_in_its_step(folder: Path) -> None:
    """Of 12 rows for steps of 9, with other inputs each time; a step beside it has no graph."""
    base, device, rows = load_base(str(folder / "base"), device=DEVICE, dtype="float32"), torch.device(DEVICE), 12
    part = part_of(base.spec, 0, 1, 1)
    read = PairsReader(part, base.spec, DataFolder(folder / "data"), device)
    held = HeldPairs(part.sites, len(REFS), device)
    for slot, ref in enumerate(REFS):
        held.reserve(slot, slot)
        for run in (pairs := read(ref, None)).runs:
            held.add(slot, slot, run, pairs.rank)
        held.end(slot, slot)
    ups, downs = [*part.sites][::2], [*part.sites][1::2]
    chosen = part.sites[ups[0]].chosen
    inputs = {site: torch.zeros(rows, part.sites[site].in_features, device=device) for site in ups}
    inputs |= {site: torch.zeros(rows * chosen, part.sites[site].in_features, device=device) for site in downs}
    chosen_TK = torch.zeros(rows, chosen, dtype=torch.int64, device=device)
    weights_TK = torch.zeros(rows, chosen, device=device)

    def terms(of: RemoteTerms) -> list[torch.Tensor]:
        found = []
        for up, down in zip(ups, downs, strict=True):
            found.append(of.gate_up(up, inputs[up], chosen_TK)())
            found.append(of.down(down, inputs[down], weights_TK)())
        return found

    def draw() -> list[torch.Tensor]:
        """New inputs; return the terms that are expected."""
        for x in inputs.values():
            x.normal_()
        for to, drawn in zip((weights_TK, chosen_TK), torch.rand(rows, part.experts).topk(chosen), strict=True):
            to.copy_(drawn)
        own, found = held.step((*SEGMENTS.bounds, rows), (*SEGMENTS.adapters, -1), held.version), []
        for up, down in zip(ups, downs, strict=True):
            found += [own.gate_up(up, inputs[up], chosen_TK), own.down(down, inputs[down], weights_TK)]
        return found

    servers, changed = make_servers(base, configured(folder, 1, 1, COLD), 64), threading.Event()
    assert servers is not None
    servers.notify(changed.set)
    with closing(servers):
        recorded = servers.recorded()
        assert recorded is not None, servers.troubles
        for load in [servers.load(ref, None) for ref in REFS]:
            load()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            assert not any(map(bool, [one.any() for one in terms(recorded)])), "sent before the capture"
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = terms(recorded)
        slots = [servers.slot(ref) for ref in REFS]

        def check() -> None:
            for again in range(4):
                wanted = draw()
                torch.cuda.synchronize(device)
                if again == 2:
                    step = servers.step(Segments((*SEGMENTS.bounds, rows), (0, 1, -1)), slots)
                    assert step is not None
                    got = terms(step)
                else:
                    recorded.begin(SEGMENTS, slots, rows)
                    graph.replay()
                    recorded.launched()
                    got = found
                torch.cuda.synchronize(device)
                for one, other in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)

        with timed("a graph's exchanges"):
            check()
        os.kill(pid := server_pid(), signal.SIGSTOP)
        recorded.begin(SEGMENTS, slots, rows)
        graph.replay()
        recorded.launched()
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        with timed("a lost server's step"):
            torch.cuda.synchronize(device)
        assert servers.losses == 1
        with timed("servers start again"):
            while not all(info.starts == 2 and info.adapters == len(REFS) for info in servers.states()):
                changed.wait()
                changed.clear()
        check()


def graphed(folder: Path) -> tuple[Generator, GraphExecutor, LoraServers]:
    """A generator in bfloat16, with a server. Its graphs are not captured."""
    base = load_base(str(folder / "base"), device=DEVICE, dtype="bfloat16")
    config = replace(configured(folder, 1, 1, COLD), compile="on", max_running=4, step_tokens=64)
    parts = EngineParts(base, config)
    budget, own = parts.host_budget(), parts.servers
    assert own is not None
    store = AdapterStore(
        load_on_servers(parts.read_adapter, own),
        budget,
        memory=parts.host_memory(budget),
        mirror=own,
        placed=base.complete_scales,
        remote=own,
    )
    kv = KvCache.for_base(base, 2048, 16)
    with timed("layers are compiled"):
        start = make_start(
            base,
            kv,
            max_running=4,
            lora_backend=parts.lora_backend,
            compile=True,
            step_tokens=64,
            remote=own,
        )
    assert start.graphs is not None, start.notes
    return Generator(base, store, kv, start.executor, max_running=4, step_tokens=64), start.graphs, own


def test_steps_of_graphs_over_a_server_generate_likely_tokens(tmp_path: Path) -> None:
    """Likely by the coupled path in float32, given the tokens before: graphs of experts need bfloat16, whose rounding
    may choose another token where two are nearly as likely."""
    # All experts are chosen, so that rounding changes no choice of the router.
    tiny_family("mixtral", num_experts_per_tok=4).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    exact = load_base(str(tmp_path / "base"), device="cpu", dtype="float32")
    weights = dict(zip(REFS, save_adapters("mixtral", exact, tmp_path / "data"), strict=True))
    requests = [request(f"{n} {ref}", prompt(n), ref=ref) for n in (6, 13) for ref in REFS]
    gen, executor, servers = graphed(tmp_path)

    def check(what: str, at: Callable[[], None] | None = None) -> None:
        found = {one.id: list[int]() for one in requests}
        for one in requests:
            gen.add(one)
        with timed(what):
            while gen.running:
                for message in gen.step():
                    assert isinstance(message, Tokens), message
                    found[message.id].extend(message.tokens)
                if at is not None and min(map(len, found.values())) >= 3:
                    at()
                    at = None
        for one in requests:
            assert one.adapter is not None and len(found[one.id]) == one.sampling.max_tokens
            below = logits_below(exact, weights[one.adapter], one.prompt, found[one.id])
            print(f"{what}, {one.id}: {found[one.id]}, at most {below:.3f} below the likeliest", flush=True)
            assert below <= ROUNDING, what

    def stop() -> None:
        os.kill(pid := server_pid(), signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    with closing(servers):
        check("without graphs")
        with timed("captures"), torch.no_grad():
            until = time.monotonic() + CAPTURING
            while gen.prepare() and time.monotonic() < until:
                pass
        assert not executor.troubles and any(footprint.remote for _, footprint in executor.decode_graphs)
        for again in range(2):
            check(f"with graphs, {again}")
        assert not servers.losses
        check("a server is lost in a graph's step", stop)
        assert servers.losses == 1


@pytest.mark.parametrize(("servers", "ep"), [(1, 1), (2, 2), (2, 1)])
def test_servers_on_other_gpus_compute_the_coupled_tokens(servers: int, ep: int, folder: Path, expected: Found) -> None:
    if torch.cuda.device_count() <= servers:
        pytest.skip(f"needs {servers + 1} GPUs")
    assert served(folder, servers, ep) == expected


def test_an_engine_beside_another_one_has_the_coupled_tokens(folder: Path, expected: Found, tmp_path: Path) -> None:
    """The other engine has read the first adapter, whose pairs they share."""
    base, at = load_base(str(folder / "base"), device=DEVICE, dtype="float32"), tmp_path / "servers"
    with shared_servers(at, device="cuda"):
        other = make_servers(base, replace(configured(folder, 1, 1, COLD), lora_server_at=at), 64)
        assert other is not None
        with closing(other):
            other.wait()
            other.load(REFS[0], digests_of(DataFolder(folder / "data").adapter(REFS[0])))()
            assert served(folder, 1, shared=at) == expected
            assert not other.losses


@pytest.mark.parametrize("killed", [True, False])
def test_a_gpu_that_waits_for_a_server_goes_on_when_it_is_lost(killed: bool, folder: Path, expected: Found) -> None:
    """The server stops in a step, so that the engine's GPU waits; then it is killed, or found by the timeout. The next
    one opens the same mailbox."""

    def stop(tokens: int) -> None:
        if tokens == 3:
            pid = server_pid()
            os.kill(pid, signal.SIGSTOP)
            if killed:
                threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    assert served(folder, 1, timeout=8.0, stop=stop) == expected
