"""The engine's end of a warm-up's process, and its start."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from coserve.config import Config, config_from_json
from coserve.core.link.channel import Channel, frame
from coserve.engine.starting import COMPILES, DIED, WAITS, follow
from coserve.engine.warmup import launch
from coserve.engine.warmup.key import ASSEMBLER, CACHES, CONTEXT_BYTES, Gpu
from coserve.engine.warmup.launch import CAPTURABLE, base_bytes, plan_warm_up, use_caches
from coserve.engine.warmup.parts import Progress, WarmUpTask
from coserve.kernels.lora.backend import BACKENDS, make_backend
from tests.support.model_folder import make_model_folder

ENCODER = msgspec.msgpack.Encoder()
GPU = Gpu("H200", "9.0", 12090, 140 << 30)


async def test_progress_is_told_until_the_process_has_ended() -> None:
    told, (ours, theirs) = list[tuple[str, int]](), socket.socketpair()
    following = asyncio.create_task(follow(ours, lambda what, done: told.append((what, done))))
    with theirs:
        for progress in (Progress(0, 9, waiting=True), Progress(3, 9), Progress(9, 9, ["a failed"], ended=True)):
            theirs.sendall(frame(ENCODER, progress))
        await asyncio.sleep(0.05)
        assert not following.done(), "what used the GPU may not have ended"
    assert await following == ("a failed",)
    assert told == [(WAITS, 0), (COMPILES, 3)]


@pytest.mark.parametrize("last", [b"", b"\0\0\0\2\xc1\xc1", b"x" * (3 << 20), frame(ENCODER, Progress(3, 9))])
async def test_a_process_that_dies_is_told_and_waited_for_no_longer(last: bytes) -> None:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, suppress(ConnectionError):
            theirs.sendall(last)

    async with asyncio.timeout(60):
        sent = asyncio.create_task(asyncio.to_thread(send))
        assert await follow(ours, lambda what, done: None) == (DIED,)
        await sent


async def test_a_start_that_is_given_up_ends_the_process() -> None:
    ours, theirs = socket.socketpair()
    following = asyncio.create_task(follow(ours, lambda what, done: None))
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following})
    await asyncio.sleep(0)
    with theirs:
        assert await asyncio.to_thread(theirs.recv, 1) == b"", "its other end is closed"


def test_all_ranks_use_the_caches_of_one_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spawned = list[Channel[Progress, WarmUpTask]]()

    def spawn(module: str, end: socket.socket) -> None:
        spawned.append(Channel(end.dup(), msgspec.msgpack.Decoder(WarmUpTask)))

    monkeypatch.setattr("coserve.engine.warmup.key.find_gpu", lambda: GPU)
    monkeypatch.setattr(launch, "spawn_child", spawn)
    config = Config(model="bundled", data_dir=tmp_path, tp=2)
    for name in (*CACHES, ASSEMBLER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    started = launch.start_warm_up(config)
    assert started is not None and config_from_json(started.task.config.encode()) == config
    started.socket.close()
    leads = {name: os.environ.pop(name) for name in CACHES}
    found = use_caches(config)
    with closing(spawned[0]) as channel:
        task = channel.receive()
    assert found is not None and (found.folder, found.shape) == (task.folder, task.shape)
    assert {name: os.environ[name] for name in CACHES} == leads
    assert use_caches(Config(model="bundled", data_dir=tmp_path, tp=2, compile="off")) is None
    assert launch.start_warm_up(Config(model="bundled", tp=2, device="cpu")) is None


def test_workers_are_as_many_as_the_gpu_and_the_cores_hold(tmp_path: Path) -> None:
    config = Config(model=str(make_model_folder(tmp_path / "model")), data_dir=tmp_path)
    assert plan_warm_up(config, GPU, cores=16)[0].workers == 5
    assert plan_warm_up(config, GPU, cores=1)[0].workers == 1
    assert plan_warm_up(config, GPU, cores=999)[0].workers == launch.MAX_WORKERS
    small = Gpu("small", "9.0", 1, 16 << 30)
    task, concurrent = plan_warm_up(config, small, taken=CONTEXT_BYTES, cores=999)
    assert concurrent and 1 < task.workers < launch.MAX_WORKERS
    task, concurrent = plan_warm_up(config, small, taken=14 << 30, cores=999)
    assert not concurrent and task.workers > 1, "the base is loaded once they have ended"
    assert not plan_warm_up(config, GPU, taken=None)[1], "nobody knows how large it is"


def test_the_bytes_of_a_base_are_those_of_its_part_of_the_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 10, "intermediate_size": 20, "vocab_size": 100, "num_hidden_layers": 4}'
    )
    layer = 4 * 10 * 10 + 3 * 10 * 20
    assert base_bytes(Config(model=str(tmp_path))) == 2 * (2 * 1000 + 4 * layer)
    assert base_bytes(Config(model=str(tmp_path), tp=2)) == 2 * (2 * 1000 + 2 * layer)
    assert base_bytes(Config(model=str(tmp_path), dtype="float32"), 2) == 4 * (1000 + 2 * layer)
    mixture = {"num_experts": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(mixture | {"num_hidden_layers": 48, "vocab_size": 151936}))
    assert base_bytes(Config(model=str(tmp_path))) == pytest.approx(61e9, rel=0.01), "Qwen3-30B-A3B has 30.5 B numbers"
    assert base_bytes(Config(model="a/hub-name")) is None
    assert base_bytes(Config(model="bundled")) == 0


def test_layers_are_compiled_where_the_lora_backend_can_be_captured() -> None:
    """Written twice: the process that starts the warm-up has not imported torch."""
    assert set(CAPTURABLE) == {"auto", *(name for name in BACKENDS if make_backend(name).capturable)}
