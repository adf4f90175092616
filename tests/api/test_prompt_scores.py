"""What answers say of a prompt: its log-probabilities and token ids, and how much of it the prefix cache had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.generation import Generate
from tests.support.api_server import REPLY, Api, read_events, serve_api, tokenizer

IDS = tokenizer().encode("hello there")


async def ask(api: Api, **body: Any) -> dict[str, Any]:
    return await api.answered(200, "POST", "/generate", json={"prompt": IDS, **body})


async def test_a_prompt_is_scored_beside_its_answer(api: Api) -> None:
    answer = await ask(api, prompt_logprobs=1, return_prompt_ids=True, n=2)
    assert answer["prompt_token_ids"] == IDS
    assert [entry["token_id"] for entry in answer["prompt_logprobs"]] == IDS
    assert "".join(entry["token"] for entry in answer["prompt_logprobs"]) == "hello there"
    first, *others = answer["prompt_logprobs"]
    assert (first["logprob"], first["top"]) == (None, [])
    assert all(entry["logprob"] == -0.25 for entry in others)
    assert others[0]["top"] == [{"token_id": IDS[1], "token": tokenizer().vocabulary.name(IDS[1]), "logprob": -0.25}]
    assert [choice["text"] for choice in answer["choices"]] == [REPLY, REPLY]
    sent = await api.engine.saw(Generate, 2)
    assert [m.sampling.prompt_logprobs for m in sent] == [1, None]  # once is enough


async def test_a_prompt_is_scored_alone(api: Api) -> None:
    answer = await ask(api, prompt_logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    assert len(answer["prompt_logprobs"]) == len(IDS)
    counts = {"prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS)}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


async def test_a_prompt_of_one_token_has_one_entry(api: Api) -> None:
    for max_tokens in (0, 1):
        answer = await ask(api, prompt=IDS[:1], prompt_logprobs=0, max_tokens=max_tokens)
        assert [entry["logprob"] for entry in answer["prompt_logprobs"]] == [None]


async def test_in_a_stream_the_prompt_comes_first(api: Api) -> None:
    body = {"prompt": IDS, "prompt_logprobs": 0, "return_prompt_ids": True, "stream": True}
    async with api.http.post("/generate", json=body) as response:
        chunks = [event["data"] for event in read_events(await response.text())][:-1]
    assert [chunk["prompt_token_ids"] for chunk in chunks if chunk["prompt_token_ids"]] == [IDS]
    assert [bool(chunk["token_ids"]) for chunk in chunks] == sorted(bool(chunk["token_ids"]) for chunk in chunks)
    assert sum(len(chunk["prompt_logprobs"] or []) for chunk in chunks) == len(IDS)


async def test_as_many_tokens_as_fit(api: Api) -> None:
    await ask(api, max_tokens=None)
    (sent,) = await api.engine.saw(Generate)
    assert sent.sampling.max_tokens == api.base.context - len(IDS)


async def test_what_ends_a_text_can_be_part_of_it(api: Api) -> None:
    answer = await ask(api, stop=["sat"], include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "the cat sat"
    answer = await ask(api, stop_token_ids=[api.reply[1]], include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "the c"
    answer = await ask(api, stop_token_ids=[api.reply[1]])
    assert answer["choices"][0]["text"] == "the"


async def test_special_tokens_are_text_if_wanted(api: Api) -> None:
    api.reply = [*api.reply[:1], 0]
    special = tokenizer().vocabulary.name(0)
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert (await ask(api, **shown))["choices"][0]["text"] == "the" + special
    assert (await ask(api))["choices"][0]["text"] == "the"


async def test_scores_in_flight_are_bounded(tmp_path: Path) -> None:
    body = {"prompt": IDS, "prompt_logprobs": 1}
    async with serve_api(tmp_path / "data", max_prompt_scores=2 * len(IDS)) as api:
        for _ in range(3):  # what one held is free again
            await ask(api, **body)
        await api.refused(429, "queue_full", "POST", "/generate", json=body | {"prompt_logprobs": 2})
        await api.refused(400, "invalid_request", "POST", "/generate", json={"prompt": IDS, "max_tokens": 0})


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def usages(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The usages of a stream in the order they came, and last that of the whole answer."""
    found = list[dict[str, Any]]()
    more = USAGE if path.startswith(("/v1/chat", "/v1/comp")) else {}
    async with api.http.post(path, json={**body, **more, "stream": True}) as response:
        assert response.status == 200, await response.text()
        for line in (await response.text()).splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                found += [place["usage"] for place in (event, *event.values()) if _has_usage(place)]
    answer = await api.answered(200, "POST", path, json=body)
    return [*found, answer["usage"]]


def _has_usage(place: object) -> bool:
    return isinstance(place, dict) and place.get("usage") is not None


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "hello", "return_prompt_ids": True}),
        ("/v1/completions", {"model": "fake", "prompt": "hello"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "fake", "input": "hello"}),
    ],
)
async def test_openais_usage_has_cached_tokens(api: Api, path: str, body: dict[str, Any], cached: int) -> None:
    api.engine.cached = cached
    found = await usages(api, path, body)
    assert len(found) > 1
    for usage in found:
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        assert details == {"cached_tokens": cached}


async def test_cached_tokens_of_all_prompts_are_added(api: Api) -> None:
    api.engine.cached = 1
    body = {"model": "fake", "prompt": ["hello", "you"], "n": 2}
    assert (await usages(api, "/v1/completions", body))[-2:] == 2 * [
        (await usages(api, "/v1/completions", body))[-1] | {"prompt_tokens_details": {"cached_tokens": 2}}
    ]


async def test_anthropics_counts_leave_cached_tokens_out_of_the_input(api: Api) -> None:
    counts = set()
    for api.engine.cached in (0, 1):
        for usage in await usages(api, "/v1/messages", {**CHAT, "max_tokens": 9}):
            assert usage["cache_read_input_tokens"] == api.engine.cached
            counts.add(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert len(counts) == 1
