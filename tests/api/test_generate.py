"""`POST /generate` over a fake engine: texts, streams, stops, targets, ends of all kinds."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.api.generation.in_flight import targets_of
from coserve.api.generation.prompt_group import PromptGroup
from coserve.api.generation.request_state import RequestState
from coserve.config import Config
from coserve.core.errors import EngineUnavailable
from coserve.core.link.generation import CancelRequest, Generate, RequestFailed
from coserve.core.sampling import SamplingDefaults, SamplingParams
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.types import Slo
from tests.support.api_server import REPLY, Api, read_events, serve_api, tokenizer
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
    assert (sent.prompt, sent.sampling.seed, sent.sampling.temperature) == (tuple(prompt), 7, 0.5)
    assert sent.slo == Slo(ttft=2.0, tpot=0.2), "a CPU's"


async def test_choices_have_seeds_of_their_own(api: Api) -> None:
    body = await api.answered(200, "POST", "/generate", json={"prompt": "x", "n": 3, "seed": 5, "logprobs": 1})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {REPLY}
    assert len(body["choices"][0]["logprobs"]) == len(api.reply)
    assert body["choices"][0]["logprobs"][0]["top"][0]["token_id"] == api.reply[0]
    assert body["usage"]["completion_tokens"] == 3 * len(api.reply)
    sent = await api.engine.saw(Generate, 3)
    assert [message.sampling.seed for message in sent] == [5, 6, 7]


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


async def test_the_engines_estimate_is_when_to_come_again_and_the_late_are_counted(api: Api) -> None:
    for path, code, seconds, header in (
        ("/generate", "queue_full", None, "1"),
        ("/generate", "queue_full", 0.2, "1"),
        ("/generate", "overloaded", 6.2, "7"),
        ("/v1/completions", "overloaded", 6.2, "7"),
    ):
        api.engine.fail_requests = RequestFailed(id="", code=code, message="too late", retry_after=seconds)
        async with api.http.post(path, json={"prompt": "x", "stream": True}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, header)
            assert (await response.json())["error"]["code"] == code
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
        assert sent.slo == Slo(ttft=0.5, tpot=0.03, e2e=4.0, shed=True, shed_e2e=True)


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
    sent = await api.engine.saw(Generate, 3)
    assert [(each.slo.shed, each.slo.shed_e2e) for each in sent] == [(False, False), (False, False), (True, True)]
    assert [each.choices for each in sent] == [(), (), (sent[0].id, sent[1].id)]
    assert [each.slo.ttft for each in sent] == [0.5] * 3
    api.engine.go_requests.clear()
    waiting = asyncio.create_task(api.call("POST", path, json=asked))
    last = (await api.engine.saw(Generate, 6))[-1]
    api.engine.link.send(RequestFailed(id=last.id, code="overloaded", message="too late", retry_after=6.2))
    status, body = await waiting
    assert (status, body["error"]["code"]) == (429, "overloaded")
    cancelled = await api.engine.saw(CancelRequest, 2)
    assert sorted(each.id for each in cancelled) == sorted(last.choices)
    assert 'coserve_requests_total{finish_reason="cancelled"} 0.0' in await (await api.http.get("/metrics")).text()
    api.engine.go_requests.set()


@pytest.mark.parametrize("asked", [{}, {"slo_class": "batch"}])
async def test_prompts_that_are_never_late_go_together_too(api: Api, asked: dict[str, object]) -> None:
    """In a full queue one of them gives way only with the others."""
    assert (await api.call("POST", "/v1/completions", json={"prompt": [[5], [6]], **asked}))[0] == 200
    first, last = await api.engine.saw(Generate, 2)
    assert (first.choices, last.choices, last.slo.shed) == ((), (first.id,), False)


async def test_a_prompt_that_is_wrong_ends_those_that_wait_for_it(api: Api) -> None:
    write_peft(api.root / "peft", api.base)
    assert (await api.call("POST", "/adapters", json={"name": "poet", "path": "peft"}))[0] == 201
    body = {"model": "poet", "prompt": [[5], [6] * 500, [7]], "slo_ttft": 0.5}
    await api.error(400, "context_length_exceeded", "POST", "/v1/completions", json=body)
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
    assert [one.slo.batch for one in sent] == [True, True, False, True]


def state(id: str) -> RequestState:
    return RequestState(id, None, (1,), 0, 0.0, {}, False)


def sequence(id: str) -> Generate:
    slo = Slo(ttft=1.0, tpot=0.1, shed=True, shed_e2e=True)
    return Generate(id=id, prompt=(1,), sampling=SamplingParams(max_tokens=1), adapter=None, slo=slo)


async def test_of_a_call_that_somebody_left_nothing_is_sent() -> None:
    group = PromptGroup(2)
    assert not group.join(state("a"), [sequence("a0")])
    waiting = asyncio.create_task(group.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not group.join(state("b"), [sequence("b0")])


async def test_a_daemon_that_stops_sends_no_call_whose_prompts_still_waited(api: Api) -> None:
    group = PromptGroup(2)
    stream = partial(api.service.generation.stream, GenerateRequest(prompt=[5]), group=group)

    async def read() -> None:
        async for _ in stream():
            pass

    first = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    api.service.generation.stop(EngineUnavailable("it stops"))
    with pytest.raises(EngineUnavailable, match="it stops"):
        await read()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not api.engine.heard(Generate)


def targets(config: Config | None = None, device: str = "cuda:0", **fields: object) -> Slo:
    request = msgspec.convert({"prompt": "x"} | fields, GenerateRequest)
    return targets_of(request, config or Config(), device=device)


def test_the_defaults_are_those_of_the_device() -> None:
    assert targets() == Slo(ttft=1.0, tpot=0.05)
    assert targets(device="cpu") == Slo(ttft=2.0, tpot=0.2)
    assert targets(Config(slo_ttft=3.0), device="cpu") == Slo(ttft=3.0, tpot=0.2)


def test_a_class_has_its_targets_and_a_request_its_own() -> None:
    config = Config(slo_batch_ttft=90.0)
    assert targets(config, slo_class="batch") == Slo(ttft=90.0, tpot=0.5, batch=True)
    assert targets(config, slo_class="batch", slo_tpot=2.0) == Slo(ttft=90.0, tpot=2.0, batch=True)
    assert targets(config, slo_class="interactive", slo_tpot=0.03) == Slo(ttft=1.0, tpot=0.03, shed=True)


@pytest.mark.parametrize(
    ("fields", "shed"),
    [
        ({}, (False, True, False)),
        ({"slo_tpot": 0.1}, (False, True, False)),
        ({"slo_class": "batch"}, (False, True, False)),
        ({"slo_class": "interactive"}, (True, True, False)),
        ({"slo_ttft": 0.5}, (True, True, False)),
        ({"slo_e2e": 5.0, "slo_class": "batch"}, (False, True, False)),
        ({"slo_ttft": 0.5, "n": 2}, (True, True, False)),
    ],
)
def test_only_requests_that_ask_for_a_time_are_shed_unless_the_settings_say_otherwise(
    fields: dict[str, object], shed: tuple[bool, ...]
) -> None:
    assert tuple(targets(Config(shed=which), **fields).shed for which in ("explicit", "all", "off")) == shed
    assert not targets(Config(shed="all", policy="ets"), **fields).shed


def test_who_asks_for_the_time_of_the_whole_answer_is_not_shed_for_the_first_token() -> None:
    found = targets(Config(), slo_e2e=60.0)
    assert (found.shed, found.shed_e2e) == (False, True)
    assert not targets(Config(shed="off"), slo_e2e=60.0).shed_e2e


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "the"}),
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT),
    ],
)
async def test_the_bases_sampling_defaults_hold_where_a_request_sets_none(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    async with serve_api(tmp_path, sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9)) as api:
        answer = await api.answered(200, "POST", path, json=body)
        sampling = (await api.last_request()).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.9, 0.0)
        assert answer.get("top_p", 0.9) == 0.9
        await api.answered(200, "POST", path, json=body | {"temperature": 1.0, "top_p": 1.0})
        sampling = (await api.last_request()).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 20, 1.0)
