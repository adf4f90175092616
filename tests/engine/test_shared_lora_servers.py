"""LoRA servers that several engines use: what they share, and what the end of one means for the others."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from coserve.cli.node.lora_server import keep_servers
from coserve.config import Config
from coserve.core.errors import ConfigError, StartupError, StorageBusy
from coserve.core.link.engine import Shutdown
from coserve.core.link.lora_servers import ListenerSettings
from coserve.core.logs import LogSettings
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.reading import PairsReader, PairsRuns
from coserve.engine.lora_server.shared_pairs import SharedPairs
from coserve.engine.lora_server.start import make_servers
from coserve.engine.worker import build_engine
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base, wrap_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.local_link import local_pair
from tests.support.lora_engine import Engine
from tests.support.lora_servers import REFS, engine_in_a_step, listener, save_adapters, shared_servers

NAME = REFS[0]
FILES, OTHERS = AdapterDigests("weights", "config"), AdapterDigests("other weights", "config")


def pair() -> LoraPair:
    return LoraPair(torch.zeros(1, 2), torch.zeros(2, 1), 1.0)


class Files:
    """Two runs of an adapter's pairs; the second one can fail."""

    def __init__(self) -> None:
        self.reads, self.broken = list[str](), False

    def read(self, ref: AdapterRef, digests: AdapterDigests | None) -> PairsRuns:
        return PairsRuns(8, 1, self._runs())

    def _runs(self) -> Iterator[dict[str, LoraPair]]:
        for site in ("first", "second"):
            if site == "second" and self.broken:
                raise StorageBusy("gone")
            self.reads.append(site)
            yield {site: pair()}


def test_an_adapter_that_two_engines_have_is_read_once() -> None:
    """As long as one of them has it, and from the first run on; two adapters of one name are two."""
    shared, files = SharedPairs(), Files()
    one, two = shared.reader(files.read, "base"), shared.reader(files.read, "base")
    mine, yours = one(NAME, FILES), two(NAME, FILES)
    first = next(mine.runs)
    assert next(yours.runs)["first"] is first["first"] and [*next(yours.runs)] == ["second"]
    assert [*next(mine.runs)] == ["second"] and not [*mine.runs] and files.reads == ["first", "second"]
    kept = yours.kept
    del mine, yours
    assert next(one(NAME, FILES).runs)["first"] is first["first"]
    for apart in (one(NAME, OTHERS), one(NAME, None), shared.reader(files.read, "other base")(NAME, FILES)):
        assert next(apart.runs)["first"] is not first["first"]
    del kept
    assert next(one(NAME, FILES).runs)["first"] is not first["first"]


def test_an_adapter_that_could_not_be_read_is_read_again() -> None:
    """Not by those that have its first run, who would take it for whole."""
    shared, files = SharedPairs(), Files()
    read = shared.reader(files.read, "base")
    files.broken = True
    mine, yours = read(NAME, FILES), read(NAME, FILES)
    for one in (mine, yours):
        with pytest.raises(StorageBusy):
            list(one.runs)
    files.broken = False
    assert len([*read(NAME, FILES).runs]) == 2


def test_readers_of_other_parts_or_dtypes_share_nothing(tmp_path: Path) -> None:
    """Engines may have other numbers of servers: server 0 of one has all layers, that of the other every second one."""
    spec, folder, cpu = (
        wrap_base(tiny_family("mixtral"), name="mixtral").spec,
        DataFolder(tmp_path),
        torch.device("cpu"),
    )
    parts = [part_of(spec, 0, servers, ep) for servers, ep in ((1, 1), (1, 1), (2, 1), (2, 2))]
    forms = [PairsReader(part, spec, folder, cpu).form for part in parts]
    forms.append(PairsReader(parts[0], msgspec.structs.replace(spec, dtype="bfloat16"), folder, cpu).form)
    assert forms[0] == forms[1] and len({*forms}) == 4


@asynccontextmanager
async def engine(base: Base, data: Path, **settings: object) -> AsyncIterator[Engine]:
    ours, theirs = local_pair()
    config = replace(Config(data_dir=data, device="cpu", kv_tokens=512), **settings)  # type: ignore[arg-type]
    built, _ = build_engine(base, config, theirs)
    running = asyncio.create_task(built.run())
    try:
        yield Engine(ours, running, data)
    finally:
        ours.send(Shutdown())
        await running


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_two_engines_use_one_server_and_outlive_a_third_and_the_server(tmp_path: Path) -> None:
    """Their data folders have different adapters of one name. The third engine hangs in a step, and is then killed;
    neither is a loss for the others. The server's end is, as if each had its own."""
    base, other = (wrap_base(tiny_family("mixtral"), name="mixtral") for _ in range(2))
    one, two, at = tmp_path / "one", tmp_path / "two", tmp_path / "servers"
    save_adapters("mixtral", base, one)
    for ref, source in zip(REFS, reversed(REFS), strict=True):
        shutil.copytree(DataFolder(one).adapter(source), DataFolder(two).adapter(ref))
    async with engine(base, one) as alone:
        expected = [await alone.tokens(ref) for ref in REFS]
    assert expected[0] != expected[1]
    shared = {"lora_server": 1, "lora_server_at": at, "lora_server_timeout": 60.0}
    with shared_servers(at) as log:
        async with engine(base, one, **shared) as first, engine(other, two, **shared) as second:

            async def answers() -> list[list[int]]:
                return [await each.tokens(ref) for each in (first, second) for ref in REFS]

            assert await answers() == [*expected, *reversed(expected)]
            for each in (first, second):
                info = await each.server(lambda info: info.adapters == 2 and info.engines == 2)
                assert info.at == str(at / "0") and info.starts == 1 and info.bytes > 0
            with engine_in_a_step(tmp_path / "three", at) as pid:
                await second.server(lambda info: info.engines == 3)
                os.kill(pid, signal.SIGSTOP)
                assert await answers() == [*expected, *reversed(expected)]
                os.kill(pid, signal.SIGKILL)
            for each in (first, second):
                assert (await each.server(lambda info: info.engines == 2)).starts == 1
            assert await answers() == [*expected, *reversed(expected)]
            assert not first.troubles | second.troubles

            kill = lambda tokens: os.kill(listener(at), signal.SIGKILL) if tokens == 3 else None
            assert await second.tokens(REFS[0]) == expected[1]
            assert await first.tokens(REFS[0], kill) == expected[0]
            assert await second.tokens(REFS[0]) == expected[1]
            for each in (first, second):
                again = await each.server(lambda info: info.starts >= 2 and info.adapters == 2 and info.engines == 2)
                assert again.state == "ready"
                assert any("connected again" in trouble for trouble in each.troubles)
            assert await answers() == [*expected, *reversed(expected)]
    assert not any("fault" in line or "Traceback" in line for line in log), log


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_a_server_that_hangs_is_ended_by_an_engine_that_waits_for_it(tmp_path: Path) -> None:
    """It could write into the engine's memory later. The other server goes on."""
    base, data, at = wrap_base(tiny_family("mixtral"), name="mixtral"), tmp_path / "data", tmp_path / "servers"
    save_adapters("mixtral", base, data)
    with shared_servers(at, 2):
        shared = {"lora_server": 2, "lora_server_at": at, "lora_server_timeout": 8.0}
        async with engine(base, data, **shared) as own:
            expected, pids = await own.tokens(NAME), [listener(at, index) for index in range(2)]
            stop = lambda tokens: os.kill(pids[1], signal.SIGSTOP) if tokens == 3 else None
            assert await own.tokens(NAME, stop) == expected
            await own.server(lambda info: info.starts >= 2 and info.adapters == 1)
            assert await own.tokens(NAME) == expected
            now = [listener(at, index) for index in range(2)]
            assert now[0] == pids[0] and now[1] != pids[1]


async def test_servers_that_cannot_be_used_refuse_the_start(tmp_path: Path) -> None:
    base, at = wrap_base(tiny_family("mixtral"), name="mixtral"), tmp_path / "servers"
    config = Config(data_dir=tmp_path, lora_server=1, lora_server_at=at)
    with pytest.raises(ConfigError, match="lora_server_at: expected a folder"):
        make_servers(base, config, 64)
    at.mkdir()
    own = make_servers(base, config, 64)
    assert own is not None
    with pytest.raises(StartupError, match=f"no LoRA server listens at {at / '0'}"):
        own.wait()
    with pytest.raises(ConfigError, match="lora_server_at: expected lora_server"):
        Config(lora_server_at=at)
    settings = ListenerSettings(servers=1, device="cuda", logs=LogSettings())
    with pytest.raises(StartupError, match="shorter path"):
        await keep_servers(tmp_path / ("x" * 100), settings)
    held = asyncio.create_task(keep_servers(at, msgspec.structs.replace(settings, device="cpu")))
    await asyncio.sleep(0)
    with pytest.raises(StartupError, match="running already"):
        await keep_servers(at, settings)
    held.cancel()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
async def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = ListenerSettings(servers=1, device="cuda", logs=LogSettings())
    with pytest.raises(StartupError, match="cannot have the device cuda"):
        await keep_servers(tmp_path / "servers", settings)
