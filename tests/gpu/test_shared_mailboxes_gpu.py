"""A LoRA server on the last GPU that several engines reach over mailboxes: what is right for each, and what the end of
one means for the others. With `-s` it prints how long each part took; the server's log is printed at its end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.config import Config
from coserve.core.health import LoraServerInfo
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.start import make_servers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_servers import REFS, digests_of, engine_in_a_step, listener, save_adapters, shared_servers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = torch.device("cuda:0")
SEGMENTS = Segments((0, 5, 9), (0, 1))
TIMEOUT = 40.0
STEPS = 50


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.2f} s", flush=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two adapters, and their base."""
    folder = tmp_path_factory.mktemp("data")
    tiny_family("mixtral").save_pretrained(folder / "base")
    save_adapters("mixtral", load_base(str(folder / "base"), device="cpu", dtype="float32"), folder)
    return folder


@pytest.fixture(scope="module")
def base(data: Path) -> Base:
    return load_base(str(data / "base"), device=str(DEVICE), dtype="float32")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a server, which all tests use."""
    folder = tmp_path_factory.mktemp("servers")
    with timed("a server starts and ends"), shared_servers(folder, device="cuda") as log:
        yield folder
    print("the server's log:", *log, sep="\n  ", flush=True)


@contextmanager
def engine(base: Base, data: Path, at: Path, timeout: float = TIMEOUT) -> Iterator[LoraServers]:
    """An engine's side, whose server holds both adapters."""
    config = Config(data_dir=data, device="cuda", lora_server=1, lora_server_at=at, lora_server_timeout=timeout)
    own = make_servers(base, config, 64)
    assert own is not None
    with closing(own):
        with timed("an engine connects and loads"):
            own.wait()
            for load in [own.load(ref, digests_of(DataFolder(data).adapter(ref))) for ref in REFS]:
                load()
        assert not own.troubles, "messages go through host memory"
        assert own.recorded() is not None
        yield own


class Exchanges:
    """The exchanges of a step with inputs of their own, and the terms that this GPU computes for them."""

    def __init__(self, base: Base, data: Path, seed: int) -> None:
        part, draw = part_of(base.spec, 0, 1, 1), torch.Generator().manual_seed(seed)
        held, read = HeldPairs(part.sites, len(REFS), DEVICE), PairsReader(part, base.spec, DataFolder(data), DEVICE)
        for slot, ref in enumerate(REFS):
            held.reserve(slot, slot)
            for run in (pairs := read(ref, None)).runs:
                held.add(slot, slot, run, pairs.rank)
            held.end(slot, slot)
        own = held.step(SEGMENTS.bounds, SEGMENTS.adapters, held.version)
        self._layers = list[tuple[str, Tensor, Tensor, str, Tensor, Tensor]]()
        self._wanted = list[Tensor]()
        for up, down in zip(*[iter(part.sites)] * 2, strict=True):
            tokens, chosen = SEGMENTS.bounds[-1], part.sites[up].chosen
            x_TD = torch.randn(tokens, part.sites[up].in_features, generator=draw).to(DEVICE)
            h_SI = torch.randn(tokens * chosen, part.sites[down].in_features, generator=draw).to(DEVICE)
            scores_TE = torch.rand(tokens, part.experts, generator=draw)
            weights_TK, chosen_TK = (x.to(DEVICE) for x in scores_TE.topk(chosen))
            self._layers.append((up, x_TD, chosen_TK, down, h_SI, weights_TK))
            self._wanted += [own.gate_up(up, x_TD, chosen_TK), own.down(down, h_SI, weights_TK)]
        torch.cuda.synchronize(DEVICE)

    def step(self, servers: LoraServers) -> list[Tensor]:
        """Make all exchanges of a step, or launch them; return the terms, which may be garbage if servers are lost."""
        step, found = servers.step(SEGMENTS, [servers.slot(ref) for ref in REFS]), list[Tensor]()
        assert step is not None, "the server does not hold the adapters"
        for up, x_TD, chosen_TK, down, h_SI, weights_TK in self._layers:
            found += [step.gate_up(up, x_TD, chosen_TK)(), step.down(down, h_SI, weights_TK)()]
        return found

    def check(self, servers: LoraServers, losses: int = 0) -> None:
        """Compare a step's terms; `losses`: of servers so far."""
        for one, wanted in zip(self.step(servers), self._wanted, strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)
        assert servers.losses == losses


def wait_for(servers: LoraServers, ready: Callable[[LoraServerInfo], bool]) -> None:
    """Wait until the server is so."""
    changed = threading.Event()
    servers.notify(changed.set)
    until = time.monotonic() + TIMEOUT
    while not ready(servers.states()[0]):
        assert changed.wait(until - time.monotonic()), servers.states()
        changed.clear()


def test_two_engines_have_their_own_terms_at_the_same_time(base: Base, data: Path, at: Path) -> None:
    """Each on a thread and a stream of its own, in many steps; they share the adapters."""
    with engine(base, data, at) as one, engine(base, data, at) as two:
        wait_for(one, lambda info: info.engines == 2)
        work = [Exchanges(base, data, seed) for seed in (1, 2)]
        for own, exchanges in zip((one, two), work, strict=True):
            with timed("the first step"):
                exchanges.check(own)

        def steps(own: LoraServers, exchanges: Exchanges) -> None:
            torch.zeros((), device=DEVICE)  # a thread has no context before its first kernel
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):  # type: ignore[no-untyped-call]
                for _ in range(STEPS):
                    exchanges.check(own)

        with ThreadPoolExecutor(2) as both:
            with timed(f"{STEPS} steps of one"):
                both.submit(steps, one, work[0]).result()
            with timed(f"{STEPS} steps of both"):
                for done in [both.submit(steps, *each) for each in zip((one, two), work, strict=True)]:
                    done.result()


def test_an_engine_that_dies_in_a_step_is_no_loss_for_another(base: Base, data: Path, at: Path, tmp_path: Path) -> None:
    """It is stopped first: one stream of the server waits for it, and the other engine's goes on. Then its memory goes
    away, which the server has open."""
    with engine(base, data, at) as own:
        exchanges, server = Exchanges(base, data, 3), listener(at)
        exchanges.check(own)
        with timed("a further engine starts, and ends"), engine_in_a_step(tmp_path, at, str(DEVICE)) as pid:
            wait_for(own, lambda info: info.engines == 2)
            os.kill(pid, signal.SIGSTOP)
            with timed(f"{STEPS} steps beside a stopped engine"):
                for _ in range(STEPS):
                    exchanges.check(own)
            os.kill(pid, signal.SIGKILL)
            with timed("the server notices"):
                wait_for(own, lambda info: info.engines == 1)
        for _ in range(STEPS):
            exchanges.check(own)
        assert listener(at) == server, "the server has ended, too"
    with engine(base, data, at) as own:
        exchanges.check(own)


def test_an_engine_that_hangs_in_a_step_has_left_after_the_timeout(
    base: Base, data: Path, at: Path, tmp_path: Path
) -> None:
    with engine(base, data, at) as own:
        exchanges, server = Exchanges(base, data, 4), listener(at)
        with engine_in_a_step(tmp_path, at, str(DEVICE), timeout=8.0) as pid:
            os.kill(pid, signal.SIGSTOP)
            with timed("the server gives the step up"):
                wait_for(own, lambda info: info.engines == 1)
            exchanges.check(own)
        exchanges.check(own)
        assert listener(at) == server, "the server has ended, too"


@pytest.mark.parametrize("killed", [True, False])
def test_a_gpu_that_waits_for_a_shared_server_goes_on_when_it_is_lost(
    killed: bool, base: Base, data: Path, at: Path
) -> None:
    """The server is stopped, and then killed, or found by the timeout. The next one opens the same mailbox."""
    with engine(base, data, at, timeout=TIMEOUT if killed else 8.0) as own:
        exchanges, server = Exchanges(base, data, 5), listener(at)
        exchanges.check(own)
        os.kill(server, signal.SIGSTOP)
        if killed:
            threading.Timer(1.0, os.kill, (server, signal.SIGKILL)).start()
        with timed("a lost server's step"):
            exchanges.step(own)
            torch.cuda.synchronize(DEVICE)
        assert own.losses == 1
        with timed("the server starts again"):
            wait_for(own, lambda info: info.starts >= 2 and info.adapters == len(REFS))
        exchanges.check(own, losses=1)
        assert not own.troubles and listener(at) != server


def test_engines_come_and_go_while_another_one_hangs_in_a_step(
    base: Base, data: Path, at: Path, tmp_path: Path
) -> None:
    """The server opens, registers and gives back memory meanwhile. Were that to wait for all its streams, it would take
    until the step is given up."""
    with engine(base, data, at) as own:
        exchanges, server = Exchanges(base, data, 6), listener(at)
        exchanges.check(own)
        with engine_in_a_step(tmp_path, at, str(DEVICE), timeout=20.0) as pid:
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            with timed("another engine comes and goes"), engine(base, data, at) as other:
                exchanges.check(other)
            assert time.monotonic() - began < 20.0, "it has waited for the engine that hangs"
            exchanges.check(own)
        assert listener(at) == server, "the server has ended, too"
