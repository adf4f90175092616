"""Answers say how many tokens of the prompt the prefix cache had, in the fields of OpenAI and Anthropic."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.api_server import Api

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
    status, answer = await api.call("POST", path, json=body)
    assert status == 200
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
