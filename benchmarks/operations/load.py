"""Mixed load on a daemon, by actions that tasks repeat until they are cancelled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

ROWS = [{"prompt": f"Where is lamp {n}?", "completion": f" In room {n % 7}."} for n in range(8)]
TRAINING = {"steps": 3, "batch_tokens": 64, "max_length": 64, "checkpoint_steps": 1}
BAD = ({"prompt": "x", "max_tokens": -1}, {"prompt": "x", "adapter": "nobody"}, {"prompt": 5}, {"nothing": True})


def job(adapter: str, steps: int = 3) -> dict[str, Any]:
    return {"adapter": adapter, "data": ROWS, "lora": {"r": 2}, "training": TRAINING | {"steps": steps}}


class Load:
    """Actions on the daemon at `url`. `adapter`: a folder of PEFT files under its `data_root`."""

    def __init__(self, url: str, http: aiohttp.ClientSession, adapter: Path, rng: random.Random) -> None:
        self._url, self._http, self._adapter, self._rng = url, http, adapter, rng
        self.done: Counter[str] = Counter()
        self._names = 0

    async def call(self, method: str, path: str, **given: Any) -> tuple[int, Any]:  # noqa: ANN401 - any JSON
        async with self._http.request(method, self._url + path, **given) as response:
            return response.status, await response.json(content_type=None)

    def new_name(self) -> str:
        self._names += 1
        return f"n{self._rng.getrandbits(48):012x}-{self._names}"

    async def generate(self) -> None:
        body = {"prompt": f"The lamp {self._rng.random()}", "max_tokens": self._rng.randint(1, 24)}
        assert (await self.call("POST", "/generate", json=body))[0] in (200, 429, 503)

    async def cancelled_stream(self) -> None:
        body = {"prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with self._http.post(f"{self._url}/generate", json=body) as response:
            async for _ in response.content:
                if self._rng.random() < 0.2:
                    return  # leaves in the middle

    async def adapter(self) -> None:
        name = self.new_name()
        status, _ = await self.call("POST", "/adapters", json={"name": name, "path": str(self._adapter)})
        assert status == 201, status
        await self.call("POST", "/generate", json={"prompt": "The", "adapter": name, "max_tokens": 4})
        assert (await self.call("DELETE", f"/adapters/{name}"))[0] == 200

    async def job(self) -> None:
        name = self.new_name()
        status, made = await self.call("POST", "/finetune", json=job(name))
        assert status == 202, made
        async with self._http.get(f"{self._url}/finetune/{made['id']}/events") as events:
            await events.read()
        assert (await self.call("DELETE", f"/finetune/{made['id']}"))[0] == 200
        await self.call("DELETE", f"/adapters/{name}")

    async def file(self) -> None:
        form = aiohttp.FormData()
        form.add_field("purpose", "fine-tune")
        form.add_field("file", "\n".join(map(json.dumps, ROWS)).encode(), filename="rows.jsonl")
        status, made = await self.call("POST", "/v1/files", data=form)
        assert status == 200, made
        assert (await self.call("DELETE", f"/v1/files/{made['id']}"))[0] == 200

    async def schema(self) -> None:
        field = self.new_name()
        schema = {"type": "object", "properties": {field: {"type": "integer"}}, "required": [field]}
        body = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"json": schema}}
        assert (await self.call("POST", "/generate", json=body))[0] in (200, 429, 503)

    async def bad(self) -> None:
        assert (await self.call("POST", "/generate", json=self._rng.choice(BAD)))[0] in (400, 404)

    async def page(self) -> None:
        """An open page: its files, what its views ask for every 2 s, and a while of the newest job's events."""
        for path in ("/", "/page/app.js", "/health", "/history", "/adapters?limit=100"):
            async with self._http.get(self._url + path, headers={"Accept": "text/html, application/json"}) as response:
                assert response.status == 200, (path, response.status)
                await response.read()
        _, listed = await self.call("GET", "/finetune?limit=100")
        if listed["data"]:
            url = f"{self._url}/finetune/{listed['data'][0]['id']}/events"
            async with self._http.get(url) as events:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._rng.uniform(0, 1)):
                        await events.read()
        await asyncio.sleep(0.5)

    async def run(self, actions: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Repeat each action in a task of its own, until cancelled. A failed assertion ends all."""

        async def repeat(action: Callable[[], Awaitable[None]]) -> None:
            while True:
                await action()
                self.done[action.__name__] += 1

        async with asyncio.TaskGroup() as tasks:
            for action in actions:
                tasks.create_task(repeat(action))


async def for_seconds(work: Awaitable[None], seconds: float) -> None:
    """Run `work` for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
