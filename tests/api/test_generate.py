"""`POST /generate` over a fake engine: texts, streams, stops, ends of all kinds."""

from __future__ import annotations

import asyncio

import pytest

from coserve.core.link.generation import CancelRequest, Generate, RequestFailed
from coserve.core.types import Slo
from tests.support.api_server import REPLY, Api, read_events, tokenizer
from tests.support.fake_engine import write_peft


async def test_a_whole_answer(api: Api) -> None:
    body = await api.answered(200, "POST", "/generate", json={"prompt": "hello", "seed": 7, "temperature": 0.5})
    (choice,) = body["choices"]
    assert choice["text"] == REPLY
    assert choice["token_ids"] == api.reply
    assert choice["finish_reason"] == "length"
    prompt = tokenizer().encode("hello")
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(api.reply),
        "total_tokens": len(prompt) + len(api.reply),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["timing"]["e2e"] >= body["timing"]["ttft"] >= body["timing"]["queue"] >= 0
    assert (body["adapter"], body["version"], body["seed"]) == (None, None, 7)
    (sent,) = await api.engine.saw(Generate)
    assert isinstance(sent, Generate)
    assert (sent.prompt, sent.sampling.seed, sent.sampling.temperature) == (tuple(prompt), 7, 0.5)
    assert sent.slo == Slo(ttft=2.0, tpot=0.2), "a CPU's"


async def test_token_ids_and_chats_are_prompts_too(api: Api) -> None:
    assert (await api.call("POST", "/generate", json={"prompt": [5, 6]}))[0] == 200
    chat = [{"role": "user", "content": "hi"}]
    assert (await api.call("POST", "/generate", json={"messages": chat}))[0] == 200
    ids, chatted = await api.engine.saw(Generate, 2)
    assert isinstance(ids, Generate)
    assert isinstance(chatted, Generate)
    assert ids.prompt == (5, 6)
    assert list(chatted.prompt) == tokenizer().chat(chat)


async def test_choices_have_seeds_of_their_own(api: Api) -> None:
    body = await api.answered(200, "POST", "/generate", json={"prompt": "x", "n": 3, "seed": 5, "logprobs": 1})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {REPLY}
    assert len(body["choices"][0]["logprobs"]) == len(api.reply)
    assert body["choices"][0]["logprobs"][0]["top"][0]["token_id"] == api.reply[0]
    assert body["usage"]["completion_tokens"] == 3 * len(api.reply)
    sent = await api.engine.saw(Generate, 3)
    assert [message.sampling.seed for message in sent if isinstance(message, Generate)] == [5, 6, 7]


async def test_a_stream_is_the_whole_answer_in_pieces(api: Api) -> None:
    async with api.http.post("/generate", json={"prompt": "x", "stream": True, "n": 2}) as response:
        assert response.content_type == "text/event-stream"
        *chunks, end = [event["data"] for event in read_events(await response.text())]
    assert end == "[DONE]"
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == REPLY
        assert [chunk["finish_reason"] for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
    assert [chunk["usage"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["timing"]["ttft"] >= 0


async def test_a_stop_text_ends_the_choice_and_its_tokens(api: Api) -> None:
    body = await api.answered(200, "POST", "/generate", json={"prompt": "x", "stop": [" on", "dog"]})
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the cat sat", "stop", " on")
    assert await api.engine.saw(CancelRequest)
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) < len(api.reply)


async def test_a_stop_text_waits_for_min_tokens(api: Api) -> None:
    request = {"prompt": "x", "stop": "the", "min_tokens": len(api.reply)}
    _, body = await api.call("POST", "/generate", json=request)
    assert body["choices"][0]["text"] == REPLY


async def test_a_stop_token_is_no_text(api: Api) -> None:
    stop = api.reply[2]
    _, body = await api.call("POST", "/generate", json={"prompt": "x", "stop_token_ids": [stop]})
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == tokenizer().decode(api.reply[:2])
    assert choice["token_ids"] == api.reply[:3]
    api.reply = [*api.reply[:2], 0]
    _, body = await api.call("POST", "/generate", json={"prompt": "x"})
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)


async def test_a_client_that_leaves_frees_its_request(api: Api) -> None:
    api.engine.go_requests.clear()
    for stream in (False, True):
        task = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x", "n": 2, "stream": stream}))
        await api.engine.saw(Generate, 4 if stream else 2)
        task.cancel()
        await api.engine.saw(CancelRequest, 4 if stream else 2)
    api.engine.go_requests.set()
    await api.works()


async def test_a_client_that_leaves_in_mid_stream(api: Api) -> None:
    api.engine.stall_after = 2
    async with api.http.post("/generate", json={"prompt": "x", "stream": True}) as response:
        await response.content.readline()
        response.close()
        await api.engine.saw(CancelRequest)
    api.engine.stall_after = None
    await api.works()


async def test_a_full_queue_says_when_to_come_back(api: Api) -> None:
    api.engine.go_requests.clear()
    waiting = [asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x"})) for _ in range(4)]
    await api.engine.saw(Generate, 4)
    async with api.http.post("/generate", json={"prompt": "x"}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "queue_full"
    api.engine.go_requests.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 4
    await api.works()


async def test_what_the_engine_refuses_has_its_own_status(api: Api) -> None:
    for code, status in (("queue_full", 429), ("prompt_too_long", 400), ("adapter_not_found", 404), ("odd", 500)):
        api.engine.fail_requests = RequestFailed(id="", code=code, message="no /secret")
        got, body = await api.call("POST", "/generate", json={"prompt": "x", "stream": True})
        assert got == status
        assert body["error"]["message"] == ("internal error" if status == 500 else "no /secret")
    api.engine.fail_requests = None
    await api.works()


async def test_the_engines_estimate_is_when_to_come_again(api: Api) -> None:
    for seconds, header in ((None, "1"), (0.2, "1"), (6.2, "7")):
        api.engine.fail_requests = RequestFailed(id="", code="queue_full", message="full", retry_after=seconds)
        async with api.http.post("/generate", json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, header)


async def test_requests_that_would_be_late_get_429_and_are_counted(api: Api) -> None:
    shed = RequestFailed(id="", code="overloaded", message="too late", retry_after=6.2)
    for path in ("/generate", "/v1/completions"):
        api.engine.fail_requests = shed
        async with api.http.post(path, json={"prompt": "x", "stream": True}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
            assert (await response.json())["error"]["code"] == "overloaded"
    api.engine.fail_requests = None
    assert "coserve_requests_shed_total 2.0" in await (await api.http.get("/metrics")).text()


async def test_an_engine_that_dies_ends_its_requests_clearly(api: Api) -> None:
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(api.call("POST", "/generate", json={"prompt": "x"}))
    await api.engine.saw(Generate)
    await api.engine.die()
    status, body = await waiting
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    status, body = await api.call("GET", "/health")
    assert (status, body["status"], body["engine_alive"]) == (503, "starting", False)
    assert (await api.call("POST", "/generate", json={"prompt": "x"}))[0] == 503
    await api.start_engine()
    await api.works()
    status, body = await api.call("GET", "/health")
    assert (status, body["status"], body["engine_restarts"]) == (200, "ready", 1)


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(api: Api) -> None:
    api.engine.stall_after = 2
    async with api.http.post("/generate", json={"prompt": "x", "stream": True}) as response:
        first = await response.content.readline()
        await api.engine.die()
        text = (first + await response.content.read()).decode()
    last = read_events(text)[-1]
    assert last["event"] == "error"
    assert last["data"]["error"]["code"] == "engine_unavailable"


async def test_a_request_names_its_latency_targets(api: Api) -> None:
    targets = {"slo_ttft": 0.5, "slo_tpot": 0.03, "slo_e2e": 4.0}
    assert (await api.call("POST", "/generate", json={"prompt": [5], **targets}))[0] == 200
    assert (await api.call("POST", "/v1/completions", json={"prompt": [5], **targets}))[0] == 200
    for sent in await api.engine.saw(Generate, 2):
        assert isinstance(sent, Generate) and sent.slo == Slo(ttft=0.5, tpot=0.03, e2e=4.0, shed=True, shed_e2e=True)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"prompt": [5], "n": 3}),
        ("/v1/completions", {"prompt": [[5], [6], [7]]}),
        ("/v1/completions", {"prompt": [[5], [6], [7]], "stream": True}),
    ],
)
async def test_only_the_last_of_several_sequences_may_be_refused_and_the_call_with_it(
    api: Api, path: str, asked: dict[str, object]
) -> None:
    asked = asked | {"slo_ttft": 0.5, "slo_e2e": 4.0}
    async with api.http.post(path, json=asked) as response:
        assert response.status == 200
        await response.read()
    sent = [each for each in await api.engine.saw(Generate, 3) if isinstance(each, Generate)]
    assert [(each.slo.shed, each.slo.shed_e2e) for each in sent] == [(False, False), (False, False), (True, True)]
    assert [each.choices for each in sent] == [(), (), (sent[0].id, sent[1].id)]
    assert [each.slo.ttft for each in sent] == [0.5] * 3
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(api.call("POST", path, json=asked))
    last = (await api.engine.saw(Generate, 6))[-1]
    assert isinstance(last, Generate)
    api.engine.link.send(RequestFailed(id=last.id, code="overloaded", message="too late", retry_after=6.2))
    status, body = await waiting
    assert (status, body["error"]["code"]) == (429, "overloaded")
    cancelled = await api.engine.saw(CancelRequest, 2)
    assert sorted(each.id for each in cancelled if isinstance(each, CancelRequest)) == sorted(last.choices)
    assert 'coserve_requests_total{finish_reason="cancelled"} 0.0' in await (await api.http.get("/metrics")).text()
    api.engine.go_requests.set()


@pytest.mark.parametrize("asked", [{}, {"slo_class": "batch"}])
async def test_prompts_that_are_never_late_go_together_too(api: Api, asked: dict[str, object]) -> None:
    """In a full queue one of them gives way only with the others."""
    assert (await api.call("POST", "/v1/completions", json={"prompt": [[5], [6]], **asked}))[0] == 200
    first, last = [each for each in await api.engine.saw(Generate, 2) if isinstance(each, Generate)]
    assert (first.choices, last.choices, last.slo.shed) == ((), (first.id,), False)


async def test_a_prompt_that_is_wrong_ends_those_that_wait_for_it(api: Api) -> None:
    assert api.config.data_root is not None
    write_peft(api.config.data_root / "peft", api.base)
    assert (await api.call("POST", "/adapters", json={"name": "poet", "path": "peft"}))[0] == 201
    body = {"model": "poet", "prompt": [[5], [6] * 500, [7]], "slo_ttft": 0.5}
    status, answer = await api.call("POST", "/v1/completions", json=body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await api.call("DELETE", "/adapters/poet"))[0] == 200, "nobody uses it"
    assert not [each for each in api.engine.told if isinstance(each, Generate | CancelRequest)]
    await api.works()


async def test_a_class_of_requests_is_named_by_slo_class_or_by_openais_service_tier(api: Api) -> None:
    for body in (
        {"slo_class": "batch"},
        {"service_tier": "flex"},
        {"service_tier": "flex", "slo_class": "interactive"},
    ):
        assert (await api.call("POST", "/v1/completions", json={"prompt": [5], **body}))[0] == 200
    assert (await api.call("POST", "/generate", json={"prompt": [5], "slo_class": "batch"}))[0] == 200
    status, answer = await api.call("POST", "/generate", json={"prompt": [5], "slo_class": "urgent"})
    assert (status, answer["error"]["field"]) == (400, "slo_class")
    sent = await api.engine.saw(Generate, 4)
    assert [isinstance(one, Generate) and one.slo.batch for one in sent] == [True, True, False, True]
