"""A small server with OpenAI's `/v1/completions`, `/v1/models` and vLLM's gauges: what a peer looks like from
outside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BASE = "base"


@dataclass
class FakeOpenAI:
    """Answers with `max_tokens` tokens, `per_chunk` in each chunk. `usage`: `running` in every chunk, at the `end`, or
    `none`."""

    models: tuple[str, ...] = (BASE,)
    per_chunk: int = 1
    usage: str = "running"
    status: int = 200
    cut_after: int | None = None
    """Chunks after which the connection breaks."""
    gap: float = 0.0
    metrics: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The Authorization headers of the completions."""
    times: list[float] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.times.append(asyncio.get_running_loop().time())
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": "unknown"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        size = len(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"].split())
        for number, done in enumerate(range(self.per_chunk, body["max_tokens"] + self.per_chunk, self.per_chunk)):
            if number == self.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            counts = {"prompt_tokens": size, "completion_tokens": min(done, body["max_tokens"])}
            last = done >= body["max_tokens"]
            chunk: dict[str, Any] = {
                "choices": [{"index": 0, "text": "x", "finish_reason": "length" if last else None}]
            }
            await self._send(response, chunk | ({"usage": counts} if self.usage == "running" else {}))
            await asyncio.sleep(self.gap)
        if self.usage != "none":
            await self._send(response, {"choices": [], "usage": counts})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def page(self, request: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        lines = ['vllm:num_requests_waiting{model_name="base"} 3.0', 'vllm:num_requests_running{model_name="base"} 2.0']
        return web.Response(text="\n".join([*lines, 'vllm:kv_cache_usage_perc{model_name="base"} 0.25', ""]))

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def serve_openai(server: FakeOpenAI, port: int = 0) -> AsyncIterator[FakeOpenAI]:
    """Run it on a free port of the loopback address."""
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_get("/metrics", server.page)
    app.router.add_get("/health", server.health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
