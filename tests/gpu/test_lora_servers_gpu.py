"""A LoRA server on a GPU of its own: the tokens of a base on another one are those of the coupled path."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import EngineStats
from coserve.engine.worker import build_engine
from coserve.model.base import load_base
from tests.support.families import tiny_family
from tests.support.generation import prompt, request
from tests.support.local_link import local_pair
from tests.support.lora_servers import REFS, save_adapters, server_pid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


async def served(
    folder: Path, data: Path, servers: int, ep: int = 1, at_token: Callable[[int], None] | None = None
) -> tuple[list[list[int]], set[int]]:
    """The tokens of each adapter's request and one without, in fp32, and the adapters that servers held. `at_token` is
    called with the number of tokens of the first request so far; it has the servers started again."""
    base = load_base(str(folder), device="cuda:0", dtype="float32")
    own = {"data_dir": data, "device": "cuda", "compile": "off", "policy": "slack", "kv_tokens": 512}
    config = Config(**own, lora_server=servers, lora_server_ep=ep, lora_server_timeout=8.0)
    ours, theirs = local_pair()
    engine, _ = build_engine(base, config, theirs)
    running = asyncio.create_task(engine.run())
    found, held, again = list[list[int]](), set[int](), False

    async def receive() -> FromEngine:
        nonlocal again
        message = await ours.receive()
        assert not isinstance(message, RequestFailed), message
        if isinstance(message, EngineStats):
            held.update(info.adapters for info in message.lora_servers)
            again = any(info.starts > 1 and info.state == "ready" for info in message.lora_servers)
            assert not any("through host memory" in trouble for trouble in message.troubles), message.troubles
        return message

    for place, ref in enumerate([*REFS, None]):
        ours.send(request(str(place), prompt(6), ref=ref))
        found.append([])
        finished = False
        while not finished:
            message = await receive()
            if isinstance(message, Tokens):
                found[-1].extend(message.tokens)
                if not place and at_token is not None:
                    at_token(len(found[-1]))
                finished = message.finished is not None
    while at_token is not None and not again:
        await receive()
    ours.send(Shutdown())
    await running
    return found, held


@pytest.mark.parametrize(("servers", "ep"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.filterwarnings("ignore")
async def test_servers_on_other_gpus_compute_the_coupled_tokens(servers: int, ep: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() <= servers:
        pytest.skip(f"needs {servers + 1} GPUs")
    save(tmp_path)
    expected, none = await served(tmp_path / "base", tmp_path / "data", 0)
    found, held = await served(tmp_path / "base", tmp_path / "data", servers, ep)
    assert found == expected and not none and max(held) > 0


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.filterwarnings("ignore")
async def test_a_gpu_that_waits_for_a_server_goes_on_when_it_is_lost(killed: bool, tmp_path: Path) -> None:
    """The server stops in a step, so that the engine's GPU waits; then it is killed, or found by the timeout."""
    save(tmp_path)
    expected, _ = await served(tmp_path / "base", tmp_path / "data", 0)

    def stop(tokens: int) -> None:
        if tokens == 3:
            pid = server_pid()
            os.kill(pid, signal.SIGSTOP)
            if killed:
                threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    found, held = await served(tmp_path / "base", tmp_path / "data", 1, at_token=stop)
    assert found == expected and max(held) > 0


def save(folder: Path) -> None:
    """A base and its adapters."""
    tiny_family("mixtral").save_pretrained(folder / "base")
    base = load_base(str(folder / "base"), device="cpu", dtype="float32")
    save_adapters("mixtral", base, folder / "data")
