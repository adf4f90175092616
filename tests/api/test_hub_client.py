"""huggingface_hub's InferenceClient, which is told the daemon's address alone, against the API over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, OverloadedError, ValidationError

from coserve.core.link.generation import RequestFailed
from coserve.core.types import AdapterRef
from tests.support.api_server import REPLY, Api, add_adapter, tokenizer

PROMPT = "hello there"
IDS = tokenizer().encode(PROMPT)


@pytest.fixture
def url(api: Api) -> str:
    return api.url


@pytest.fixture
async def hub(url: str) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(base_url=url, timeout=120) as client:
        yield client


async def test_a_text(api: Api, url: str, hub: AsyncInferenceClient) -> None:
    def use() -> tuple[Any, Any, list[Any]]:
        with InferenceClient(base_url=url, timeout=120) as client:
            text = client.text_generation(PROMPT)
            details = client.text_generation(PROMPT, details=True, decoder_input_details=True, top_n_tokens=1)
            return text, details, list(client.text_generation(PROMPT, stream=True))

    sync = await asyncio.to_thread(use)
    text = await hub.text_generation(PROMPT)
    details = await hub.text_generation(PROMPT, details=True, decoder_input_details=True, top_n_tokens=1)
    parts = [part async for part in await hub.text_generation(PROMPT, stream=True)]
    for told, whole, pieces in (sync, (text, details, parts)):
        assert told == REPLY
        assert "".join(pieces) == REPLY
        assert whole.generated_text == REPLY
        assert [token.id for token in whole.details.tokens] == api.reply
        assert [token.id for token in whole.details.prefill] == IDS
        assert [tops[0]["id"] for tops in whole.details.top_tokens] == api.reply
    assert await hub.text_generation(PROMPT, return_full_text=True) == PROMPT + REPLY


async def test_a_stream_with_details(hub: AsyncInferenceClient, api: Api) -> None:
    add_adapter(api, "poet")
    stream = await hub.text_generation(PROMPT, stream=True, details=True, adapter_id="poet", stop=["sat"])
    *_, last = [event async for event in stream]
    assert last.generated_text == "the cat sat"
    assert (last.details.finish_reason, last.details.input_length) == ("stop_sequence", len(IDS))
    assert (await api.last_request()).adapter == AdapterRef("poet", 1)


async def test_a_chat_without_a_model(api: Api, url: str, hub: AsyncInferenceClient) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]

    for path, model in (("", None), ("/", "tgi"), ("/v1", None), ("/v1/", "")):
        async with AsyncInferenceClient(base_url=url + path, timeout=120) as client:
            answer = await client.chat_completion(messages, model=model, tool_choice="auto", logprobs=True)
            told = await client.chat.completions.create(messages, model=model, seed=1)
        for each in (answer, told):
            assert each.choices[0].message.content == REPLY
            assert each.model == api.base.name
            assert (await api.last_request()).adapter is None
        messages += [answer.choices[0].message, {"role": "user", "content": "hi"}]  # with its nulls
    stream = await hub.chat_completion(messages[:1], stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage.completion_tokens == len(api.reply)


async def test_a_chat_with_an_adapter(api: Api, hub: AsyncInferenceClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for name in ("poet", "tgi"):  # an adapter by that name is the one that is meant
        add_adapter(api, name)
        answer = await hub.chat_completion(messages, model=name)
        assert (answer.model, (await api.last_request()).adapter) == (name, AdapterRef(name, 1))


async def test_errors(api: Api, url: str, hub: AsyncInferenceClient) -> None:
    grammar = {"type": "regex", "value": "a+"}
    await hub.text_generation(PROMPT, truncate=5, grammar=grammar)
    assert (await api.last_request()).grammar is not None
    for asked in ({"typical_p": 0.5}, {"adapter_id": "nobody"}):
        with pytest.raises(ValidationError if "typical_p" in asked else (ValidationError, HfHubHTTPError)):
            await hub.text_generation(PROMPT, **asked)
        with pytest.raises((ValidationError, HfHubHTTPError)):
            [part async for part in await hub.text_generation(PROMPT, stream=True, **asked)]
    with pytest.raises(HfHubHTTPError) as caught:
        await hub.chat_completion([{"role": "user", "content": "hi"}], model="nobody")
    assert caught.value.response.status_code == 404
    api.engine.fail_requests = RequestFailed(id="", code="queue_full", message="full")
    with pytest.raises(OverloadedError):
        await hub.text_generation(PROMPT)
    api.engine.fail_requests = RequestFailed(id="", code="internal_error", message="x")
    with pytest.raises(GenerationError):
        await hub.text_generation(PROMPT)


async def test_what_it_asks_of_the_server(api: Api, url: str) -> None:
    client = InferenceClient(url, provider="hf-inference", timeout=120)
    info = await asyncio.to_thread(client.get_endpoint_info)
    assert (info["model_id"], info["model_sha"]) == (api.base.name, api.base.fingerprint)
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (api.base.context - 1, api.base.context)
    assert await asyncio.to_thread(client.health_check) is True
