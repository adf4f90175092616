"""The native form of training sessions, over a real engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from coserve.api.sessions import handlers
from coserve.client import AsyncClient
from coserve.core.errors import InvalidRequest, NotFound, SessionEnded
from coserve.data.corpus.batch import examples_out
from tests.support.api_server import Api, attempt, leap
from tests.support.cutting import Cutter
from tests.support.real_server import serve_real

EXAMPLES = [{"tokens": [5, 6, 7, 8], "labels": [6, 7, 8, 9], "weights": [1, 1, 1, 1]}]


async def opened(api: Api, **body: object) -> str:
    session = await api.answered(200, "POST", "/sessions", json={"r": 4} | body)
    return f"/sessions/{session['id']}"


async def step(api: Api, session: str) -> float:
    computed = await api.answered(200, "POST", f"{session}/forward_backward", json={"examples": EXAMPLES})
    assert [len(row) for row in computed["log_probs"]] == [4]
    await api.answered(200, "POST", f"{session}/optim_step", json={"learning_rate": 0.01})
    loss: float = computed["loss"]
    return loss


async def refused(
    api: Api, status: int, code: str, method: str, path: str, field: str | None = None, **body: object
) -> None:
    error = await api.error(status, code, method, path, **body)
    if field is not None:
        assert error["field"] == field, error


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
        await refused(api, 400, "invalid_request", "POST", f"{session}/save", "name", json={"name": "kept"})
        await refused(api, 400, "invalid_request", "POST", f"{session}/publish", "adapter", json={"adapter": "bundled"})
        await refused(api, 400, "invalid_request", "POST", "/sessions", "r", json={"r": 0})
        await refused(api, 400, "invalid_request", "POST", "/sessions", "targets", json={"targets": ["k"]})
        settings = {"examples": EXAMPLES, "loss": "ppo", "config": {"x": 1}}
        await refused(api, 400, "invalid_request", "POST", f"{session}/forward", "config", json=settings)
        large = {"examples": [EXAMPLES[0] | {"labels": [6, 7, 8, 9999]}]}
        await refused(api, 400, "invalid_request", "POST", f"{session}/forward", "examples", json=large)
        short = {"examples": [{"tokens": [5, 6], "labels": [6]}]}
        await refused(api, 400, "invalid_request", "POST", f"{session}/forward", json=short)
        unknown = {"examples": EXAMPLES, "loss": "x"}
        await refused(api, 400, "invalid_request", "POST", f"{session}/forward", "loss", json=unknown)
        await refused(api, 404, "not_found", "POST", "/sessions", "state", json={"state": "a/b"})
        assert (await api.call("DELETE", session))[0] == 200
        await refused(api, 404, "not_found", "GET", session)


async def test_numbers_that_are_not_finite_are_the_clients_errors(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        session = await opened(api)
        await refused(api, 400, "invalid_request", "POST", f"{session}/optim_step", "eps", json={"eps": 0})
        huge = {"examples": [EXAMPLES[0] | {"weights": [3e38] * 4}]}
        await api.answered(200, "POST", f"{session}/forward_backward", json=huge)
        await refused(api, 422, "non_finite_loss", "POST", f"{session}/optim_step", json={})
        await step(api, session)
        for _ in range(12):
            decay = {"learning_rate": 100, "weight_decay": 100}
            await api.answered(200, "POST", f"{session}/optim_step", json=decay)
        await refused(api, 422, "non_finite_loss", "POST", f"{session}/publish", json={"adapter": "mine"})
        await refused(api, 422, "non_finite_loss", "POST", f"{session}/save", json={"name": "mine"})
        await refused(api, 404, "not_found", "POST", "/sessions", "state", json={"state": f"{session[10:]}/mine"})


async def test_a_session_ends_without_a_sign_of_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_real(tmp_path, session_timeout=200.0, max_sessions=1) as api:
        session = await opened(api)
        await refused(api, 429, "queue_full", "POST", "/sessions", json={})
        leap(monkeypatch, 150.0)
        assert (await api.call("GET", session))[0] == 200
        leap(monkeypatch, 60.0)
        while (await api.call("GET", session))[0] == 200:
            pass
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


async def test_the_sdks_session_samples_and_learns_in_turn(tmp_path: Path) -> None:
    """A policy gradient on own samples: on the policy the ratios are 1, those of tokens and of sequences."""
    async with serve_real(tmp_path) as api, AsyncClient(api.url, read_timeout=120) as client:
        async with await client.training_session(r=4, alpha=8, seed=2) as session:
            await session.publish("policy")
            prompt = [5, 6, 7]
            answer = await client.generate(prompt, adapter="policy", max_tokens=6, logprobs=0, seed=1, ignore_eos=True)
            (choice,) = answer.choices
            sampled = [entry.logprob for entry in choice.logprobs or ()]
            example = {
                "tokens": prompt + choice.token_ids[:-1],
                "after": list(range(2, 8)),
                "labels": choice.token_ids,
                "sampled": sampled,
                "advantages": [0.5] * 6,
                "ratio_mask": [1.0] * 6,
            }
            for loss in ("importance_sampling", "gspo"):
                found = await session.forward([example], loss)
                assert found.loss == pytest.approx(-3.0, abs=1e-3)
                assert found.log_probs[0] == pytest.approx(sampled, abs=1e-4)
            await session.forward_backward([example], "gspo", {"clip_high_threshold": 1.2})
            stepped = await session.optim_step(0.05, grad_clip_norm=1.0)
            assert (stepped.step, stepped.grad_norm > 0) == (1, True)
            learned = await session.forward([example], "importance_sampling")
            assert sum(learned.log_probs[0]) > sum(sampled)
            state = await session.save("one")
            assert (await session.publish("policy")).version == 2
            with pytest.raises(InvalidRequest, match="ratio_mask of each target"):
                await session.forward([{**example, "ratio_mask": None}], "gspo")
            with pytest.raises(InvalidRequest, match=r"examples\[0\].lables"):
                await session.forward([{"tokens": [5], "lables": [6]}])
        with pytest.raises(NotFound):
            await session.forward([example])
        async with await client.training_session(state=state) as again:
            assert again.info.rank == 4
            assert (await again.forward([example], "importance_sampling")).loss == pytest.approx(learned.loss, rel=1e-5)


async def test_a_session_that_is_closed_while_it_reads_a_state_ends(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        path = await opened(api)
        await api.answered(200, "POST", f"{path}/save", json={"name": "kept"})
        session = api.service.sessions.find(path.removeprefix("/sessions/"))
        assert session is not None
        load = api.service.sessions.load(session, (session.spec.id, "kept"), with_optimizer=True)
        loading = asyncio.create_task(load)
        await asyncio.sleep(0)
        api.service.sessions.close(session)
        async with asyncio.timeout(60):
            with pytest.raises(SessionEnded, match="was closed"):
                await loading


async def test_an_adapter_is_published_whole_or_not_at_all_whenever_its_client_leaves(tmp_path: Path) -> None:
    async with serve_real(tmp_path, cutter=Cutter()) as api:
        session = await opened(api)
        for at in range(1, 80):
            call = "POST", f"{session}/publish", {"json": {"adapter": f"mine-{at}"}}
            status, cut = await attempt(api, call, at, late=True)
            listed = (await api.answered(200, "GET", "/adapters"))["data"]
            assert {each["id"] for each in listed} == {ref.id for ref in api.folder.adapter_refs()}
            if not cut:
                break
        assert (status, at > 5) == (200, True)


async def test_thousands_of_small_examples_are_not_encoded_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,384 examples took the loop 66 ms."""
    threads = []
    encode = examples_out
    monkeypatch.setattr(
        handlers, "examples_out", lambda found: (threads.append(threading.get_ident()), encode(found))[1]
    )
    async with serve_real(tmp_path) as api:
        await step(api, await opened(api))
        assert threads and threading.get_ident() not in threads
        await refused(api, 404, "not_found", "POST", "/sessions/unknown/forward", data=b"[")
