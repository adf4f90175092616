"""Anthropic's `/v1/messages` by the real `anthropic` client, whole and streamed, and back again as messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coserve.api.anthropic.handlers import anthropic_error
from coserve.core.errors import EngineUnavailable, PromptTooLong
from tests.support.api_server import Api, serve_api, tokenizer, with_template
from tests.support.chat_templates import PHI_3, QWEN3

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

# Imported where it is used: it takes a second, in every process that collects tests.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("anthropic") is None, reason="no anthropic")]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
THOUGHT, CALLED = "<think>\nHm.\n</think>\n\nYes.", f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
KINDS = {
    "Just a text.": ["text"],
    THOUGHT: ["thinking", "text"],
    CALL: ["tool_use"],
    CALLED: ["thinking", "text", "tool_use", "tool_use"],
}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=1024) as api:
        yield api


@pytest.fixture
async def client(api: Api) -> AsyncIterator[AsyncAnthropic]:
    import anthropic

    url = api.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    question = [{"role": "user", "content": "Rain?"}]
    return {"model": "fake", "max_tokens": 200, "messages": question} | fields


@pytest.mark.parametrize("reply", KINDS, ids=["text", "thought", "call", "all"])
async def test_a_stream_is_the_whole_answer(api: Api, client: AsyncAnthropic, reply: str) -> None:
    api.reply = tokenizer().encode(reply, add_special=False)
    body = asked(tools=[WEATHER], system="Be kind.")
    whole = await client.messages.create(**body)
    assert [block.type for block in whole.content] == KINDS[reply]
    assert [block.input for block in whole.content if block.type == "tool_use"] == [{"city": "Bonn"}] * reply.count(
        CALL
    )
    generated = await api.last_request()
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(generated.prompt), len(api.reply))
    assert generated.sampling.max_tokens == 200
    counted = await client.messages.count_tokens(**{name: body[name] for name in body if name != "max_tokens"})
    assert counted.input_tokens == whole.usage.input_tokens
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    ids = {"id", "parsed_output"}
    exclude = {"id": True, "content": {"__all__": ids}}
    assert streamed.model_dump(exclude=exclude) == whole.model_dump(exclude=exclude)


async def test_what_was_answered_is_sent_back(api: Api, client: AsyncAnthropic) -> None:
    api.reply = tokenizer().encode(CALLED, add_special=False)
    first = await client.messages.create(**asked(tools=[WEATHER]))
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "dry"} for call in calls]
    results[1]["content"] = [{"type": "text", "text": "dry", "cache_control": {"type": "ephemeral"}}]
    chat: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
    ]
    await client.messages.create(**asked(messages=chat, tools=[WEATHER], system=[{"type": "text", "text": "Be kind."}]))
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    expected = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [called | {"id": call.id} for call in calls],
        },
        *({"role": "tool", "content": "dry", "tool_call_id": call.id} for call in calls),
        {"role": "user", "content": "And now?"},
    ]
    function = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "description": "of a city"}}
    rendered = with_template(QWEN3).chat(expected, tools=[function])
    assert await api.last_prompt() == tokenizer().decode(rendered, skip_special=False)


async def test_options_reach_the_engine(api: Api, client: AsyncAnthropic) -> None:
    api.reply = tokenizer().encode("One. Two. Three.", add_special=False)
    drawn = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}  # the newest client has no parameters for them
    answer = await client.messages.create(**asked(stop_sequences=["Two"], extra_body=drawn))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Two")
    sampling = (await api.last_request()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    cut = await client.messages.create(**asked(max_tokens=2, thinking={"type": "disabled"}))
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 2)
    assert (await api.last_prompt()).endswith("<think>\n\n</think>\n\n"), "the template's own form of no reasoning"
    await client.messages.create(**asked(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}))
    assert (await api.last_request()).grammar is not None
    await client.messages.create(**asked(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}))
    assert (await api.last_request()).grammar is not None
    begun = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "I think"}]
    await client.messages.create(**asked(messages=begun))
    assert (await api.last_prompt()).endswith("I think"), "the answer goes on where the last message ends"


async def test_thinking_is_asked_of_templates_that_have_it_alone(tmp_path: Path) -> None:
    import anthropic

    async with serve_api(tmp_path, tokens=with_template(PHI_3), context=1024) as api:
        url = api.url
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            whole = await client.messages.create(**asked(thinking={"type": "adaptive"}))
            question = {name: value for name, value in asked().items() if name != "max_tokens"}
            counted = await client.messages.count_tokens(**question, thinking={"type": "adaptive"})
            assert counted.input_tokens == whole.usage.input_tokens


async def test_a_call_without_arguments_and_hidden_thoughts_beside_a_field_that_is_null(client: AsyncAnthropic) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "text", "text": "dry", "citations": None}],
    }
    thought = {"type": "redacted_thinking", "data": "x"}
    turns = [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    messages = [*asked()["messages"], *turns]
    await client.messages.create(**asked(messages=messages, extra_body={"unknown": None}))


async def test_what_is_not_supported_is_refused_by_name(client: AsyncAnthropic) -> None:
    import anthropic

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    for fields, name in (
        ({"messages": [{"role": "user", "content": [image]}]}, "got 'image'; coserve reads text alone"),
        ({"messages": [{"role": "user", "content": [result]}]}, "image"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "other"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "x"}, "container"),
        ({"max_tokens": 5000}, "max_tokens: expected at most the context"),
        ({"mesages": [1]}, "mesages"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=name) as caught:
            await client.messages.create(**asked(extra_body=fields))
        assert caught.value.body["type"] == "error", caught.value
        assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**asked(model="nobody"))
    with pytest.raises(anthropic.NotFoundError, match="batches"):
        await client.messages.batches.list()


def test_errors_have_the_types_and_words_that_clients_read() -> None:
    error = anthropic_error(PromptTooLong("too long", length=9, context=8)).error
    assert (error.type, error.message) == ("invalid_request_error", "prompt is too long: 9 tokens > 7 maximum")
    assert anthropic_error(EngineUnavailable("no engine")).error.type == "overloaded_error"


async def test_a_stream_that_fails_says_so(api: Api, client: AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.APIStatusError, match=r"engine"):
        async with client.messages.stream(**asked(max_tokens=500)) as stream:
            async for event in stream:
                if event.type == "text":
                    await api.engine.die()
