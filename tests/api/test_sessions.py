"""The native form of training sessions, over a real engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.api_server import Api
from tests.support.real_server import serve_real

EXAMPLES = [{"tokens": [5, 6, 7, 8], "labels": [6, 7, 8, 9], "weights": [1, 1, 1, 1]}]


async def opened(api: Api, **body: object) -> str:
    status, session = await api.call("POST", "/sessions", json={"r": 4} | body)
    assert status == 200, session
    return f"/sessions/{session['id']}"


async def step(api: Api, session: str) -> float:
    status, computed = await api.call("POST", f"{session}/forward_backward", json={"examples": EXAMPLES})
    assert status == 200, computed
    assert [len(row) for row in computed["log_probs"]] == [4]
    status, stepped = await api.call("POST", f"{session}/optim_step", json={"learning_rate": 0.01})
    assert status == 200, stepped
    loss: float = computed["loss"]
    return loss


async def refused(api: Api, status: int, code: str, method: str, path: str, **body: object) -> None:
    found, answer = await api.call(method, path, **body)
    assert (found, answer["error"]["code"]) == (status, code)


async def test_a_session_is_trained_saved_published_and_closed(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        session = await opened(api, seed=3)
        losses = [await step(api, session) for _ in range(3)]
        assert losses[2] < losses[0]
        _, saved = await api.call("POST", f"{session}/save", json={"name": "kept"})
        _, published = await api.call("POST", f"{session}/publish", json={"adapter": "mine"})
        assert published == {"adapter": "mine", "version": 1}
        status, answer = await api.call("POST", "/generate", json={"prompt": "a", "adapter": "mine", "max_tokens": 2})
        assert (status, answer["adapter"]) == (200, "mine")
        expected = await step(api, session)
        again = await opened(api, state=saved["state"])
        assert await step(api, again) == pytest.approx(expected, rel=1e-5)
        await refused(api, 400, "invalid_request", "POST", f"{session}/save", json={"name": "kept"})
        short = {"examples": [{"tokens": [5, 6], "labels": [6]}]}
        await refused(api, 400, "invalid_request", "POST", f"{session}/forward", json=short)
        await refused(
            api, 400, "invalid_request", "POST", f"{session}/forward", json={"examples": EXAMPLES, "loss": "x"}
        )
        await refused(api, 404, "not_found", "POST", "/sessions", json={"state": "a/b"})
        assert (await api.call("DELETE", session))[0] == 200
        await refused(api, 404, "not_found", "GET", session)


async def test_a_session_ends_without_a_sign_of_its_client(tmp_path: Path) -> None:
    async with serve_real(tmp_path, session_timeout=0.5, max_sessions=1) as api:
        session = await opened(api)
        await refused(api, 429, "queue_full", "POST", "/sessions", json={})
        while (await api.call("GET", session))[0] == 200:
            await asyncio.to_thread(time.sleep, 0.05)
        await opened(api)


async def test_calls_are_executed_in_order(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        session = await opened(api)
        found = await asyncio.gather(
            *(api.call("POST", f"{session}/optim_step", json={"learning_rate": 0.0}) for _ in range(8))
        )
        assert sorted(answer["step"] for _, answer in found) == list(range(1, 9))


async def test_sessions_that_open_at_once_are_counted(tmp_path: Path) -> None:
    async with serve_real(tmp_path, max_sessions=2) as api:
        found = await asyncio.gather(*(api.call("POST", "/sessions", json={"r": 4}) for _ in range(5)))
        assert sorted(status for status, _ in found) == [200, 200, 429, 429, 429]
