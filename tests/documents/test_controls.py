"""A document's job is paused, resumed, cancelled and left by its engine while it asks, over a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.generation import Generate
from coserve.core.link.jobs import StartJob
from tests.support.api_server import Api, add_adapter, serve_api
from tests.support.documents import ASKED

BODY = {
    "adapter": "a",
    "document": {"text": "The cat sat on the mat. The dog sat on the cat.", "questions_per_chunk": 4, "replay": 0},
    "training": {"steps": 2},
}


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncIterator[tuple[Api, str]]:
    """A job whose first questions are with the engine."""
    async with serve_api(tmp_path / "data", max_active_jobs=1, context=1024) as api:
        api.engine.go_requests.clear()
        job = await api.answered(202, "POST", "/finetune", json=BODY)
        await api.engine.saw(Generate, 4)
        yield api, job["id"]


async def state(api: Api, id: str) -> Any:
    return (await api.call("GET", f"/finetune/{id}"))[1]["state"]


async def test_a_paused_job_asks_no_more_until_it_is_resumed(asking: tuple[Api, str]) -> None:
    api, id = asking
    assert await state(api, id) == "running"
    status, job = await api.call("POST", f"/finetune/{id}/pause")
    assert (status, job["state"]) == (200, "paused")
    api.engine.go_requests.set()
    await api.works()  # the next request is answered, so the paused ones were dropped
    assert job["document"]["phase"] == "questions"
    _ = await api.answered(200, "POST", f"/finetune/{id}/resume")
    # The fake engine says the same to every question: there are too few different ones to learn from.
    events = await api.events(id)
    assert events[-1][1]["state"] == "failed"
    _, job = await api.call("GET", f"/finetune/{id}")
    assert job["error"]["code"] == "empty_corpus"


async def test_a_cancelled_job_leaves_nothing(asking: tuple[Api, str]) -> None:
    api, id = asking
    status, job = await api.call("POST", f"/finetune/{id}/cancel")
    assert (status, job["state"]) == (200, "cancelled")
    await api.settled()
    assert not api.folder.job(id).exists()
    api.engine.go_requests.set()
    await api.works()
    assert not api.engine.heard(StartJob)


async def test_jobs_ask_in_the_order_of_their_submission(asking: tuple[Api, str]) -> None:
    api, id = asking
    _, second = await api.call("POST", "/finetune", json=BODY | {"adapter": "b"})
    assert (await state(api, second["id"]), second["queue_position"]) == ("queued", 0)
    await api.call("POST", f"/finetune/{id}/cancel")
    await api.job_until(second["id"], "running")
    api.engine.go_requests.set()


async def test_questions_that_do_not_fit_are_noted(asking: tuple[Api, str]) -> None:
    """They have no room in a row for all of their answer, or for none of it."""
    api, id = asking
    await api.call("POST", f"/finetune/{id}/cancel")
    api.engine.go_requests.set()
    document = {"text": "The cat sat on the mat.", "replay": 0, **ASKED}
    for length, cut in ((64, 0), (4, 3)):
        body = {"adapter": "b", "document": document, "training": {"steps": 1, "max_length": length}}
        job = await api.answered(202, "POST", "/finetune", json=body)
        spec = (await api.engine.saw(StartJob, 1 if cut == 0 else 2))[-1].spec
        await api.settled()
        _, job = await api.call("GET", f"/finetune/{job['id']}")
        assert (spec.rows_cut, job["rows_cut"]) == (cut, cut)
        assert len([note for note in job["notes"] if note.startswith(f"{cut} questions")]) == (cut > 0)


async def test_a_chunk_leaves_room_for_the_prefix_of_its_generator(asking: tuple[Api, str]) -> None:
    api, _ = asking
    add_adapter(api, "wide", prefix_tokens=500)
    wide = BODY | {"document": BODY["document"] | {"generator": "adapter:wide"}}
    status, refused = await api.call("POST", "/finetune", json=wide)
    assert (status, refused["error"]["field"]) == (400, "document.chunk_tokens")
    assert refused["error"]["message"].startswith("expected at most 92, ")
    wide["document"]["chunk_tokens"] = 92
    await api.answered(202, "POST", "/finetune", json=wide)


async def test_the_adapter_that_asks_stays_until_its_job_ends(asking: tuple[Api, str]) -> None:
    api, _ = asking
    add_adapter(api, "asker")
    body = BODY | {"adapter": "b", "document": BODY["document"] | {"generator": "adapter:asker"}}
    job = await api.answered(202, "POST", "/finetune", json=body)
    for path in ("/adapters/asker", "/adapters/asker@1"):
        await api.error(409, "adapter_busy", "DELETE", path)
    await api.answered(200, "POST", f"/finetune/{job['id']}/cancel")
    await api.answered(200, "DELETE", "/adapters/asker")


async def test_the_next_engine_is_asked_what_the_last_one_left(asking: tuple[Api, str]) -> None:
    api, id = asking
    await api.engine.die()
    await api.service.disconnected()
    await api.start_engine()
    events = [event for _, event in await api.events(id)]
    states = [event["state"] for event in events if event["type"] == "state"]
    assert states == ["queued", "running", "queued", "running", "failed"]
