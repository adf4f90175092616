"""An engine and its LoRA server as processes: a server that is killed, is started again, and hangs; beside a job."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coserve.config import Config
from coserve.core.errors import ConfigError, StartupError, UnsupportedBase
from coserve.core.health import LoraServerInfo
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.jobs import JobFailed, JobProgress, JobSucceeded, StartJob
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.types import AdapterRef
from coserve.engine.lora_server.start import make_servers
from coserve.engine.worker import build_engine
from coserve.model.base import wrap_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.generation import prompt, request
from tests.support.local_link import local_pair
from tests.support.lora_servers import BOTH, REFS, save_adapters, server_pid

STEPS = 40
"""Of the job: it still trains when servers are killed."""


class Engine:
    """The API process's end of an engine."""

    def __init__(self, link: Link[ToEngine, FromEngine], running: asyncio.Task[None]) -> None:
        self._link, self._running, self._requests = link, running, 0
        self._jobs = list[FromEngine]()
        """What jobs have told."""

    async def _receive(self) -> FromEngine:
        """Raises what ended the engine."""
        message = asyncio.create_task(self._link.receive())
        await asyncio.wait({message, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            self._running.result()
        if isinstance(await message, JobProgress | JobSucceeded | JobFailed):
            self._jobs.append(await message)
        return await message

    async def losses(self) -> list[float]:
        """Wait for the end of the job, and return the losses of its steps."""
        while not self._jobs or isinstance(self._jobs[-1], JobProgress):
            await self._receive()
        assert isinstance(self._jobs[-1], JobSucceeded), self._jobs[-1]
        return [metrics.loss for metrics in metrics_of(self._jobs)]

    async def tokens(self, ref: AdapterRef | None, at: Callable[[int], None] = lambda _: None) -> list[int]:
        """The tokens of a request; `at` is called with the number of tokens so far."""
        self._requests += 1
        self._link.send(request(str(self._requests), prompt(6), ref=ref))
        found = list[int]()
        while True:
            message = await self._receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, Tokens):
                found.extend(message.tokens)
                if message.finished:
                    return found
                at(len(found))

    async def server(self, ready: Callable[[LoraServerInfo], bool]) -> LoraServerInfo:
        """Wait until the server is so."""
        while True:
            message = await self._receive()
            if isinstance(message, EngineStats) and ready(message.lora_servers[0]):
                return message.lora_servers[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_requests_go_on_when_a_server_is_killed_or_hangs(tmp_path: Path) -> None:
    base = wrap_base(tiny_family("mixtral"), name="mixtral")
    save_adapters("mixtral", base, tmp_path)
    config = Config(data_dir=tmp_path, device="cpu", kv_tokens=512, lora_server=1, lora_server_timeout=10.0)
    ours, theirs = local_pair()
    engine, _ = build_engine(base, config, theirs)
    running = asyncio.create_task(engine.run())
    own = Engine(ours, running)

    def signalled(number: signal.Signals) -> Callable[[int], None]:
        return lambda tokens: os.kill(server_pid(), number) if tokens == 3 else None

    corpus = random_corpus(3, (6, 9, 7, 8))
    spec = job_spec(corpus, "job", adapter="learned", r=2, target_parameters=BOTH, steps=STEPS)
    undisturbed = Bench(base, tmp_path / "undisturbed")
    losses = [metrics.loss for metrics in metrics_of(undisturbed.train(undisturbed.place(corpus, spec)))]
    expected = await own.tokens(REFS[0])
    assert (await own.server(lambda info: info.state == "ready")).adapters == 1
    plain = await own.tokens(None)
    corpus.save(DataFolder(tmp_path).corpus("job"))
    ours.send(StartJob(spec=spec))
    assert (await own.tokens(REFS[0], signalled(signal.SIGKILL))) == expected
    again = await own.server(lambda info: info.state == "ready" and info.starts >= 2 and info.adapters == 1)
    assert again.bytes > 0
    # The first adapter is whole in the engine's pages now; the other one comes to the new server.
    other = await own.tokens(REFS[1])
    assert (await own.tokens(REFS[1], signalled(signal.SIGSTOP))) == other
    assert await own.tokens(None) == plain and await own.tokens(REFS[0]) == expected
    assert await own.losses() == pytest.approx(losses, rel=1e-4)
    ours.send(Shutdown())
    await running


async def test_servers_that_do_not_start_refuse_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets the reason, whatever it is, and not an engine that waits."""
    monkeypatch.setattr("coserve.engine.lora_server.running.spawn_child", lambda *_: 1 / 0)
    servers = make_servers(wrap_base(tiny_family("mixtral"), name="mixtral"), Config(lora_server=1), 64)
    assert servers is not None
    with closing(servers), pytest.raises(StartupError, match="division by zero"):
        servers.wait()


def test_bases_and_settings_that_cannot_have_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="lora_server"):
        Config(lora_server=1, tp=2)
    mixture = wrap_base(tiny_family("mixtral"), name="mixtral")
    assert make_servers(mixture, Config(), 64) is None
    with pytest.raises(ConfigError, match="at most 2"):
        make_servers(mixture, Config(lora_server=3), 64)
    with pytest.raises(ConfigError, match="at most 4"):
        make_servers(mixture, Config(lora_server=8, lora_server_ep=2), 64)
    with pytest.raises(ConfigError, match="lora_server_ep"):
        make_servers(mixture, Config(lora_server=32, lora_server_ep=32), 64)
    with pytest.raises(ConfigError, match="a divisor"):
        Config(lora_server=4, lora_server_ep=3)
    with pytest.raises(UnsupportedBase, match="no experts"):
        make_servers(wrap_base(tiny_family("llama"), name="llama"), Config(lora_server=1), 64)
    with pytest.raises(UnsupportedBase, match="recurrent"):
        make_servers(wrap_base(tiny_family("qwen3_5_moe"), name="qwen3_5_moe"), Config(lora_server=1), 64)
