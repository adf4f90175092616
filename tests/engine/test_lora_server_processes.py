"""An engine and its LoRA server as processes: a server that is killed, is started again, and hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.config import Config
from coserve.core.errors import ConfigError, UnsupportedBase
from coserve.core.health import LoraServerInfo
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.link import FromEngine, Link, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.types import AdapterRef
from coserve.engine.lora_server.start import make_servers
from coserve.engine.worker import build_engine
from coserve.model.base import wrap_base
from tests.support.families import tiny_family
from tests.support.generation import prompt, request
from tests.support.local_link import local_pair
from tests.support.lora_servers import REFS, save_adapters


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


class Engine:
    """The API process's end of an engine."""

    def __init__(self, link: Link[ToEngine, FromEngine], running: asyncio.Task[None]) -> None:
        self._link, self._running, self._requests = link, running, 0

    async def _receive(self) -> FromEngine:
        """Raises what ended the engine."""
        message = asyncio.create_task(self._link.receive())
        await asyncio.wait({message, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            self._running.result()
        return await message

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

    expected = await own.tokens(REFS[0])
    assert (await own.server(lambda info: info.state == "ready")).adapters == 1
    plain = await own.tokens(None)
    assert (await own.tokens(REFS[0], signalled(signal.SIGKILL))) == expected
    again = await own.server(lambda info: info.state == "ready" and info.starts >= 2 and info.adapters == 1)
    assert again.bytes > 0
    # The first adapter is whole in the engine's pages now; the other one comes to the new server.
    other = await own.tokens(REFS[1])
    assert (await own.tokens(REFS[1], signalled(signal.SIGSTOP))) == other
    assert await own.tokens(None) == plain and await own.tokens(REFS[0]) == expected
    ours.send(Shutdown())
    await running


def test_bases_and_settings_that_cannot_have_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="lora_server"):
        Config(lora_server=1, tp=2)
    mixture = wrap_base(tiny_family("mixtral"), name="mixtral")
    assert make_servers(mixture, Config()) is None
    with pytest.raises(ConfigError, match="at most 2"):
        make_servers(mixture, Config(lora_server=3))
    with pytest.raises(UnsupportedBase, match="no experts"):
        make_servers(wrap_base(tiny_family("llama"), name="llama"), Config(lora_server=1))
    with pytest.raises(UnsupportedBase, match="recurrent"):
        make_servers(wrap_base(tiny_family("qwen3_5_moe"), name="qwen3_5_moe"), Config(lora_server=1))
