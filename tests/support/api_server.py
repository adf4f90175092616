"""The API on a real socket, over a fake engine."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client.parser import text_string_to_metric_families

from coserve.api.app import ROUTES, make_app, make_runner
from coserve.api.engine_client import EngineClient
from coserve.api.generation.in_flight import MAX_PROMPT_SCORES
from coserve.api.jobs.recorder import JobMessage
from coserve.api.service import Service
from coserve.api.tokenizer.handlers import MAX_TEXTS
from coserve.api.tracking.feed import CLOSING
from coserve.config import Config
from coserve.core.link.generation import Generate
from coserve.core.sampling import NEUTRAL, SamplingDefaults
from coserve.core.types import BaseSpec
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from coserve.state.reserve import Reserve
from coserve.state.retries import Backoff
from coserve.state.thread import LOCK_BACKOFF, RegistryThread
from tests.support.cutting import Cutter
from tests.support.fake_engine import CONTEXT, FakeEngine, make_base
from tests.support.local_link import local_pair
from tests.support.records import import_adapter, make_adapter

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RESERVE = 1 << 20
LEAST_IDLE = 30.0
"""Seconds that headers may take and kept connections may be idle, however short `read_timeout` is."""
REPLY = "the cat sat on the mat"

Call = tuple[str, str, dict[str, object]]
"""Method, path, and arguments of the HTTP client."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load("bundled")


def with_template(template: str | None) -> Tokenizer:
    """The bundled base's tokenizer, with another chat template unless it is None."""
    found = tokenizer()
    if template is None:
        return found
    state = msgspec.msgpack.decode(found.state())
    return Tokenizer.from_state(msgspec.msgpack.encode(state | {"chat_template": template}))


@dataclass
class Api:
    """A running server: `http` speaks to it."""

    config: Config
    service: Service
    folder: DataFolder
    http: aiohttp.ClientSession
    port: int
    app: web.Application
    base: BaseSpec
    cutter: Cutter | None
    engine: FakeEngine = field(init=False)
    engine_type: type[FakeEngine] = FakeEngine
    reply: list[int] = field(default_factory=lambda: tokenizer().encode(REPLY, add_special=False))

    async def start_engine(self) -> None:
        """A new engine, attached; the one before it must be dead."""
        ours, theirs = local_pair()
        self.engine = self.engine_type(theirs, self.base, self.folder, self._reply)
        await self.service.attach(ours, self.engine.ready)

    def _reply(self, request: Generate) -> Iterable[int]:
        return self.reply

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> AsyncOpenAI:
        """OpenAI's own client. Skips where it is not installed."""
        openai = pytest.importorskip("openai")
        client: AsyncOpenAI = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)
        return client

    @property
    def root(self) -> Path:
        """The daemon's `data_root`, which it has."""
        assert self.config.data_root is not None
        return self.config.data_root

    def says(self, text: str) -> None:
        """The engine answers so from now on, and stops."""
        self.reply = [*tokenizer().encode(text, add_special=False), 0]

    async def last_request(self) -> Generate:
        """The last one that the engine has got."""
        return (await self.engine.saw(Generate))[-1]

    async def last_prompt(self) -> str:
        """That of `last_request`, as a text with its special tokens."""
        return tokenizer().decode((await self.last_request()).prompt, skip_special=False)

    async def settled(self) -> None:
        """Until all that the engine has told is written down and done: a job's end is announced before its files go."""
        await self.service.recorder.settled()
        await self.service.recorder.files_deleted()

    async def hear(self, message: JobMessage) -> None:
        """As if the engine had said it; until it is written down."""
        self.service.recorder.deliver(message)
        await self.settled()

    async def call(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.request(method, path, **kwargs) as response:
            self._described(method, response)
            return response.status, await response.json(content_type=None)

    async def answered(self, status: int, method: str, path: str, **kwargs: Any) -> Any:
        """The JSON of the answer, which has that status."""
        got, body = await self.call(method, path, **kwargs)
        assert got == status, body
        return body

    def _described(self, method: str, response: aiohttp.ClientResponse) -> None:
        """`/openapi.json` names this status."""
        for route in self.app[ROUTES]:
            if route.method == method and re.fullmatch(re.sub(r"{\w+}", "[^/]+", route.path), response.url.path):
                statuses = {route.status, *route.statuses}
                assert response.status in statuses, f"{method} {route.path} describes no {response.status}"

    async def error(self, status: int, code: str, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """The error of the answer, which has that status and code."""
        body = await self.answered(status, method, path, **kwargs)
        found: dict[str, Any] = body["error"]
        assert found["code"] == code, body
        return found

    async def refused(self, status: int, code: str, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """The request is refused so, and the next good one is answered."""
        found = await self.error(status, code, method, path, **kwargs)
        await self.works()
        return found

    async def works(self) -> None:
        headers = {} if self.config.api_key is None else {"Authorization": f"Bearer {self.config.api_key}"}
        status, body = await self.call("POST", "/generate", json={"prompt": "hello"}, headers=headers)
        assert status == 200, body
        assert body["choices"][0]["text"] == REPLY

    async def raw(self, *parts: bytes) -> bytes:
        """Send bytes; then what comes until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
            return await asyncio.wait_for(reader.read(), 120)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def events(self, id: str, **kwargs: Any) -> list[tuple[int, dict[str, Any]]]:
        """The whole story of a job, to the stream's end."""
        async with self.http.get(f"/finetune/{id}/events", **kwargs) as response:
            assert response.status == 200
            return [(int(event["id"]), event["data"]) for event in read_events(await response.text())]

    async def submit(self, status: int = 202, **fields: Any) -> dict[str, Any]:
        """The answer to a job of adapter `poet` with these fields, too."""
        request = {"adapter": "poet", "data": [{"text": "one two three"}]} | fields
        found: dict[str, Any] = await self.answered(status, "POST", "/finetune", json=request)
        return found

    async def job(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.answered(200, "GET", f"/finetune/{id}")
        return found

    async def job_until(self, id: str, state: str, times: int = 1) -> dict[str, Any]:
        """Follow a job's events until it became `state` for the n-th time; then the job."""
        async with self.http.get(f"/finetune/{id}/events") as response:
            async for line in response.content:
                times -= line.startswith(b"data:") and f'"state":"{state}"'.encode() in line
                if times == 0:
                    break
        return await self.job(id)


async def attempt(api: Api, call: Call, at: int, late: bool) -> tuple[int | None, bool]:
    """The answer's status (None: the client was cut off), and whether the handler was cancelled."""
    assert api.cutter is not None
    method, path, arguments = call
    cut = api.cutter.aim(at, late=late)
    status: int | None = None
    try:
        async with asyncio.timeout(120), api.http.request(method, path, **arguments) as response:  # type: ignore[arg-type]
            await response.read()
            status = response.status
    except aiohttp.ClientError:
        pass
    async with asyncio.timeout(120):
        await cut.ended.wait()
    await api.settled()
    return status, cut.done


def leap(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so much time pass at once, for event loops, too: whoever tests a deadline waits for none."""
    now = time.monotonic
    patch.setattr(time, "monotonic", lambda: now() + seconds)


def form(settings: dict[str, Any], *files: Path | tuple[str, bytes]) -> aiohttp.FormData:
    """An upload: settings, and files by their paths, or by name and content."""
    made = aiohttp.FormData()
    made.add_field("settings", json.dumps(settings), content_type="application/json")
    for file in files:
        name, content = (file.name, file.read_bytes()) if isinstance(file, Path) else file
        made.add_field("file", io.BytesIO(content), filename=name)
    return made


def read_events(text: str) -> list[dict[str, Any]]:
    """Server-sent events with `data` decoded, comments left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            data = fields["data"]
            events.append(fields | {"data": data if data == "[DONE]" else json.loads(data)})
    return events


@asynccontextmanager
async def serve_api(
    path: Path,
    *,
    engine: bool = True,
    engine_type: type[FakeEngine] = FakeEngine,
    context: int = CONTEXT,
    patience: Backoff = LOCK_BACKOFF,
    cutter: Cutter | None = None,
    middlewares: Sequence[Middleware] = (),
    clock: Callable[[], float] = time.monotonic,
    max_texts: int = MAX_TEXTS,
    max_prompt_scores: int = MAX_PROMPT_SCORES,
    closing: float = CLOSING,
    engine_clock: Callable[[], float] = time.monotonic,
    tokens: Tokenizer | None = None,
    sampling_defaults: SamplingDefaults = NEUTRAL,
    **settings: Any,
) -> AsyncIterator[Api]:
    """The API over the data folder at `path`; `settings` are those of `Config`, `patience`: with a locked registry,
    `cutter` cancels handlers, `middlewares` stand before all others, `clock` tells how long connections have been idle,
    `engine_clock` how long the engine has been silent; `tokens`: the base's tokenizer, if not the bundled one; the
    others are as in `make_app` and `Service`."""
    config = Config(data_dir=path, **settings)
    folder = DataFolder(path)
    with folder.lock():
        registry = RegistryThread(
            lambda: Registry(folder.database), backoff=patience, reserve=Reserve(folder.reserve, RESERVE)
        )
        client = EngineClient(engine_clock)
        service = Service(
            config,
            folder,
            registry,
            tokens or tokenizer(),
            client,
            sampling_defaults=sampling_defaults,
            max_prompt_scores=max_prompt_scores,
            closing=closing,
        )
        app = make_app(service, config, clock, max_texts=max_texts)
        if cutter is not None:
            app.middlewares.insert(0, cutter.middleware())
        app.middlewares[:0] = middlewares
        # A busy machine may miss a short deadline of headers, and a kept connection end as a request goes out on it.
        runner = make_runner(app, replace(config, read_timeout=max(config.read_timeout, LEAST_IDLE)))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        base = msgspec.structs.replace(make_base(tokenizer().vocab_size), context=context)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            http._retry_connection = False  # as in aiohttp's own test client: a call that is cut off is not sent again
            api = Api(config, service, folder, http, port, app, base, cutter, engine_type)
            try:
                if engine:
                    await api.start_engine()
                yield api
            finally:
                if hasattr(api, "engine"):
                    await api.engine.die()
                await runner.cleanup()
                await service.close()
                await registry.close()


def add_adapter(
    api: Api, name: str, version: int = 1, *, fingerprint: str = "", prefix_tokens: int = 0, bytes: int = 1
) -> None:
    record = make_adapter(
        name,
        version,
        rank=2,
        alpha=4.0,
        base_fingerprint=fingerprint or api.base.fingerprint,
        base_name=api.base.name,
        created_at=1000.0 + version,
        bytes=bytes,
        prefix_tokens=prefix_tokens,
    )
    with closing(Registry(api.folder.database)) as registry:
        import_adapter(registry, record)


async def scrape(api: Api) -> dict[str, float]:
    """Every sample: its name with its labels."""
    async with api.http.get("/metrics") as response:
        assert response.status == 200
        families = text_string_to_metric_families(await response.text())
    return {
        "".join([sample.name, *(f",{key}={value}" for key, value in sorted(sample.labels.items()))]): sample.value
        for family in families
        for sample in family.samples
    }
