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
from functools import partial
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.link.engine import Shutdown
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader
from coserve.engine.lora_server.start import make_servers
from coserve.engine.lora_server.terms import HeldPairs
from coserve.engine.worker import build_engine
from coserve.kernels.lora.segments import Segments
from coserve.model.base import load_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.local_link import local_pair
from tests.support.lora_engine import Engine
from tests.support.lora_servers import REFS, save_adapters, server_pid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda:0"
SEGMENTS = Segments((0, 5, 9), (0, 1))
COLD = 60.0
"""Seconds in which a server compiles its kernels."""
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
) -> Found:
    """The tokens of each adapter's request and one without, in fp32; the servers hold both adapters. `stop` is called
    with the number of tokens of the first request so far; it has the servers started again."""

    async def run() -> Found:
        config = configured(folder, servers, ep, timeout)
        with timed(f"{servers} servers: an engine starts"):
            base = load_base(str(folder / "base"), device=DEVICE, dtype="float32")
            ours, theirs = local_pair()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coserve.engine.parts.make_servers", partial(make_servers, by_mailboxes=mailboxes))
                engine, _ = build_engine(base, config, theirs)
        running = asyncio.create_task(engine.run())
        own, found = Engine(ours, running), Found()
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
        held.expect(slot, slot)
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
            step = servers.step(SEGMENTS, [servers.slot(ref) for ref in REFS], device)
            own = held.step(SEGMENTS.bounds, SEGMENTS.adapters, held.version)
            assert step is not None
            for up, down in zip(*[iter(part.sites)] * 2, strict=True):
                spec, tokens = part.sites[up], SEGMENTS.bounds[-1]
                x_ND = torch.randn(tokens, spec.in_features, generator=generator).to(device)
                h_NKI = torch.randn(tokens, spec.chosen, part.sites[down].in_features, generator=generator).to(device)
                scores_NE = torch.rand(tokens, part.experts, generator=generator)
                weights_NK, chosen_NK = (x.to(device) for x in scores_NE.topk(spec.chosen))
                terms = step.gate_up(up, x_ND, chosen_NK)
                compare(f"step {again}, {up}", terms, own.gate_up(up, x_ND, chosen_NK, chosen_NK.numel()))
                terms = step.down(down, h_NKI, weights_NK)
                compare(f"step {again}, {down}", terms, own.down(down, h_NKI.flatten(0, 1), weights_NK.view(-1)))
        assert not servers.losses
    assert not wrong, f"the first of {len(wrong)} that differ: {wrong[0]}"


@pytest.mark.parametrize(("servers", "ep"), [(1, 1), (2, 2), (2, 1)])
def test_servers_on_other_gpus_compute_the_coupled_tokens(servers: int, ep: int, folder: Path, expected: Found) -> None:
    if torch.cuda.device_count() <= servers:
        pytest.skip(f"needs {servers + 1} GPUs")
    assert served(folder, servers, ep) == expected


@pytest.mark.parametrize("killed", [True, False])
def test_a_gpu_that_waits_for_a_server_goes_on_when_it_is_lost(killed: bool, folder: Path, expected: Found) -> None:
    """The server stops in a step, so that the engine's GPU waits; then it is killed, or found by the timeout. The next
    one opens the same mailbox, with a page of its own."""

    def stop(tokens: int) -> None:
        if tokens == 3:
            pid = server_pid()
            os.kill(pid, signal.SIGSTOP)
            if killed:
                threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    assert served(folder, 1, timeout=8.0, stop=stop) == expected
