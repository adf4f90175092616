"""Requests of one model that come too early, and those of another project."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coserve.api.tinker.futures import Futures
from coserve.core.errors import InvalidRequest, SessionEnded
from tests.support.api_server import Api
from tests.support.real_server import serve_real

OWNER = "the-daemons-own-key"


async def ask(api: Api, path: str, key: str = OWNER, /, **body: Any) -> tuple[int, Any]:
    return await api.call("POST", f"/api/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"})


async def result(api: Api, id: str, key: str = OWNER) -> tuple[int, Any]:
    while (found := await ask(api, "retrieve_future", key, request_id=id))[1].get("type") == "try_again":
        pass
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    async with serve_real(tmp_path_factory.mktemp("tinker") / "data", api_key=OWNER) as found:
        yield found


async def model(api: Api, key: str = OWNER) -> tuple[str, str]:
    """The ids of a session and of its model."""
    session = (await ask(api, "create_session", key))[1]["session_id"]
    asked = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": api.service.engine.spec.name,
        "lora_config": {"rank": 4},
    }
    _, future = await ask(api, "create_model", key, **asked)
    status, made = await result(api, future["request_id"], key)
    assert status == 200, made
    return session, made["model_id"]


async def step(api: Api, model: str, number: int) -> tuple[int, Any]:
    return await ask(api, "optim_step", model_id=model, seq_id=number, adam_params={})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_came_early_waits_for_its_turn(api: Api) -> None:
    _, own = await model(api)
    early = [(await step(api, own, number))[1]["request_id"] for number in (3, 2, 3)]
    assert early[0] == early[2]
    await step(api, own, 1)
    assert (await result(api, early[0]))[1]["metrics"]["step"] == 3.0
    assert (await step(api, own, 0))[0] == 422


@pytest.mark.asyncio(loop_scope="module")
async def test_only_samples_are_cancelled(api: Api) -> None:
    """A model's call that ended halfway would leave it in a state that no later call can leave."""
    _, own = await model(api)
    saved = (await result(api, (await ask(api, "save_weights", model_id=own, seq_id=1))[1]["request_id"]))[1]["path"]
    load = (await ask(api, "load_weights", model_id=own, seq_id=2, path=saved, optimizer=True))[1]["request_id"]
    later = (await step(api, own, 3))[1]["request_id"]
    for id in (load, later):
        await ask(api, "cancel_future", request_id=id)
    async with asyncio.timeout(60):
        assert (await result(api, load))[1]["path"] == saved
        assert (await result(api, later))[1]["metrics"]["step"] == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refused_request_takes_its_turn(api: Api) -> None:
    """Those that were sent after it, as the SDK does, do not wait for it."""
    _, own = await model(api)
    assert (await ask(api, "optim_step", model_id=own, seq_id=1, adam_params={"learning_rate": -1}))[0] == 422
    assert (await ask(api, "save_weights", model_id=own, seq_id=2, overwrite=5))[0] == 422
    assert (await ask(api, "load_weights", model_id=own, seq_id=3, optimizer=float("nan")))[0] == 422
    later = (await step(api, own, 4))[1]["request_id"]
    assert (await result(api, later))[1]["metrics"]["step"] == 1.0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("ends", ["unload_model", "finish"])
async def test_a_request_whose_turn_cannot_come_fails(api: Api, ends: str) -> None:
    session, own = await model(api)
    early = (await step(api, own, 9))[1]["request_id"]
    body: dict[str, Any] = {"model_id": own} if ends == "unload_model" else {}
    await ask(api, ends if body else f"sessions/{session}/finish", **body)
    assert "unloaded" in (await result(api, early))[1]["error"]
    gc.collect()  # a coroutine that was never awaited is a warning


@pytest.mark.asyncio(loop_scope="module")
async def test_too_many_early_requests_are_refused(api: Api) -> None:
    _, own = await model(api)
    statuses = [(await step(api, own, number))[0] for number in range(2, 2 + 257)]
    assert statuses == [200] * 256 + [429]


@pytest.mark.asyncio(loop_scope="module")
async def test_another_project_cannot_tell_what_there_is(api: Api) -> None:
    keys = []
    for project in ("one", "two"):
        made = {"project": project, "scopes": ["train", "generate"]}
        _, key = await api.call("POST", "/admin/keys", json=made, headers={"Authorization": f"Bearer {OWNER}"})
        keys.append(key["secret"])
    session, own = await model(api, keys[0])
    asked = {"session_id": session, "model_seq_id": 0, "base_model": api.service.engine.spec.name}
    assert (await ask(api, "create_model", keys[0], **asked))[0] == 200
    assert (await ask(api, "create_model", keys[1], **asked))[0] == 410
    assert (await ask(api, "retrieve_future", keys[1], request_id=f"{own}:0"))[0] == 410
    assert (await ask(api, "optim_step", keys[1], model_id=own, seq_id=1, adam_params={}))[0] == 404


async def test_results_that_nobody_retrieves_are_bounded_by_their_bytes() -> None:
    async def computed(size: int) -> bytes:
        return bytes(size)

    futures = Futures(most_bytes=100)
    for number, size in enumerate((60, 30, 200, 20, 70)):
        futures.start(f"r{number}", computed(size))
        await asyncio.sleep(0)  # computed
        await asyncio.sleep(0)  # counted
    with pytest.raises(SessionEnded, match="dropped for later ones"):
        await futures.retrieve("r0")
    assert ["r2" in futures, "r3" in futures, "r4" in futures] == [False, True, True]
    assert await futures.retrieve("r4") == bytes(70)
    await futures.close()


async def test_an_error_that_nobody_retrieves_does_not_hold_its_request() -> None:
    class Body:
        pass

    async def refused(body: Body) -> bytes:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise InvalidRequest("expected y") from error

    futures, body = Futures(), Body()
    held = weakref.ref(body)
    futures.start("r", refused(body))
    del body
    await asyncio.sleep(0)  # refused
    await asyncio.sleep(0)  # noticed
    assert held() is None
    with pytest.raises(InvalidRequest, match="expected y"):
        await futures.retrieve("r")
    futures.start("not begun", refused(Body()))
    futures.cancel("not begun")
    with pytest.raises(SessionEnded, match="was cancelled"):
        await futures.retrieve("not begun")
