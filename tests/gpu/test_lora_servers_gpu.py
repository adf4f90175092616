"""A LoRA server on a GPU of its own: the tokens of a base on another one are those of the coupled path."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.core.link.stats import EngineStats
from coserve.engine.worker import build_engine
from coserve.model.base import load_base
from tests.support.families import tiny_family
from tests.support.generation import prompt, request
from tests.support.local_link import local_pair
from tests.support.lora_servers import REFS, save_adapters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


async def served(folder: Path, data: Path, servers: int, ep: int = 1) -> tuple[list[list[int]], set[int]]:
    """The tokens of each adapter's request and one without, in fp32, and the adapters that servers held."""
    base = load_base(str(folder), device="cuda:0", dtype="float32")
    own = {"data_dir": data, "device": "cuda", "compile": "off", "policy": "slack", "kv_tokens": 512}
    config = Config(**own, lora_server=servers, lora_server_ep=ep)
    ours, theirs = local_pair()
    engine, _ = build_engine(base, config, theirs)
    running = asyncio.create_task(engine.run())
    found, held = list[list[int]](), set[int]()
    for place, ref in enumerate([*REFS, None]):
        ours.send(request(str(place), prompt(6), ref=ref))
        found.append([])
        while True:
            message = await ours.receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, EngineStats):
                held |= {info.adapters for info in message.lora_servers}
            if isinstance(message, Tokens):
                found[-1].extend(message.tokens)
                if message.finished:
                    break
    ours.send(Shutdown())
    await running
    return found, held


@pytest.mark.parametrize(("servers", "ep"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.filterwarnings("ignore")
async def test_servers_on_other_gpus_compute_the_coupled_tokens(servers: int, ep: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() <= servers:
        pytest.skip(f"needs {servers + 1} GPUs")
    tiny_family("mixtral").save_pretrained(tmp_path / "base")
    base = load_base(str(tmp_path / "base"), device="cpu", dtype="float32")
    save_adapters("mixtral", base, tmp_path / "data")
    expected, none = await served(tmp_path / "base", tmp_path / "data", 0)
    found, held = await served(tmp_path / "base", tmp_path / "data", servers, ep)
    assert found == expected and not none and max(held) > 0
