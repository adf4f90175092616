"""More adapters than memory holds, over a real engine: whoever asks when, each text is its adapter's own."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.schemas.service import HistoryPoint
from coserve.core.types import AdapterRef
from coserve.lora.files.packed_header import PACKED_FILE
from coserve.lora.store.files import save_adapter
from tests.support.api_server import Api
from tests.support.examples import by_day
from tests.support.real_server import bundled_base, loud_adapter, serve_real

ADAPTERS = 5
ROTTEN = ("a0", PACKED_FILE), ("a1", ADAPTER_WEIGHTS)
PROMPT = "Once upon a time there was a"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """Room for one idle adapter in memory, and for three requests at once."""
    root = tmp_path / "root"
    async with serve_real(
        tmp_path / "data", data_root=root, host_adapter_bytes=1, max_running=3, prefix_cache=False
    ) as api:
        for i in range(ADAPTERS):
            (root / f"a{i}").mkdir(parents=True)
            save_adapter(root / f"a{i}", loud_adapter(i), bundled_base().spec)
            await api.answered(201, "POST", "/adapters", json={"name": f"a{i}", "path": f"a{i}"})
        yield api


async def ask(api: Api, adapter: str | None) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    answer = await api.answered(200, "POST", "/generate", json=body | ({"adapter": adapter} if adapter else {}))
    text: str = answer["choices"][0]["text"]
    return text


async def test_each_gets_its_own_adapters_text(api: Api) -> None:
    names = [None, *(f"a{i}" for i in range(ADAPTERS))]
    alone = {name: await ask(api, name) for name in names}
    assert len(set(alone.values())) == len(names)
    wanted = random.Random(0).choices(names, k=12)
    assert await asyncio.gather(*(ask(api, name) for name in wanted)) == [alone[name] for name in wanted]


@pytest.mark.parametrize(
    "file", by_day(["adapter_model.safetensors", "adapter_config.json"], "adapter_model.safetensors")
)
async def test_files_that_are_not_the_registered_ones_fail_their_requests_alone(api: Api, file: str) -> None:
    alone = await ask(api, "a1")
    mine, other = (api.folder.adapter(AdapterRef(name, 1)) / file for name in ("a0", "a1"))
    other_bytes = other.read_bytes()
    mine.write_bytes(other_bytes.replace(b'"lora_alpha": 8', b'"lora_alpha": 9'))
    await api.error(
        422, "corrupt_adapter", "POST", "/generate", json={"prompt": PROMPT, "adapter": "a0", "max_tokens": 1}
    )
    assert await ask(api, "a1") == alone
    job = {"adapter": "next", "continue_from": "a0", "data": [{"text": "a b"}], "training": {"steps": 1}}
    _, accepted = await api.call("POST", "/finetune", json=job)
    assert (await api.job_until(accepted["id"], "failed"))["error"]["code"] == "corrupt_adapter"


async def test_files_that_vanish_in_the_middle_of_a_run_fail_their_requests_alone(api: Api) -> None:
    """A packed file alone is missed by nobody."""
    alone = [await ask(api, f"a{i}") for i in range(3)]
    others = asyncio.gather(*(ask(api, f"a{1 + i % 2}") for i in range(8)))
    shutil.rmtree(api.folder.adapter(AdapterRef("a3", 1)))
    (api.folder.adapter(AdapterRef("a1", 1)) / PACKED_FILE).unlink(missing_ok=True)
    mine = [api.call("POST", "/generate", json={"prompt": PROMPT, "adapter": "a3", "max_tokens": 1}) for _ in range(3)]
    for status, body in await asyncio.gather(*mine):
        assert (status, body["error"]["code"]) == (404, "adapter_not_found")
    assert await others == [alone[1 + i % 2] for i in range(8)]


async def test_a_file_that_rots_is_found_and_harms_nobody_else(api: Api) -> None:
    """A packed file is made again; PEFT's own is told of, and its adapter served from memory or its packed file."""
    alone = [await ask(api, f"a{i}") for i in range(3)]
    packed, weights = (api.folder.adapter(AdapterRef(name, 1)) / file for name, file in ROTTEN)
    for path in (packed, weights):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        times = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    await api.service.scrub.round(pace=0)
    assert not packed.exists()
    _, health = await api.call("GET", "/health")
    (note,) = [note for note in health["notes"] if "SHA-256" in note]
    assert note.startswith("adapter a1@1: adapter_model.safetensors")
    assert [await ask(api, f"a{i}") for i in range(3)] == alone
    await api.answered(200, "DELETE", "/adapters/a1")
    _, health = await api.call("GET", "/health")
    assert not [note for note in health["notes"] if "SHA-256" in note]


async def reload(api: Api, count: int) -> None:
    """Each time load a name in place and use it, and use an adapter that has left memory since its last request."""
    for i in range(count):
        body = {"lora_name": "live", "lora_path": f"a{i % ADAPTERS}", "load_inplace": True}
        async with api.http.post("/v1/load_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()
        for name in ("live", f"a{(i + 2) % ADAPTERS}"):
            await api.answered(200, "POST", "/generate", json={"prompt": PROMPT, "max_tokens": 1, "adapter": name})


def held(api: Api) -> Counter[str]:
    """What this process holds: objects by their type, descriptors, threads, and the files of adapters."""
    gc.collect()
    types = Counter(type(each) for each in gc.get_objects())
    found = {of.__qualname__: n for of, n in types.items() if str(of.__module__).startswith(("coserve", "torch"))}
    found.pop(HistoryPoint.__qualname__, None)  # one a second, up to an hour's
    folders = {"descriptors": Path("/proc/self/fd").iterdir(), "files": api.folder.adapters.rglob("*")}
    found |= {name: len([*entries]) for name, entries in folders.items()}
    return Counter(found | {"threads": threading.active_count()})


@pytest.mark.slow
async def test_nothing_grows_with_the_number_of_reloads(api: Api) -> None:
    await reload(api, 2 * ADAPTERS)
    before = held(api)
    await reload(api, count := 30)
    assert {name: n - before[name] for name, n in held(api).items() if n - before[name] >= count // 2} == {}
