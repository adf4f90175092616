"""An engine and its LoRA server as processes: a server that is killed, is started again, and hangs; beside a job."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from coserve.config import Config
from coserve.core.errors import ConfigError, StartupError, UnsupportedBase
from coserve.core.link.engine import DropAdapter, Shutdown
from coserve.core.link.jobs import StartJob
from coserve.core.link.link import PeerLost
from coserve.core.types import AdapterRef
from coserve.engine.lora_server.running import start_servers
from coserve.engine.lora_server.start import make_servers
from coserve.engine.worker import build_engine
from coserve.model.base import wrap_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.local_link import local_pair
from tests.support.lora_engine import Engine
from tests.support.lora_servers import BOTH, REFS, save_adapters, server_pid, start_message

STEPS = 40
"""Of the job: it still trains when servers are killed."""


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
    for version, (files, tokens) in enumerate([(REFS[1], other), (REFS[0], expected)], 1):  # one that is replaced
        replaced = AdapterRef("replaced", version)
        shutil.copytree(DataFolder(tmp_path).adapter(files), DataFolder(tmp_path).adapter(replaced))
        assert await own.tokens(replaced) == tokens
        await own.server(lambda info: info.adapters == 3)
        ours.send(DropAdapter(ref=replaced))
    await own.server(lambda info: info.adapters == 2)
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


def test_a_server_that_hangs_while_it_starts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = list[subprocess.Popen[bytes]]()

    def hangs(module: str, end: socket.socket, *others: int) -> subprocess.Popen[bytes]:
        hung.append(subprocess.Popen(["sleep", "600"], pass_fds=(end.fileno(),)))
        return hung[-1]

    monkeypatch.setattr("coserve.engine.lora_server.running.spawn_child", hangs)
    settings = start_message(wrap_base(tiny_family("mixtral"), name="mixtral").spec, deadline=1.0)
    with pytest.raises(PeerLost, match="server 0 ended while it started, or was not ready in time"):
        start_servers([settings], lambda *_: None, starting=0.2)
    assert [each.returncode for each in hung] == [-signal.SIGKILL]


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
